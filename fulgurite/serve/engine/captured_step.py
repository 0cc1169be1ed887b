"""A captured decode step: one token of each of `batch_size` requests in, their next tokens out.

The input tensors of a decode step are allocated once for each batch size. A step writes its inputs
there and replays a CUDA graph of the whole step with its sampling, one for each `SamplingVariant`. A
token that the step before sampled is read on the device. A graph is captured before its first step.

On a pipeline stage sends and receives are between graphs, since they may go through the host:

    first stage    graph: embedding, layers ─▶ send, receive ─▶ graph: head, sampling
    later stages   receive ─▶ graph: layers ─▶ send

CPUs have recorded steps instead (recorded_step.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fulgurite.cudagraph import GraphPool, capture_graph
from fulgurite.device import is_out_of_memory
from fulgurite.errors import FulguriteError, ReplayError
from fulgurite.kernels.common.pdl import pdl_region
from fulgurite.kernels.sampling.ops import fill_pending_tokens
from fulgurite.kernels.sampling.table import NUM_PROCESSING, NUM_SETTINGS
from fulgurite.models.layers import CausalLM
from fulgurite.models.rope import RotaryCosSin
from fulgurite.parallel.pipeline import Pipeline
from fulgurite.serve.engine.batch import InputBatch, rope_seq_lens
from fulgurite.serve.engine.block_manager import BlockManager
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.logprobs import PendingPromptLogprobs
from fulgurite.serve.engine.sampler import Sampler, SamplingInputs, SamplingVariant
from fulgurite.serve.engine.scheduler import ScheduledChunk
from fulgurite.serve.engine.step_buffers import BufferLayout, StepBuffers
from fulgurite.serve.engine.token_broadcast import TokenBroadcast

WARMUPS = 2  # calls before the capture
Captured = TypeVar("Captured")


class StepOutput(NamedTuple):
    """Logits [R, O] in float32 and the sampled tokens [R], on the device. None: nothing is sampled.

    `prompt_logprobs`: of requests that ask for those of their prompts.
    """

    logits_RO: Tensor
    tokens_R: Tensor | None
    prompt_logprobs: Sequence[PendingPromptLogprobs] = ()


class StageLinks(NamedTuple):
    """The messages of a pipeline stage: `received_TD` is filled by the stage before."""

    pipeline: Pipeline
    is_first: bool
    received_TD: Tensor


class CapturedDecodeStep:
    """The decode step of `batch_size` requests.

    `graph_pool`: the memory that all CUDA graphs of a runner share.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: PagedKVCache,
        block_manager: BlockManager,
        sampler: Sampler,
        batch_size: int,
        graph_pool: GraphPool,
        token_broadcast: TokenBroadcast | None = None,
    ) -> None:
        self.model, self.kv_cache, self.block_manager = model, kv_cache, block_manager
        self.sampler, self.batch_size, self.graph_pool = sampler, batch_size, graph_pool
        self.token_broadcast, self.device = token_broadcast, model.device
        groups, columns = len(block_manager.groups), block_manager.num_columns
        layout: BufferLayout = {
            "token_ids": ((batch_size,), torch.int64),
            "positions": ((batch_size,), torch.int64),
            "rows": ((batch_size,), torch.int64),
            "rope_seq_lens": ((batch_size,), torch.int64),
            "slot_mapping": ((groups, batch_size), torch.int64),
            "seq_lens": ((batch_size,), torch.int32),
            "state_slots": ((batch_size,), torch.int32),
            "block_tables": ((groups, batch_size, columns), torch.int32),
            "settings": ((batch_size, NUM_SETTINGS), torch.float64),
            "processing": ((batch_size, NUM_PROCESSING), torch.float64),
        }
        self.buffers = StepBuffers(layout, self.device)
        self.inputs = self.buffers.device_inputs
        for buffer in self.buffers.host_buffers:
            self._write_padding(buffer.arrays)
        self.buffers.copy_to_device()
        self.batch = self._make_batch(columns)
        self.graphs: dict[SamplingVariant, Callable[[], StepOutput]] = {}
        self.logits_RO: Tensor | None = None  # of all graphs
        self.layers: Callable[[], Tensor] | None = None  # graph of a pipeline stage's layers
        self.links = self._make_links()

    def __call__(
        self,
        chunks: Sequence[ScheduledChunk],
        sampling: SamplingInputs | None,
        variant: SamplingVariant,
    ) -> StepOutput:
        """Run up to `batch_size` requests. Without `sampling` the tokens are not to be used."""
        graph = self.graphs[variant]  # `prepare` made it
        if sampling is not None:
            self.sampler.write_grammar_masks(sampling)  # the graph samples: they must be there
        self._write_inputs(chunks, sampling)
        logits_RO, tokens_R, _ = graph()
        assert tokens_R is not None, "a captured step samples"
        return StepOutput(logits_RO[: len(chunks)], tokens_R[: len(chunks)])

    def _make_links(self) -> StageLinks | None:
        """The messages of this rank's pipeline stage; None: it has all layers."""
        model = self.model
        if model.pipeline is None or model.stage is None:
            return None
        if model.stage.is_first:  # the last stage sends the states of all tokens
            shape = self.batch_size, model.config.hidden_size
            received_TD = torch.zeros(shape, dtype=model.dtype, device=self.device)
        else:
            received_TD = torch.zeros_like(self._embed()[0])
        return StageLinks(model.pipeline, model.stage.is_first, received_TD)

    def _make_batch(self, columns: int) -> InputBatch:
        inputs, size = self.inputs, self.batch_size
        return InputBatch(
            token_ids_T=inputs["token_ids"],
            positions_T=inputs["positions"],
            slot_mapping_GT=list(inputs["slot_mapping"]),
            block_tables_GSB=list(inputs["block_tables"]),
            query_start_loc_S=torch.arange(size + 1, dtype=torch.int32, device=self.device),
            seq_lens_S=inputs["seq_lens"],
            rope_seq_lens_T=inputs["rope_seq_lens"] if self.model.needs_sequence_lengths else None,
            logit_rows_R=None,
            max_query_len=1,
            max_seq_len=columns * self.block_manager.block_size,
            state_slots_S=inputs["state_slots"],
            prompt_lens_S=inputs["seq_lens"],  # single tokens run recurrently, whatever it is
        )

    def _write_padding(self, host: dict[str, np.ndarray], used: int = 0) -> None:
        """Rows from `used` on are padding: they write no key, and sample for a row of their own."""
        host["token_ids"][used:] = 0
        host["seq_lens"][used:] = 1
        host["rope_seq_lens"][used:] = 1
        host["slot_mapping"][:, used:] = -1
        host["state_slots"][used:] = -1
        host["rows"][used:] = self.sampler.rows.padding_row
        self._write_sampling_padding(host, used)

    def _write_sampling_padding(self, host: dict[str, np.ndarray], used: int) -> None:
        host["settings"][used:] = (0.0, 0.0, 0.0, 1.0, 0.0)
        host["processing"][used:] = (self.sampler.rows.padding_row, 0.0, 1.0, 0.0, 0.0)

    def _write_inputs(
        self, chunks: Sequence[ScheduledChunk], sampling: SamplingInputs | None
    ) -> None:
        """Write the inputs of up to `batch_size` requests; the remaining rows are padding."""
        host, used, size = self.buffers.begin_write(), len(chunks), self.block_manager.block_size
        rows = np.array([chunk.request.block_table_row for chunk in chunks], dtype=np.int64)
        positions = host["positions"][:used]
        positions[:] = [chunk.start for chunk in chunks]
        host["rows"][:used] = host["state_slots"][:used] = rows
        host["token_ids"][:used] = [
            -1 if chunk.ends_pending else chunk.request.tokens[chunk.start] for chunk in chunks
        ]
        host["seq_lens"][:used] = positions + 1
        for group, table in enumerate(self.block_manager.block_tables):
            np.take(table, rows, axis=0, out=host["block_tables"][group, :used], mode="clip")
            blocks = table[rows, positions // size]
            host["slot_mapping"][group, :used] = blocks.astype(np.int64) * size + positions % size
        if self.model.needs_sequence_lengths:
            lengths = rope_seq_lens(chunks, self.model.recompute_after)
            host["rope_seq_lens"][:used] = np.maximum(lengths, positions + 1)
        if sampling is None:
            self._write_sampling_padding(host, 0)
        else:
            host["settings"][:used] = sampling.settings_R5
            host["processing"][:used] = sampling.processing_R5
        if used < self.batch_size:
            self._write_padding(host, used)
        self.buffers.copy_to_device()

    def _fill_pending_tokens(self) -> None:
        last_tokens_W = self.sampler.rows.last_tokens_W
        fill_pending_tokens(self.inputs["token_ids"], self.inputs["rows"], last_tokens_W)

    def _embed(self) -> tuple[Tensor, list[RotaryCosSin]]:
        self.kv_cache.set_batch(self.batch)
        token_ids_T, positions_T = self.inputs["token_ids"], self.inputs["positions"]
        tokens = self._local_tokens
        return self.model.embed(token_ids_T[tokens], positions_T[tokens], self.kv_cache)

    def _run_layers(self, x_TD: Tensor, cos_sin: Sequence[RotaryCosSin]) -> Tensor:
        positions_T = self.inputs["positions"][self._local_tokens]
        x_TD = self.model.run_layers(x_TD, positions_T, cos_sin, self.kv_cache)
        context, stage = self.model.context, self.model.stage
        if context is None or not (stage is None or stage.is_last):
            return x_TD
        return context.gather_tokens(x_TD, self.batch_size)

    @property
    def _local_tokens(self) -> slice:
        """The tokens that this rank computes; with context parallelism its part of them."""
        context = self.model.context
        return slice(None) if context is None else slice(*context.local_range(self.batch_size))

    def can_run(self, variant: SamplingVariant) -> bool:
        """Whether nothing is left to capture for steps that sample this way."""
        return variant in self.graphs

    def prepare(self, variant: SamplingVariant) -> None:
        """Capture the CUDA graph that samples this way, if there is none; ReplayError if it can't be
        captured: an operator without a kernel for its format may read on the host what the device
        computes."""
        if self.can_run(variant):
            return
        self._write_padding(self.buffers.begin_write())  # warm-up calls change no request
        self.buffers.copy_to_device()
        try:
            self.graphs[variant] = self._capture_cuda_graph(variant)
        except RuntimeError as error:
            if is_out_of_memory(error) or isinstance(error, FulguriteError):
                raise
            reason = str(error).partition("\n")[0]
            raise ReplayError(
                f"a decode step can't be captured in a CUDA graph: {reason}"
            ) from error

    def _capture_cuda_graph(self, variant: SamplingVariant) -> Callable[[], StepOutput]:
        """The step of one rank is one graph. A pipeline stage has graphs between its sends and receives."""
        if self.logits_RO is None:
            rows = self.batch_size if self.links is None or self.links.is_first else 0
            shape = rows, self.model.config.vocab_size
            self.logits_RO = torch.empty(shape, dtype=torch.float32, device=self.device)
        if self.links is None:
            return self._capture(lambda: self._sample(self._compute_hidden_states(), variant))
        if self.layers is None:
            self.layers = self._capture(self._compute_hidden_states)
        received_TD = self.links.received_TD
        if not self.links.is_first:
            none = StepOutput(self.logits_RO, self.inputs["token_ids"])  # nobody reads them
            return partial(self._run_stage, self.links.pipeline, self.layers, lambda: none)
        head = self._capture(lambda: self._sample(received_TD, variant))
        return partial(self._run_stage, self.links.pipeline, self.layers, head)

    def _run_stage(
        self,
        pipeline: Pipeline,
        layers: Callable[[], Tensor],
        head: Callable[[], StepOutput],
    ) -> StepOutput:
        """The graphs of a stage with its messages; the first one gets the hidden states at the end."""
        assert self.links is not None, "a stage has links"
        if self.links.is_first:
            pipeline.send(layers())
            pipeline.receive(self.links.received_TD)
        else:
            pipeline.receive(self.links.received_TD)
            pipeline.send(layers())
        output = head()
        pipeline.finish()
        return output

    def _compute_hidden_states(self) -> Tensor:
        """The hidden states after this rank's layers; those of a later stage begin with received ones."""
        self._fill_pending_tokens()
        with pdl_region():
            x_TD, cos_sin = self._embed()
            if self.links is not None and not self.links.is_first:
                x_TD = self.links.received_TD
            return self._run_layers(x_TD, cos_sin)

    def _sample(self, hidden_RD: Tensor, variant: SamplingVariant) -> StepOutput:
        """The logits of all requests, and the tokens that this rank samples for them."""
        logits_RO, inputs = self.logits_RO, self.inputs
        assert logits_RO is not None, "allocated before a capture"
        with pdl_region():
            logits_RO.copy_(self.model.compute_logits(hidden_RD))
        tokens_R = self.sampler.run(logits_RO, inputs["settings"], inputs["processing"], variant)
        if self.token_broadcast is not None:
            self.token_broadcast.share(tokens_R, inputs["rows"])
        return StepOutput(logits_RO, tokens_R)

    def _capture(self, run: Callable[[], Captured]) -> Callable[[], Captured]:
        pool = self.graph_pool
        return capture_graph(run, pool=pool.handle, stream=pool.stream, warmups=WARMUPS).replay
