"""The hierarchical dispatcher: a token crosses the network once for each node that has experts of it.

    dispatch    rank ─ network: one row a node ─▶ forwarder ─ inside the node ─▶ ranks of the experts
    combine     rank ◀─ network: one row a node ─ forwarder ◀─ inside the node ─ ranks of the experts

The forwarder of a row is the rank with the sender's local index on the target node. So a node group has
the ranks of one node, and a network group the ranks with one local index, one on each node. Compare
`AllToAllDispatcher`, which sends one row to each rank across the network.

A row has the token in the wire format, packed once by its sender, then its slots and router weights. The
forwarder reads the slots and passes the bytes on, so rounding is that of one packing. Results are summed
three times, each in a fixed order: over the experts of a rank (as the router ordered them), over the
ranks of a node, over nodes. Each sum is rounded to the dtype. A token whose experts are on one node has
the bits of `AllToAllDispatcher`; others differ by the order of the sum over ranks. Gradients take the
same ways back in full precision; the rounding of the wire format has gradient 1.

One all-gather of counts over the axis determines every split of both legs. It is the only time that the
host waits in a layer, and invalid slots or an exceeded capacity raise there on all ranks.

Shapes: T tokens of this rank; k experts of a token; P slots; W = N L ranks; N nodes; L ranks of a node;
F rows at the forwarder; R rows at the ranks of their experts; S assignments; H sent rows; B bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.kernels.dispatch.layout import get_dispatch_layout
from fulgurite.kernels.dispatch.wire_format import WIRE_FORMATS, WireFormat, align
from fulgurite.parallel.collectives import all_gather, all_to_all_rows
from fulgurite.parallel.dispatch.dispatcher import (
    SAME_DTYPE,
    WIRE_FORMAT_OF_DTYPE,
    DispatchedTokens,
)
from fulgurite.parallel.dispatch.row_segments import (
    RowSegments,
    append_zero_row,
    repeat_rows,
    sum_segments,
)
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.topology import NodeLayout, layout_nodes

Counts = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class NodeAxes:
    """An axis that spans nodes, as two: the ranks of this node, and this local index on all nodes."""

    axis: Axis
    node: Axis
    network: Axis
    layout: NodeLayout

    @property
    def node_of_rank(self) -> Tensor:
        """[W]: the index on the network axis of each rank of the axis."""
        return self._positions(0)

    @property
    def local_of_rank(self) -> Tensor:
        """[W]: the index on the node axis of each rank of the axis."""
        return self._positions(1)

    def _positions(self, part: int) -> Tensor:
        return torch.tensor([self.layout.position(rank)[part] for rank in range(self.axis.size)])


def split_by_node(axis: Axis) -> NodeAxes:
    """Create the two axes; a collective call of the ranks of the axis."""
    layout = layout_nodes(axis.nodes)
    node, local = layout.position(axis.index)
    own_node = layout.ranks_NL[node]
    own_network = tuple(ranks[local] for ranks in layout.ranks_NL)
    # The node group first on every rank: groups of one kind are disjoint, so nobody waits in a circle.
    return NodeAxes(
        axis,
        _make_axis(axis, f"{axis.name} node", own_node, local),
        _make_axis(axis, f"{axis.name} network", own_network, node),
        layout,
    )


def _make_axis(axis: Axis, name: str, indices: tuple[int, ...], index: int) -> Axis:
    ranks = tuple(axis.ranks[i] for i in indices)
    group = None
    if len(ranks) > 1 and axis.group is not None:
        timeout = None if axis.health is None else timedelta(seconds=axis.health.timeout)
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    nodes = tuple(axis.nodes[i] for i in indices)
    return Axis(name, ranks, index, group, axis.health, nodes, axis.network)


@dataclass(frozen=True, eq=False)
class Leg:
    """One all-to-all of rows: `source_H` are the rows to send, `returned_rows` the sums on the way back."""

    axis: Axis
    source_H: Tensor
    returned_rows: RowSegments
    send: Counts
    receive: Counts
    label: str

    def forward(self, rows: Tensor) -> Tensor:
        return all_to_all_rows(
            rows[self.source_H], self.axis, self.send, self.receive, f"{self.label} dispatch"
        )

    def backward(self, rows: Tensor, what: str = "combine") -> Tensor:
        """The same way back; a row of zeros is appended."""
        label = f"{self.label} {what}"
        return all_to_all_rows(rows, self.axis, self.receive, self.send, label, padding=1)


@dataclass(frozen=True)
class RowCounts:
    """Rows of both legs and assignments of this rank, on the host."""

    network_send: Counts
    network_receive: Counts
    node_send: Counts
    node_receive: Counts
    assignments: int


@dataclass(frozen=True, eq=False)
class HierarchicalHandle:
    network: Leg
    node: Leg
    assignments: RowSegments


class HierarchicalDispatcher:
    """All-to-all between nodes, then inside them; on any backend.

    dispatch_format   wire format of tokens, on both legs
    combine_format    wire format of results inside a node
    network_format    wire format of results across the network; None: `combine_format`
    capacity          the most rows a rank receives; None: no limit
    """

    can_capture = False  # the host reads the counts

    def __init__(
        self,
        axes: NodeAxes,
        dispatch_format: str = SAME_DTYPE,
        combine_format: str = SAME_DTYPE,
        network_format: str | None = None,
        capacity: int | None = None,
    ) -> None:
        network_format = combine_format if network_format is None else network_format
        for name in (dispatch_format, combine_format, network_format):
            if name != SAME_DTYPE and name not in WIRE_FORMATS:
                raise ArgumentError(
                    f"unknown wire format {name!r}",
                    next=f"one of {SAME_DTYPE}, {', '.join(WIRE_FORMATS)}",
                )
        self.axes, self.axis, self.capacity = axes, axes.axis, capacity
        self.dispatch_format = dispatch_format
        self.combine_format, self.network_format = combine_format, network_format
        self._node_of_rank, self._local_of_rank = axes.node_of_rank, axes.local_of_rank

    @classmethod
    def create(cls, axis: Axis, **options: Any) -> HierarchicalDispatcher:
        """A dispatcher with process groups of its own; a collective call."""
        return cls(split_by_node(axis), **options)

    def check(self) -> None:
        """Nothing is left to check: errors raise in `start_dispatch`."""

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> DispatchedTokens:
        device, top_k = x_TD.device, slots_Tk.shape[1]
        if self._node_of_rank.device != device:
            self._node_of_rank = self._node_of_rank.to(device)
            self._local_of_rank = self._local_of_rank.to(device)
        slots_per_rank = num_slots // self.axis.size
        counts, is_sent_TN = self._exchange_counts(slots_Tk, num_slots)
        network = _plan_leg(
            self.axes.network, is_sent_TN, counts.network_send, counts.network_receive, top_k,
            "network",
        )  # fmt: skip
        wire = _resolve(self.dispatch_format, x_TD)
        rows_FB = network.forward(_pack_rows(x_TD, slots_Tk, weights_Tk, wire))
        slots_Fk = _read_field(rows_FB, wire.row_bytes, top_k, torch.int32)
        node = _plan_leg(
            self.axes.node, self._ranks_inside(slots_Fk, slots_per_rank), counts.node_send,
            counts.node_receive, top_k, "node",
        )  # fmt: skip
        rows_RB = node.forward(rows_FB)
        del rows_FB  # as many bytes as the received rows
        x_RD, weights_Rk = _Dispatch.apply(x_TD, weights_Tk, rows_RB, wire, network, node)
        slots_Rk = _read_field(rows_RB, wire.row_bytes, top_k, torch.int32)
        is_local_Rk = slots_Rk // slots_per_rank == self.axis.index
        assignments, pair_S = _plan_assignments(is_local_Rk, counts.assignments)
        expert_S = slots_Rk.flatten()[pair_S] % slots_per_rank
        # One padding row: what the experts compute of it is the row of zeros that sums need.
        experts_S = torch.cat((expert_S, expert_S.new_full((1,), num_slots)))
        weights_S = torch.cat((weights_Rk.flatten()[pair_S], weights_Rk.new_zeros(1)))
        x_SD = repeat_rows(x_RD, assignments)
        handle = HierarchicalHandle(network, node, assignments)
        return DispatchedTokens(x_SD, experts_S, weights_S, handle)

    def finish_dispatch(self, pending: DispatchedTokens) -> DispatchedTokens:
        return pending  # `start_dispatch` has waited for everything

    def combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> Tensor:
        handle: HierarchicalHandle = dispatched.handle
        y_RD = sum_segments(y_SD, handle.assignments)
        for leg, name in (
            (handle.node, self.combine_format),
            (handle.network, self.network_format),
        ):
            returned_HD = _Return.apply(y_RD, _resolve(name, y_RD), leg)
            y_RD = sum_segments(returned_HD, leg.returned_rows)
        return y_RD

    def __str__(self) -> str:
        layout = self.axes.layout
        return (
            f"hierarchical dispatcher, {layout.num_nodes} nodes x {layout.ranks_per_node} ranks, "
            f"{self.axis}"
        )

    def _ranks_inside(self, slots_Fk: Tensor, slots_per_rank: int) -> Tensor:
        """[F, L]: the ranks of this node that a row is passed on to."""
        rank_Fk = (slots_Fk // slots_per_rank).long()
        size = self.axes.node.size
        is_here_Fk = self._node_of_rank[rank_Fk] == self.axes.network.index
        local_Fk = torch.where(is_here_Fk, self._local_of_rank[rank_Fk], size)
        none = torch.zeros(slots_Fk.shape[0], size + 1, dtype=torch.bool, device=slots_Fk.device)
        return none.scatter(1, local_Fk, True)[:, :size]

    def _exchange_counts(self, slots_Tk: Tensor, num_slots: int) -> tuple[RowCounts, Tensor]:
        """The splits of all legs, and [T, N]: the nodes of each token. Raises on all ranks."""
        size, nodes = self.axis.size, self.axes.network.size
        layout = get_dispatch_layout(slots_Tk, num_slots, size)
        is_sent_TW, rank_S = layout.is_token_in_rank_TW, layout.rank_Tk.flatten()
        members_NL = torch.tensor(self.axes.layout.ranks_NL, device=slots_Tk.device)
        is_sent_TN = is_sent_TW[:, members_NL].any(dim=2)
        pairs_W = rank_S.new_zeros(size + 1).scatter_add(0, rank_S, torch.ones_like(rank_S))
        own = torch.cat((is_sent_TW.sum(0), is_sent_TN.sum(0), pairs_W))
        gathered = all_gather(own[None], self.axis, "all-gather of dispatch counts").cpu()
        rows_WW, rows_WN, pairs_WW, invalid_W = gathered.split((size, nodes, size, 1), dim=1)
        _check_counts(rows_WW, invalid_W, self.capacity)
        node, local = self.axes.network.index, self.axes.node.index
        members = torch.tensor(self.axes.layout.ranks_NL)
        # What each forwarder of this node passes on to each of its ranks, [L, L].
        passed_LL = rows_WW[members][:, :, members[node]].sum(0)
        counts = RowCounts(
            tuple(rows_WN[self.axis.index].tolist()),
            tuple(rows_WN[members[:, local], node].tolist()),
            tuple(passed_LL[local].tolist()),
            tuple(passed_LL[:, local].tolist()),
            int(pairs_WW[:, self.axis.index].sum()),
        )
        return counts, is_sent_TN


class _Dispatch(Function):
    """The values of received rows. The gradients of tokens and weights go back along both legs."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_Tk: Tensor,
        rows_RB: Tensor,
        wire: WireFormat,
        network: Leg,
        node: Leg,
    ) -> tuple[Tensor, Tensor]:
        ctx.network, ctx.node = network, node
        top_k = weights_Tk.shape[1]
        x_RD = wire.unpack(rows_RB[:, : wire.row_bytes], x_TD.dtype)
        weights_Rk = _read_field(rows_RB, wire.row_bytes + 4 * top_k, top_k, weights_Tk.dtype)
        return x_RD, weights_Rk

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_RD, weights_Rk = gradients
        for leg in (ctx.node, ctx.network):
            # One message for both: their bytes side by side.
            x_RB = x_RD.contiguous().view(torch.uint8)
            rows_RB = torch.cat((x_RB, weights_Rk.contiguous().view(torch.uint8)), dim=1)
            back_HB = leg.backward(rows_RB, "dispatch of gradients")
            x_HD = _read_field(back_HB, 0, x_RD.shape[1], x_RD.dtype)
            weights_Hk = _read_field(back_HB, x_RB.shape[1], weights_Rk.shape[1], weights_Rk.dtype)
            x_RD = sum_segments(x_HD, leg.returned_rows)
            weights_Rk = sum_segments(weights_Hk, leg.returned_rows)
        return x_RD, weights_Rk, None, None, None, None


class _Return(Function):
    """Send results back along a leg, and append a row of zeros."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, wire: WireFormat, leg: Leg) -> Tensor:
        ctx.leg = leg
        return wire.unpack(leg.backward(wire.pack(y_RD)), y_RD.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        leg: Leg = ctx.leg
        label = f"{leg.label} combine of gradients"
        rows = all_to_all_rows(gradients[0][:-1], leg.axis, leg.send, leg.receive, label)
        return rows, None, None


def _plan_leg(
    axis: Axis, is_sent_TW: Tensor, send: Counts, receive: Counts, top_k: int, label: str
) -> Leg:
    """The rows that a leg sends, by rank and then by row, and the sums of what returns for each row."""
    total, tokens = sum(send), is_sent_TW.shape[0]
    position_TW = _first_positions(is_sent_TW.t(), total).view(axis.size, tokens).t()
    by_rank = is_sent_TW.int().argsort(dim=1, descending=True, stable=True)
    rows = position_TW.gather(1, by_rank[:, : min(top_k, axis.size)])
    source_H = _true_indices(is_sent_TW.t(), total) % max(1, tokens)
    return Leg(
        axis, source_H, RowSegments(rows.int(), append_zero_row(source_H)), send, receive, label
    )


def _plan_assignments(is_local_Rk: Tensor, total: int) -> tuple[RowSegments, Tensor]:
    """The assignments of each row to experts of this rank, and their places in [R, k]."""
    pair_S = _true_indices(is_local_Rk, total)
    position_Rk = _first_positions(is_local_Rk, total).view(is_local_Rk.shape)
    in_order = is_local_Rk.int().argsort(dim=1, descending=True, stable=True)
    rows = position_Rk.gather(1, in_order)
    return RowSegments(rows.int(), append_zero_row(pair_S // is_local_Rk.shape[1])), pair_S


def _true_indices(mask: Tensor, total: int) -> Tensor:
    """The flat indices of the `total` true entries, in order; the host need not wait for a count."""
    return mask.flatten().int().argsort(descending=True, stable=True)[:total]


def _first_positions(mask: Tensor, total: int) -> Tensor:
    """For each true entry, flat, how many are before it; `total` for the others."""
    flat = mask.flatten()
    return torch.where(flat, flat.int().cumsum(0, dtype=torch.int32) - 1, total)


def _pack_rows(x_TD: Tensor, slots_Tk: Tensor, weights_Tk: Tensor, wire: WireFormat) -> Tensor:
    """Each token as bytes: the wire format's row, its slots as int32, its router weights; aligned."""
    fields = (wire.pack(x_TD.detach()), slots_Tk.int(), weights_Tk.detach())
    rows_TB = torch.cat([field.contiguous().view(torch.uint8) for field in fields], dim=1)
    return pad(rows_TB, (0, align(rows_TB.shape[1]) - rows_TB.shape[1]))


def _read_field(rows_RB: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` values of each row from byte `offset` on."""
    field = rows_RB[:, offset : offset + count * dtype.itemsize]
    return field.clone(memory_format=torch.contiguous_format).view(dtype)


def _resolve(name: str, x: Tensor) -> WireFormat:
    return WireFormat(WIRE_FORMAT_OF_DTYPE[x.dtype] if name == SAME_DTYPE else name, x.shape[1])


def _check_counts(rows_WW: Tensor, invalid_W: Tensor, capacity: int | None) -> None:
    if invalid_W.any():
        rank = int(invalid_W.argmax())
        raise ArgumentError(
            f"rank {rank} of the expert axis sent {int(invalid_W[rank])} tokens to experts "
            f"that don't exist",
            next="check the router and the replica table; NaN logits select any expert",
        )
    received_W = rows_WW.sum(0)
    if capacity is not None and int(received_W.max()) > capacity:
        rank = int(received_W.argmax())
        raise CapacityError(
            f"rank {rank} of the expert axis would receive {int(received_W[rank])} rows, but its "
            f"capacity is {capacity}",
            where=f"rows by rank: {', '.join(map(str, received_W.tolist()))}",
            next="use a larger capacity, fewer tokens a step, or replicas of the busiest experts "
            "(fulgurite plan --expert-load); nothing was sent",
        )
