"""The model runner: `ScheduledChunk`s in, their next tokens and the logits of them out.

A step in which every request has exactly one token is a decode step. On a GPU it runs as a
`CapturedDecodeStep`, captured once for each batch size (captured_step.py). On a CPU decode steps and
small mixed ones, with chunks of prompts, run as `RecordedStep`s (recorded_step.py). Every other step
runs eagerly as one flat batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.cudagraph import GraphPool
from fulgurite.determinism import deterministic
from fulgurite.device import is_out_of_memory
from fulgurite.errors import ArgumentError, ReplayError
from fulgurite.kernels.attention.ops import PAGED_ATTENTION_KERNELS
from fulgurite.kernels.gemm.dense_linear import GPU_DTYPES, use_dense_kernels
from fulgurite.kernels.gemm.fused_projections import merge_weight_storage
from fulgurite.kernels.gemm.merged_linear import merge_quant_storage
from fulgurite.kernels.sampling.ops import fill_pending_tokens
from fulgurite.logs import LOG
from fulgurite.models.attention import Attention
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.expert_load import ExpertLoadCounter
from fulgurite.models.families.deepseek import MLAttention
from fulgurite.models.kv_cache import NoKVCache
from fulgurite.models.layers import CausalLM
from fulgurite.models.transformers_backend.model import TransformersModel
from fulgurite.parallel.collectives import all_reduce_min
from fulgurite.parallel.mesh import Mesh
from fulgurite.serve.engine.batch import (
    HostBatch,
    InputBatch,
    build_host_batch,
    move_to_device,
)
from fulgurite.serve.engine.block_manager import BlockManager
from fulgurite.serve.engine.captured_step import CapturedDecodeStep, StepOutput
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.logprobs import (
    ROWS_AT_ONCE,
    PendingPromptLogprobs,
    compute_prompt_logprobs,
    find_prompt_spans,
)
from fulgurite.serve.engine.recorded_step import RecordedStep, StepShape, find_shape
from fulgurite.serve.engine.sampler import Sampler, SamplingInputs, SamplingVariant
from fulgurite.serve.engine.scheduler import ScheduledChunk
from fulgurite.serve.engine.stage_runner import StageRunner
from fulgurite.serve.engine.token_broadcast import TokenBroadcast

MAX_CAPTURED_STEPS = 32  # the least recently used one is dropped


class CapturedShape(NamedTuple):
    """Which captured step runs: its requests, with those of other ranks, and how it samples."""

    num_requests: int
    variant: SamplingVariant


class ModelRunner:
    """Runs the model over the tokens of one step, all requests in one flat batch.

    `no_capture_reason` says why steps of this model can't be captured: an op without a native kernel,
    or layers that communicate through the host. Such a model runs every step eagerly.

    With a `mesh`, steps are captured and replayed on all its ranks at once, since they communicate.
    The ranks agree on the `CapturedShape` before (coordinator.py).
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: PagedKVCache,
        block_manager: BlockManager,
        sampler: Sampler,
        no_capture_reason: str | None = None,
        is_deterministic: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        self.model, self.kv_cache, self.block_manager = model, kv_cache, block_manager
        self.sampler, self.mesh = sampler, mesh
        self.device = model.device
        self.rows_at_once = min(ROWS_AT_ONCE, sampler.rows.num_rows)  # as the memory plan counts
        self.captured_steps: OrderedDict[int, CapturedDecodeStep] = OrderedDict()  # on a GPU
        self.recorded_steps: OrderedDict[StepShape, RecordedStep] = OrderedDict()  # on a CPU
        self.load_counter: ExpertLoadCounter | None = None
        self.token_broadcast: TokenBroadcast | None = (
            None  # with asynchronous scheduling over ranks
        )
        self.stage_runner: StageRunner | None = None
        if model.stage is not None or model.context is not None:
            self.stage_runner = StageRunner(model, kv_cache, self._build_batch, self.rows_at_once)
        self.no_capture_reason = no_capture_reason or model.no_capture_reason
        self.eager_reason: str | None = None  # why some decode steps are not captured
        self.graph_pool = None
        if self.device.type == "cuda":
            self.graph_pool = GraphPool(self.device)
            merge_projection_weights(model)
        self.is_deterministic = is_deterministic
        if is_deterministic:
            use_dense_kernels(model)
            check_deterministic(model)
        if self.device.type not in PAGED_ATTENTION_KERNELS:
            self.no_capture_reason = f"there is no attention kernel for {self.device.type}"

    @torch.inference_mode()
    def execute(
        self,
        chunks: Sequence[ScheduledChunk],
        sampling: SamplingInputs | None,
        shape: CapturedShape | None = None,
    ) -> StepOutput:
        """`_execute` in deterministic mode or not."""
        with deterministic(self.is_deterministic):
            return self._execute(chunks, sampling, shape)

    def _execute(
        self,
        chunks: Sequence[ScheduledChunk],
        sampling: SamplingInputs | None,
        shape: CapturedShape | None,
    ) -> StepOutput:
        """Run the chunks, and sample a token for each one that needs it.

        The output has a row for each of these. `sampling`: None if nothing is to be sampled. `shape`:
        of the captured step that all ranks replay, also those without chunks. On a GPU nothing
        waits for the device.
        """
        if self.kv_cache.has_states:
            for chunk in chunks:  # until the step is launched: its tokens must not be added twice
                chunk.request.num_state_tokens = -1
        if self.graph_pool is not None:
            if self.mesh is None and sampling is not None and is_decode_step(chunks):
                shape = CapturedShape(len(chunks), sampling.variant)
            if shape is not None and self._is_one_micro_batch(shape.num_requests):
                step = self._get_captured_step(shape.num_requests, shape.variant)
                if step is not None:
                    self._begin_load_count(chunks, step.batch_size)
                    return step(chunks, sampling, shape.variant)
        self._begin_load_count(chunks)
        if not chunks:
            return StepOutput(self._execute_empty(), None)
        logits_RO, prompt_logprobs = self._compute_logits(chunks)
        tokens_R = None if sampling is None else self.sampler.run_eagerly(logits_RO, sampling)
        self._share_tokens(chunks, tokens_R)
        return StepOutput(logits_RO, tokens_R, prompt_logprobs)

    def _begin_load_count(
        self, chunks: Sequence[ScheduledChunk], padded_size: int | None = None
    ) -> None:
        """Count the tokens of experts in this step, and no padding."""
        if self.load_counter is not None:
            tokens = sum(chunk.num_tokens for chunk in chunks)
            self.load_counter.begin_step(tokens, tokens if padded_size is None else padded_size)

    def _is_one_micro_batch(self, num_requests: int) -> bool:
        """Whether a decode step is not divided among pipeline stages; the same on all ranks."""
        if self.stage_runner is None or self.stage_runner.is_one_micro_batch(num_requests):
            return True
        self.note_eager_step(f"steps of {num_requests} requests run as several micro-batches")
        return False

    def count_equal_micro_batches(self, num_tokens: int) -> int:
        """How many equally large micro-batches an eager step of this rank has; 1 if they may differ."""
        stage_runner = self.stage_runner
        return 1 if stage_runner is None else stage_runner.count_equal_micro_batches(num_tokens)

    def note_eager_step(self, reason: str) -> None:
        """Remember why a decode step is not captured although others are; `stats` has it."""
        if self.eager_reason is None:
            LOG.info("some decode steps are not captured: %s", reason)
        self.eager_reason = reason

    def _share_tokens(self, chunks: Sequence[ScheduledChunk], tokens_R: Tensor | None) -> None:
        """Give all ranks of the replica the tokens that one of them has sampled."""
        rows = [chunk.request.block_table_row for chunk in chunks if chunk.needs_sampling]
        if self.token_broadcast is not None and rows:
            rows_R = torch.tensor(rows).to(self.device, non_blocking=True)
            self.token_broadcast.share(tokens_R, rows_R)

    def _compute_logits(
        self, chunks: Sequence[ScheduledChunk]
    ) -> tuple[Tensor, list[PendingPromptLogprobs]]:
        """The logits of all chunks that need sampling, as one flat batch; and of prompts."""
        if self.stage_runner is not None:
            return self.stage_runner.run(chunks)
        host = self._build_host_batch(chunks)
        hidden_TD, logit_rows_R = self._compute_hidden_states(host)
        prompt_logprobs = []
        for span in find_prompt_spans(chunks):
            before_LD = hidden_TD[span.row : span.row + span.num_tokens]
            words_LW = compute_prompt_logprobs(self.model, before_LD, span, self.rows_at_once)
            prompt_logprobs.append(PendingPromptLogprobs(span, words_LW))
        if logit_rows_R is not None:
            hidden_TD = hidden_TD[logit_rows_R]
        return self.model.compute_logits(hidden_TD).float(), prompt_logprobs

    def _compute_hidden_states(self, host: HostBatch) -> tuple[Tensor, Tensor | None]:
        """The hidden states of a step's tokens, recorded on a CPU if its shape can be; and which of
        them get logits, None: all."""
        shape = find_shape(host, self.kv_cache, self.block_manager)
        step = None if shape is None else self._get_recorded_step(shape)
        if step is None:
            batch = self._move_to_device(host)
            self.kv_cache.set_batch(batch)
            hidden_TD = self.model.compute_hidden_states(
                batch.token_ids_T, batch.positions_T, self.kv_cache
            )
            return hidden_TD, batch.logit_rows_R
        hidden_TD = step(host)
        if step.no_replay_reason is not None:
            self._stop_capturing(step.no_replay_reason)
        rows_R = host.logit_rows_R
        return hidden_TD, None if rows_R is None else torch.from_numpy(rows_R)

    def _build_host_batch(self, chunks: Sequence[ScheduledChunk]) -> HostBatch:
        return build_host_batch(
            chunks,
            self.block_manager,
            needs_rope_seq_lens=self.model.needs_sequence_lengths,
            recompute_after=self.model.recompute_after,
        )

    def _move_to_device(self, host: HostBatch) -> InputBatch:
        """The batch of an eager step, with the tokens that the step before samples."""
        batch = move_to_device(host, self.device, self.kv_cache.has_states)
        if batch.pending_rows_T is not None:
            last_tokens_W = self.sampler.rows.last_tokens_W
            fill_pending_tokens(batch.token_ids_T, batch.pending_rows_T, last_tokens_W)
        return batch

    def _build_batch(self, chunks: Sequence[ScheduledChunk]) -> InputBatch:
        return self._move_to_device(self._build_host_batch(chunks))

    def _execute_empty(self) -> Tensor:
        """Run a step without tokens, since other ranks may send tokens to this rank's experts."""
        if self.stage_runner is not None:
            return self.stage_runner.run_empty()
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        return self.model(none, none, NoKVCache()).float()

    def _get_captured_step(
        self, num_requests: int, variant: SamplingVariant
    ) -> CapturedDecodeStep | None:
        """The captured step for so many requests, or for the next power of two."""
        if self.no_capture_reason is not None:
            return None
        size = self.captured_size(num_requests)
        is_new = size not in self.captured_steps or not self.captured_steps[size].can_run(variant)
        step = None
        try:
            counter = self.load_counter if is_new else None
            with nullcontext() if counter is None else counter.paused():
                step = self._capture_step(size, variant)
        except ReplayError as error:
            self._stop_capturing(str(error))
        except (RuntimeError, MemoryError) as error:
            self._stop_for_memory(error, f"{size} requests")
        if is_new and self.mesh is not None and not self._have_all_captured(self.mesh):
            step = None
        if step is None:
            self.captured_steps.pop(size, None)
        return step

    def _stop_capturing(self, reason: str) -> None:
        self.no_capture_reason = reason
        self.recorded_steps.clear()
        LOG.info("decode steps are not captured: %s", reason)

    @torch.inference_mode()
    def prepare_step(self, shape: StepShape) -> bool:
        """Run a step on padding, or capture it; True: nothing of it is left to prepare."""
        counter = self.load_counter
        paused = nullcontext() if counter is None else counter.paused()
        with deterministic(self.is_deterministic), paused:
            if self.graph_pool is not None:
                variants = {one for step in self.captured_steps.values() for one in step.graphs}
                for variant in variants:
                    self._get_captured_step(shape.num_sequences, variant)
                return True
            step = self._get_recorded_step(shape)
            is_prepared = step is None or step.prepare()
            if step is not None and step.no_replay_reason is not None:
                self._stop_capturing(step.no_replay_reason)
            return is_prepared

    def _get_recorded_step(self, shape: StepShape) -> RecordedStep | None:
        """The recorded step of this shape on a CPU; None: such steps run eagerly."""
        if self.graph_pool is not None or self.no_capture_reason is not None:
            return None
        step = self.recorded_steps.get(shape)
        if step is None:
            last_tokens_W = self.sampler.rows.last_tokens_W
            try:
                step = RecordedStep(
                    self.model, self.kv_cache, self.block_manager, last_tokens_W, shape
                )
            except (RuntimeError, MemoryError) as error:
                self._stop_for_memory(error, f"{shape.num_tokens} tokens")
                return None
            self.recorded_steps[shape] = step
            if len(self.recorded_steps) > MAX_CAPTURED_STEPS:
                self.recorded_steps.popitem(last=False)
        self.recorded_steps.move_to_end(shape)
        return step

    def _stop_for_memory(self, error: RuntimeError | MemoryError, size: str) -> None:
        """Capture no more steps if memory ran out: eager steps need less, they keep nothing."""
        if not is_out_of_memory(error):
            raise error
        self.no_capture_reason = f"out of memory while a step of {size} was captured"
        LOG.warning("%s; steps are not captured from now on", self.no_capture_reason)

    @property
    def captured_sizes(self) -> list[int]:
        """The batch sizes of captured decode steps."""
        recorded = (shape.num_sequences for shape in self.recorded_steps if shape.is_decode)
        return sorted([*self.captured_steps, *recorded])

    def drop_captured_steps(self) -> None:
        """Free their memory; they are captured again when they are needed."""
        self.captured_steps.clear()
        self.recorded_steps.clear()

    def captured_size(self, num_requests: int) -> int:
        """The batch size of the captured step that runs so many requests: the next power of two.

        At most `max_sequences`: buffers are planned for steps of so many tokens.
        """
        return min(1 << (num_requests - 1).bit_length(), self.sampler.rows.num_rows)

    def _have_all_captured(self, mesh: Mesh) -> bool:
        """Whether every rank could capture a new step; if not, no rank captures from now on."""
        own = int(self.no_capture_reason is None)
        if all_reduce_min(own, mesh.world, "agreement on a captured step"):
            return True
        if self.no_capture_reason is None:
            self.no_capture_reason = "another rank could not capture a decode step"
        return False

    def _capture_step(self, size: int, variant: SamplingVariant) -> CapturedDecodeStep:
        assert self.graph_pool is not None, "a GPU captures"
        step = self.captured_steps.get(size)
        if step is None:
            step = CapturedDecodeStep(
                self.model,
                self.kv_cache,
                self.block_manager,
                self.sampler,
                size,
                self.graph_pool,
                self.token_broadcast,
            )
            self.captured_steps[size] = step
            if len(self.captured_steps) > MAX_CAPTURED_STEPS:
                self.captured_steps.popitem(last=False)
        self.captured_steps.move_to_end(size)
        step.prepare(variant)
        return step


def is_decode_step(chunks: Sequence[ScheduledChunk]) -> bool:
    """Whether every request has one token in this step, and gets the next one."""
    return all(chunk.num_tokens == 1 and chunk.needs_sampling for chunk in chunks)


def merge_projection_weights(model: CausalLM) -> None:
    """Make weights that multiply the same input contiguous, so that one GEMM computes them."""
    for module in model.modules():
        if isinstance(module, Attention | MLAttention | GatedMLP):
            merge_weight_storage(module.fused_projections)
            merge_quant_storage(module.fused_projections)


def check_deterministic(model: CausalLM) -> None:
    """Raise for models whose results on a GPU depend on the batch even in deterministic mode."""
    if model.device.type != "cuda":
        return
    if model.dtype not in GPU_DTYPES:
        raise ArgumentError(
            f"deterministic=True does not support {model.dtype} on a GPU",
            next="leave it out, use device='cpu', or another dtype",
        )
    if isinstance(model, TransformersModel):
        model.check_invariant_ops()
