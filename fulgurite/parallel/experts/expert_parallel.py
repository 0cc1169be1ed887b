"""Expert parallelism: `ExpertParallel` replaces the experts of a layer.

In: this rank's tokens and their routes. Out: the weighted sum of each token's experts, on any rank.

    routes ─ replica table ─▶ slots ─ dispatch ─▶ rows of tokens of all ranks
       ─ this rank's experts, one row each ─▶ results ─ combine ─▶ own tokens

Each rank has the experts of its own slots. A placement may put one expert into several slots, or order
experts by measured load. It is applied right after the router; the rest of the layer sees slots only.

Every rank of the axis must call its layers equally often, also if it has no tokens.

A rank that receives more than `EXPERT_CHUNK_ROWS` rows computes them in chunks, which bounds what the
experts allocate. With `micro_batches=2` large steps are split into two halves of the tokens:

    transfer   dispatch 0 │ dispatch 1 │ combine 0 │ combine 1
    compute    shared     │ experts 0  │ experts 1 │

Neither changes the result.

Shapes: T tokens; k experts of a token; S received rows; D hidden size; E experts; P slots.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.buffers import EXPERT_CHUNK_ROWS
from fulgurite.kernels.dispatch.wire_format import WIRE_FORMATS
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.parallel.dispatch.dispatcher import (
    DispatchedTokens,
    TokenDispatcher,
    can_overlap,
    divide_step,
)
from fulgurite.parallel.experts.placement import Placement, ReplicaTable, contiguous_placement
from fulgurite.parallel.mesh import Axis

MICRO_BATCH_TOKENS = 64  # of a rank; smaller steps are not split: each half has the full latency


class ExpertParallel(nn.Module):
    """`experts(x_TD, routes)` with the experts of all ranks.

    `experts` has the same signature and this rank's experts only, in the order of its slots. It
    applies the router weights, to its inputs or its outputs.
    """

    micro_batches = 1
    micro_batch_tokens = MICRO_BATCH_TOKENS
    chunk_rows = EXPERT_CHUNK_ROWS

    def __init__(
        self,
        experts: nn.Module,
        dispatcher: TokenDispatcher,
        placement: Placement,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.dispatcher = dispatcher
        self.placement = placement
        self.num_slots = placement.slots_LS.shape[1]
        self.layer = layer

    def forward(self, x_TD: Tensor, routes: Routes) -> Tensor:
        return self.finish(self.start_dispatch(x_TD, routes))

    def start_dispatch(self, x_TD: Tensor, routes: Routes) -> list[Any]:
        """Start to send the tokens to their experts: what is pending, of each micro-batch."""
        slots_Tk = routes.experts_Tk
        if self.replica_table is not None:
            slots_Tk = self.replica_table.remap(self.layer, slots_Tk, self.dispatcher.axis.index)
        count = self._num_micro_batches()
        halves = (part.tensor_split(count) for part in (x_TD, slots_Tk, routes.weights_Tk))
        with divide_step(self.dispatcher, count):
            return [
                self.dispatcher.start_dispatch(x, slots, self.num_slots, weights)
                for x, slots, weights in zip(*halves, strict=True)
            ]

    def finish(self, pending: list[Any]) -> Tensor:
        """Run this rank's experts on the received rows and combine the results of all ranks."""
        if len(pending) == 1:
            return self.dispatcher.combine(*self._run_experts(pending.pop()))
        assert can_overlap(self.dispatcher), "only those have micro-batches"
        halves = []
        while pending:  # what a half has received is freed before the next
            y_SD, dispatched = self._run_experts(pending.pop(0))
            self.dispatcher.start_combine(y_SD, dispatched)
            halves.append(dispatched)
        return torch.cat([self.dispatcher.finish_combine(dispatched) for dispatched in halves])

    def _run_experts(self, pending: Any) -> tuple[Tensor, DispatchedTokens]:
        """The results of the received rows, and what the combine needs of the dispatch."""
        dispatched = self._finish_dispatch(pending)
        y_SD = self._run_rows(dispatched)
        if torch.is_grad_enabled():
            return y_SD, dispatched
        return y_SD, replace(dispatched, x_SD=y_SD[:0])  # the rows are freed before the combine

    def _finish_dispatch(self, pending: Any) -> DispatchedTokens:
        """The received rows; in FP8 if they were sent so and the experts read them so."""
        if can_overlap(self.dispatcher):
            input_format = getattr(self.experts, "input_format", UNQUANTIZED)
            keep_fp8 = input_format == WIRE_FORMATS["fp8"] and not torch.is_grad_enabled()
            return self.dispatcher.finish_dispatch(pending, keep_fp8=keep_fp8)
        return self.dispatcher.finish_dispatch(pending)

    def _num_micro_batches(self) -> int:
        """The same on all ranks: it depends on what they have agreed on only."""
        dispatcher = self.dispatcher
        if self.micro_batches == 1 or torch.is_grad_enabled():
            return 1
        if not can_overlap(dispatcher) or dispatcher.step_tokens is None:
            return 1
        return self.micro_batches if dispatcher.step_tokens >= self.micro_batch_tokens else 1

    def _run_rows(self, dispatched: DispatchedTokens) -> Tensor:
        """The weighted result of each row by its expert, in chunks of rows if there are many."""
        x_SD, weights_S1 = dispatched.x_SD, dispatched.weights_S[:, None]
        experts_S1 = dispatched.experts_S[:, None]
        if x_SD.shape[0] <= self.chunk_rows or torch.is_grad_enabled():
            y_SD: Tensor = self.experts(x_SD, Routes(weights_S1, experts_S1))
            return y_SD
        y_SD = torch.empty(x_SD.shape, dtype=x_SD.dtype, device=x_SD.device)
        for start in range(0, x_SD.shape[0], self.chunk_rows):
            rows = slice(start, start + self.chunk_rows)
            y_SD[rows] = self.experts(x_SD[rows], Routes(weights_S1[rows], experts_S1[rows]))
        return y_SD

    @cached_property
    def replica_table(self) -> ReplicaTable | None:
        """The slots of each expert; None if experts are in order.

        Built at the first call, since the weights may be on the meta device before.
        """
        if self.placement.slots_LS[self.layer].tolist() == list(range(self.placement.num_experts)):
            return None
        with torch.device("cpu"):  # a plan of memory runs the model where values don't exist
            return self.placement.replica_table(next(self.experts.parameters()).device)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts in this rank's slots."""
        experts_P = self.placement.experts_LRP[self.layer, self.dispatcher.axis.index]
        return tuple(experts_P.tolist())

    @property
    def has_redundant_experts(self) -> bool:
        """Whether some expert is in several slots."""
        return self.num_slots > self.placement.num_experts

    def extra_repr(self) -> str:
        axis = self.dispatcher.axis
        local_slots = self.num_slots // axis.size
        first = axis.index * local_slots
        return f"slots {first} to {first + local_slots - 1} of {self.num_slots}, {axis}"


class OverlappedSharedExpert(nn.Module):
    """A mixture of experts whose shared expert runs while tokens are in flight."""

    def __init__(
        self, router: nn.Module, experts: ExpertParallel, shared_expert: nn.Module
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_expert = shared_expert

    def forward(self, x_XD: Tensor) -> Tensor:
        x_TD = x_XD.flatten(0, -2)
        pending = self.experts.start_dispatch(x_TD, self.router(x_TD))
        shared_XD: Tensor = self.shared_expert(x_XD)
        return self.experts.finish(pending).view(x_XD.shape) + shared_XD


def apply_expert_parallel(
    experts: nn.Module,
    dispatcher: TokenDispatcher,
    placement: Placement | None = None,
    layer: int = 0,
) -> ExpertParallel:
    """Keep this rank's experts of a module, and wrap it in `ExpertParallel`.

    The first dimension of every parameter of `experts` is the expert.
    """
    axis = dispatcher.axis
    count = _count_experts(experts)
    if placement is None:
        placement, layer = contiguous_placement(1, count, axis.size), 0
    _check_placement(placement, layer, count, axis)
    local_experts = placement.experts_LRP[layer, axis.index].tolist()  # by slot
    for name, parameter in list(experts.named_parameters(recurse=False)):
        stacked = select_experts(parameter.detach(), local_experts)
        setattr(experts, name, nn.Parameter(stacked, parameter.requires_grad))
    return ExpertParallel(experts, dispatcher, placement, layer)


def select_experts(stack: Tensor, rows: list[int]) -> Tensor:
    """Rows of a dense or quantized stack as a new tensor, so that the full stack can be freed."""
    first, last = rows[0], rows[-1] + 1
    if rows == list(range(first, last)):
        return stack[first:last].clone()
    return torch.cat([stack[row : row + 1] for row in rows])


def _count_experts(experts: nn.Module) -> int:
    sizes = {name: p.shape[0] for name, p in experts.named_parameters(recurse=False)}
    if len(set(sizes.values())) != 1:
        raise ArgumentError(
            f"{type(experts).__name__} is not a stack of experts: {sizes or 'it has no parameters'}",
            next="the first dimension of every parameter must be the expert",
        )
    return next(iter(sizes.values()))


def _check_placement(placement: Placement, layer: int, count: int, axis: Axis) -> None:
    if placement.num_experts != count or placement.num_ranks != axis.size:
        raise ArgumentError(
            f"the placement has {placement.num_experts} experts on {placement.num_ranks} ranks, but "
            f"there are {count} experts on {axis.size} ranks",
            next="make a placement for this model and mesh (fulgurite.parallel.experts.rebalance)",
        )
    if not 0 <= layer < placement.num_layers:
        raise ArgumentError(
            f"the placement has {placement.num_layers} layers, and no layer {layer}",
            next="a placement has one row for each MoE layer",
        )
