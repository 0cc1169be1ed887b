"""The model runner: `ScheduledChunk`s in, the logits of their next tokens out.

A step in which every request has exactly one token is a decode step. It runs as a
`CapturedDecodeStep`, captured once for each batch size (captured_step.py). Every other step, with
prompts in it, runs eagerly as one flat batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from fulgurite.cudagraph import GraphPool
from fulgurite.errors import ReplayError
from fulgurite.kernels.attention.ops import PAGED_ATTENTION_KERNELS
from fulgurite.kernels.gemm.fused_projections import merge_weight_storage
from fulgurite.models.kv_cache import NoKVCache
from fulgurite.models.layers import Attention, CausalLM, GatedMLP
from fulgurite.serve.engine.batch import build_input_batch
from fulgurite.serve.engine.block_manager import BlockManager
from fulgurite.serve.engine.captured_step import CapturedDecodeStep
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.scheduler import ScheduledChunk

MAX_CAPTURED_STEPS = 32  # the least recently used one is dropped


class ModelRunner:
    """Runs the model over the tokens of one step, all requests in one flat batch.

    `no_capture_reason` says why decode steps of this model can't be captured: an op without a native
    kernel, or layers that communicate with other ranks. Such a model runs every step eagerly.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: PagedKVCache,
        block_manager: BlockManager,
        no_capture_reason: str | None = None,
    ) -> None:
        self.model, self.kv_cache, self.block_manager = model, kv_cache, block_manager
        self.device = model.norm.weight.device
        self.captured_steps: OrderedDict[int, CapturedDecodeStep] = OrderedDict()
        self.no_capture_reason = no_capture_reason
        self.graph_pool = None
        if self.device.type == "cuda":
            self.graph_pool = GraphPool(self.device)
            merge_projection_weights(model)
        if self.device.type not in PAGED_ATTENTION_KERNELS:
            self.no_capture_reason = f"there is no attention kernel for {self.device.type}"

    @torch.inference_mode()
    def execute(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Logits [R, O] in float32: one row for each chunk that needs sampling."""
        if not chunks:
            return self._execute_empty()
        if all(count == 1 and start + 1 == request.length for request, start, count in chunks):
            step = self._get_captured_step(len(chunks))
            if step is not None:
                return step(chunks).float()
        batch = build_input_batch(
            chunks,
            self.block_manager,
            self.device,
            needs_rope_seq_lens=self.model.needs_sequence_lengths,
            recompute_after=self.model.recompute_after,
        )
        self.kv_cache.set_batch(batch)
        hidden_TD = self.model.compute_hidden_states(
            batch.token_ids_T, batch.positions_T, self.kv_cache
        )
        if batch.logit_rows_R is not None:
            hidden_TD = hidden_TD[batch.logit_rows_R]
        return self.model.compute_logits(hidden_TD).float()

    def _execute_empty(self) -> Tensor:
        """Run a step without tokens, since other ranks may send tokens to this rank's experts."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        return self.model(none, none, NoKVCache()).float()

    def _get_captured_step(self, num_requests: int) -> CapturedDecodeStep | None:
        """The captured step for so many requests; on a GPU for the next power of two."""
        if self.no_capture_reason is not None:
            return None
        size = num_requests if self.device.type == "cpu" else 1 << (num_requests - 1).bit_length()
        if size not in self.captured_steps:
            try:
                self.captured_steps[size] = CapturedDecodeStep(
                    self.model, self.kv_cache, self.block_manager, size, self.graph_pool
                )
            except ReplayError as error:
                self.no_capture_reason = str(error)
                return None
            if len(self.captured_steps) > MAX_CAPTURED_STEPS:
                self.captured_steps.popitem(last=False)
        self.captured_steps.move_to_end(size)
        return self.captured_steps[size]


def merge_projection_weights(model: CausalLM) -> None:
    """Make weights that multiply the same input contiguous, so that one GEMM computes them."""
    for module in model.modules():
        if isinstance(module, Attention | GatedMLP):
            merge_weight_storage(module.fused_projections)
