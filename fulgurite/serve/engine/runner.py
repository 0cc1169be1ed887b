"""Pieces of requests in, the logits of their next tokens out.

A step that gives every request one token runs on fixed memory (`FixedStep`), prepared once for each
number of requests; every other step, with prompts in it, as a flat batch of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from fulgurite.errors import ReplayError
from fulgurite.kernels.attention.ops import IMPLEMENTATIONS
from fulgurite.kernels.gemm.fused_projections import lay_together
from fulgurite.models.cache import WholeSequence
from fulgurite.models.layers import Attention, Decoder, GatedMLP
from fulgurite.serve.engine.batch import make_batch
from fulgurite.serve.engine.block_tables import BlockTables
from fulgurite.serve.engine.captured_step import FixedStep, Graphs
from fulgurite.serve.engine.kv_cache import PagedCache
from fulgurite.serve.engine.scheduler import Piece

MOST_FIXED = 32  # prepared steps that are kept


class Runner:
    """Runs the model over one step's tokens, all requests in one flat batch.

    `unfixed`: why steps of this model can't be prepared, where they can't (an op that is no native
    kernel, layers that talk to other ranks); such a model runs every step as a batch of its own.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        tables: BlockTables,
        unfixed: str | None = None,
    ) -> None:
        self.model, self.cache, self.tables = model, cache, tables
        self.device = model.norm.weight.device
        self.fixed: OrderedDict[int, FixedStep] = OrderedDict()
        self.unfixed = unfixed
        self.graphs = None
        if self.device.type == "cuda":
            self.graphs = Graphs(self.device)
            lay_out(model)
        if self.device.type not in IMPLEMENTATIONS:
            self.unfixed = f"attention on {self.device.type} has no kernel of its own"

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Tensor:
        """[R, O] in float32: one row for each piece that ends with its request's last token."""
        if not pieces:
            return self._run_none()
        if all(count == 1 and start + 1 == request.length for request, start, count in pieces):
            step = self._fixed_step(len(pieces))
            if step is not None:
                return step(pieces).float()
        batch = make_batch(
            pieces,
            self.tables,
            self.device,
            needs_extent=self.model.needs_extent,
            stale_after=self.model.stale_after,
        )
        self.cache.begin(batch)
        hidden_TD = self.model.hidden(batch.token_ids_T, batch.positions_T, self.cache)
        if batch.rows_R is not None:
            hidden_TD = hidden_TD[batch.rows_R]
        return self.model.logits(hidden_TD).float()

    def _run_none(self) -> Tensor:
        """A step without tokens: other ranks may want this one's experts."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        return self.model(none, none, WholeSequence()).float()

    def _fixed_step(self, count: int) -> FixedStep | None:
        """The prepared step for so many requests; on a GPU for the next power of two."""
        if self.unfixed is not None:
            return None
        size = count if self.device.type == "cpu" else 1 << (count - 1).bit_length()
        if size not in self.fixed:
            try:
                self.fixed[size] = FixedStep(self.model, self.cache, self.tables, size, self.graphs)
            except ReplayError as problem:
                self.unfixed = str(problem)
                return None
            if len(self.fixed) > MOST_FIXED:
                self.fixed.popitem(last=False)
        self.fixed.move_to_end(size)
        return self.fixed[size]


def lay_out(model: Decoder) -> None:
    """Weights that read the same x one behind the other, so that one kernel runs them."""
    for module in model.modules():
        if isinstance(module, Attention | GatedMLP):
            lay_together(module.together)
