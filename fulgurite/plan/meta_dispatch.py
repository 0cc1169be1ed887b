"""Token dispatch on the meta device: what a real dispatcher allocates, in the worst case.

In: hidden states and routes of this rank's tokens, without values. Out: the rows of the busiest rank,
without values. The worst case is a step in which all tokens of all ranks select experts of this rank,
as many of them as a token can:

    R = W T    received rows: every token of every rank once
    S = R V    assignments to experts, V = min(k, experts of a rank)
    H = T (1 + min(k - V, W - 1))    sent rows: the other experts of a token are on other ranks

The dispatchers run the code of the real ones. Only the row counts, which ranks exchange, are those of
the worst case; and nothing is sent. `parallelize(..., dispatcher=make_meta_dispatcher(...))` on a meta model then gives
modules whose largest step can be run to see what it allocates (activations.py).

Shapes: T tokens of this rank; k experts of a token; W ranks; N nodes; L ranks of a node; R, S, H as
above; C rows from one rank to another; D hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.kernels.dispatch.layout import DispatchLayout
from fulgurite.models.config import ModelConfig
from fulgurite.parallel.dispatch.all_to_all import (
    AllToAllDispatcher,
    ExchangedCounts,
    PendingPayload,
)
from fulgurite.parallel.dispatch.deterministic import DeterministicDispatcher
from fulgurite.parallel.dispatch.dispatcher import (
    MAX_PADDED_ROWS,
    DispatchedTokens,
    TokenDispatcher,
)
from fulgurite.parallel.dispatch.hierarchical import HierarchicalDispatcher, RowCounts
from fulgurite.parallel.dispatch.node_axes import NodeAxes
from fulgurite.parallel.dispatch.symmetric import SymmetricMemoryDispatcher
from fulgurite.parallel.experts.expert_parallel import ExpertParallel
from fulgurite.parallel.experts.transport import ExpertOptions
from fulgurite.parallel.mesh import Axis, MeshShape
from fulgurite.parallel.symmetric.memory import SymmetricBuffer
from fulgurite.parallel.topology import layout_nodes
from fulgurite.plan.limits import EngineLimits


def plan_dispatch(
    options: ExpertOptions,
    config: ModelConfig,
    dtype: torch.dtype,
    limits: EngineLimits,
    shape: MeshShape,
    num_slots: int | None = None,
) -> DispatchConfig:
    """What the dispatcher of a model is built for; `num_slots`: of a layer, None: one an expert."""
    assert config.moe is not None, f"{config.family} has no experts"
    slots = num_slots or config.moe.num_experts
    return options.dispatch_config(
        config.hidden_size,
        config.moe.top_k,
        dtype,
        max_tokens=shape.count_rank_tokens(limits.max_batched_tokens),
        experts_per_rank=-(-slots // shape.expert),
    )


def make_meta_dispatcher(transport: str, axis: Axis, config: DispatchConfig) -> TokenDispatcher:
    """A dispatcher for meta tensors that allocates as this transport does in its worst case."""
    if transport == "symmetric":
        return MetaSymmetricDispatcher(axis, config)
    formats = config.dispatch_format, config.combine_format
    if transport == "hierarchical":
        return MetaHierarchicalDispatcher(split_planned_axis(axis), *formats)
    assert transport == "all_to_all", f"there is no plan of {transport}"
    return MetaAllToAllDispatcher(axis, *formats)


def use_micro_batches(model: nn.Module, count: int) -> None:
    """Run the experts of a model in so many micro-batches, as an engine does."""
    for module in model.modules():
        if isinstance(module, ExpertParallel):
            module.micro_batches = count


class WorstCase(NamedTuple):
    """Rows of the busiest rank.

    assignments   of a received row to experts of this rank
    elsewhere     other experts of a token
    """

    assignments: int
    elsewhere: int


def find_worst_case(top_k: int, experts_per_rank: int) -> WorstCase:
    here = min(top_k, experts_per_rank)
    return WorstCase(here, top_k - here)


class MetaAllToAllDispatcher(AllToAllDispatcher):
    """`AllToAllDispatcher` whose counts are the worst case."""

    experts_per_rank = 1

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> PendingPayload | DispatchedTokens:
        self.experts_per_rank = num_slots // self.axis.size
        return super().start_dispatch(x_TD, slots_Tk, num_slots, weights_Tk)

    def _exchange_counts(self, layout: DispatchLayout) -> ExchangedCounts:
        tokens, top_k = layout.rank_Tk.shape
        worst = find_worst_case(top_k, self.experts_per_rank)
        size, own = self.axis.size, self.axis.index
        send = place(size, own, tokens, worst.elsewhere)
        pairs = tuple(
            count * (worst.assignments if r == own else 1) for r, count in enumerate(send)
        )
        received = (tokens * worst.assignments,) * size
        return ExchangedCounts(
            rows=(send, (tokens,) * size),
            pairs=(pairs, received),
            max_assignments=worst.assignments,
        )

    def critical_tokens(self, tokens: int) -> list[int]:
        return find_padded_step(self.axis, tokens)


def find_padded_step(axis: Axis, tokens: int) -> list[int]:
    """Smaller steps that may need more memory: the largest one with equal splits, padded."""
    padded = MAX_PADDED_ROWS // axis.size
    return [padded] if 0 < padded < tokens else []


class MetaHierarchicalDispatcher(HierarchicalDispatcher):
    """`HierarchicalDispatcher` whose counts are the worst case: this rank forwards rows, too."""

    def critical_tokens(self, tokens: int) -> list[int]:
        return find_padded_step(self.axis, tokens)

    def _exchange_counts(self, slots_Tk: Tensor, num_slots: int) -> tuple[RowCounts, Tensor]:
        tokens, top_k = slots_Tk.shape
        worst = find_worst_case(top_k, num_slots // self.axis.size)
        node, network = self.axes.node, self.axes.network
        in_node = min(worst.elsewhere, node.size - 1)
        in_network = min(worst.elsewhere - in_node, network.size - 1)
        forwarded = tokens * network.size
        counts = RowCounts(
            network_send=place(network.size, network.index, tokens, in_network),
            network_receive=(tokens,) * network.size,
            node_send=place(node.size, node.index, forwarded, in_node),
            node_receive=(forwarded,) * node.size,
            assignments=tokens * self.axis.size * worst.assignments,
        )
        return counts, slots_Tk.new_empty(tokens, network.size, dtype=torch.bool)


class MetaDeterministicDispatcher(DeterministicDispatcher):
    """`DeterministicDispatcher`, one row an assignment, whose counts are the worst case."""

    top_k = 1

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> DispatchedTokens:
        self.top_k = slots_Tk.shape[1]
        return super().start_dispatch(x_TD, slots_Tk, num_slots, weights_Tk)

    def _exchange_counts(
        self, slot_H: Tensor, num_slots: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        size, own = self.axis.size, self.axis.index
        worst = find_worst_case(self.top_k, num_slots // size)
        tokens = slot_H.shape[0] // self.top_k
        send = [0] * size
        send[own], send[own - 1] = tokens * worst.assignments, tokens * worst.elsewhere
        return tuple(send), (tokens * worst.assignments,) * size


class MetaSymmetricDispatcher(SymmetricMemoryDispatcher):
    """`SymmetricMemoryDispatcher` without its kernels. Its shapes are fixed: those of the worst case."""

    def __init__(self, axis: Axis, config: DispatchConfig) -> None:
        size = config.num_bytes(axis.size)
        data = torch.empty(size, dtype=torch.uint8, device="meta")
        super().__init__(axis, config, SymmetricBuffer(data, data.new_empty(axis.size)))

    def _send_rows(self, *tensors: Any) -> None: ...

    def _receive_rows(self, *tensors: Any) -> None: ...

    def _send_results(self, *tensors: Any) -> None: ...

    def _sum_results(self, *tensors: Any) -> None: ...

    def _wait_flags(self, *tensors: Any, **options: Any) -> None: ...

    def check(self) -> None:
        """Nothing was sent."""


def split_planned_axis(axis: Axis) -> NodeAxes:
    """`split_by_node` without process groups."""
    layout = layout_nodes(axis.nodes)
    node, local = layout.position(axis.index)

    def part(name: str, indices: tuple[int, ...], index: int) -> Axis:
        return replace(
            axis,
            name=f"{axis.name} {name}",
            ranks=tuple(axis.ranks[i] for i in indices),
            index=index,
            group=axis.group if len(indices) > 1 else None,
            nodes=tuple(axis.nodes[i] for i in indices),
        )

    network = tuple(ranks[local] for ranks in layout.ranks_NL)
    return NodeAxes(
        axis, part("node", layout.ranks_NL[node], local), part("network", network, node), layout
    )


def place(size: int, own: int, count: int, others: int) -> tuple[int, ...]:
    """`count` rows to this rank, and to `others` of the other ones."""
    other_ranks = [rank for rank in range(size) if rank != own][:others]
    return tuple(count if rank == own or rank in other_ranks else 0 for rank in range(size))
