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

How many rows a leg sends:

    exact     one all-gather of counts over the axis determines every split of both legs. It is the only
              time that the host waits in a layer, and invalid slots or an exceeded capacity raise there
              on all ranks
    padded    in small steps whose largest number of tokens C all ranks know (`set_step_tokens`), without
              gradients: C rows to every node, and N C rows to every rank of a node, as many of them
              padding as needed. The host reads nothing, so that a CUDA graph can hold the layer if both
              groups communicate on the device. Invalid slots raise in `check` on all ranks

Both give the same bits.

Shapes: T tokens of this rank; k experts of a token; P slots; W = N L ranks; N nodes; L ranks of a node;
F rows at the forwarder; R rows at the ranks of their experts; S assignments; H sent rows; B bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.kernels.dispatch.layout import get_dispatch_layout
from fulgurite.kernels.dispatch.wire_format import WIRE_FORMATS, WireFormat
from fulgurite.parallel.collectives import all_gather, all_to_all_rows
from fulgurite.parallel.dispatch.dispatcher import (
    SAME_DTYPE,
    WIRE_FORMAT_OF_DTYPE,
    DispatchedTokens,
    can_pad,
)
from fulgurite.parallel.dispatch.legs import (
    Counts,
    Leg,
    RouteFields,
    mask_assignments,
    pack_rows,
    pad_leg,
    plan_assignments,
    plan_leg,
    read_field,
)
from fulgurite.parallel.dispatch.node_axes import NodeAxes, split_by_node
from fulgurite.parallel.dispatch.row_segments import RowSegments, repeat_rows, sum_segments
from fulgurite.parallel.mesh import Axis

PlanNode = Callable[[Tensor], Leg]


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
        self._members_NL = torch.tensor(axes.layout.ranks_NL)
        self.step_tokens: int | None = None
        self.invalid_mark: Tensor | None = None  # the largest mark of padded steps

    @classmethod
    def create(cls, axis: Axis, **options: Any) -> HierarchicalDispatcher:
        """A dispatcher with process groups of its own; a collective call."""
        return cls(split_by_node(axis), **options)

    def set_step_tokens(self, count: int | None) -> None:
        self.step_tokens = count

    @property
    def is_padded(self) -> bool:
        """Whether the next step has equal splits, so that the host reads no counts."""
        return not torch.is_grad_enabled() and self.can_capture_step

    @property
    def can_capture_step(self) -> bool:
        return can_pad(self.step_tokens, self.axis.size, self.capacity)

    @property
    def can_capture(self) -> bool:
        """Whether both groups communicate on the device; small steps of known size are captured."""
        axes = (self.axes.node, self.axes.network)
        return all(
            axis.size == 1 or axis.device_collectives is not None or axis.has_nccl for axis in axes
        )

    def check(self) -> None:
        """Raise for invalid slots of padded steps; exact ones raise in `start_dispatch`."""
        mark = 0 if self.invalid_mark is None else int(self.invalid_mark)
        if mark and self.invalid_mark is not None:
            self.invalid_mark.zero_()
            raise _invalid_slot_error(mark - 1)

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> DispatchedTokens:
        device, top_k = x_TD.device, slots_Tk.shape[1]
        if self._node_of_rank.device != device:
            self._node_of_rank = self._node_of_rank.to(device)
            self._local_of_rank = self._local_of_rank.to(device)
            self._members_NL = self._members_NL.to(device)
        slots_per_rank = num_slots // self.axis.size
        plan = self._plan_padded if self.is_padded else self._plan_exact
        network, plan_node, assigned = plan(slots_Tk, num_slots)
        wire = _resolve(self.dispatch_format, x_TD)
        fields = RouteFields(wire.row_bytes, top_k)
        packed_Tk, mark = self._mark_invalid(slots_Tk, num_slots)
        rows_TB = pack_rows(x_TD, packed_Tk, weights_Tk, wire, mark)
        rows_FB = network.forward(rows_TB, fields)
        node = plan_node(self._ranks_inside(fields.read_slots(rows_FB), slots_per_rank))
        rows_RB = node.forward(rows_FB, fields)
        del rows_FB  # as many bytes as the received rows
        x_RD, weights_Rk = _Dispatch.apply(x_TD, weights_Tk, rows_RB, wire, network, node)
        slots_Rk = fields.read_slots(rows_RB)
        is_local_Rk = slots_Rk // slots_per_rank == self.axis.index
        if assigned is None:
            self._record_mark(fields.read_mark(rows_RB))
            assignments, expert_S, weights_S = mask_assignments(
                is_local_Rk, slots_Rk % slots_per_rank, weights_Rk, num_slots
            )
        else:
            assignments, pair_S = plan_assignments(is_local_Rk, assigned)
            expert_S = slots_Rk.flatten()[pair_S] % slots_per_rank
            weights_S = weights_Rk.flatten()[pair_S]
        # One padding row: what the experts compute of it is the row of zeros that sums need.
        experts_S = torch.cat((expert_S, expert_S.new_full((1,), num_slots)))
        weights_S = torch.cat((weights_S, weights_S.new_zeros(1)))
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
        is_routed_Fk = slots_Fk >= 0
        rank_Fk = (slots_Fk // slots_per_rank).long().clamp(min=0)
        size = self.axes.node.size
        is_here_Fk = (self._node_of_rank[rank_Fk] == self.axes.network.index) & is_routed_Fk
        local_Fk = torch.where(is_here_Fk, self._local_of_rank[rank_Fk], size)
        none = torch.zeros(slots_Fk.shape[0], size + 1, dtype=torch.bool, device=slots_Fk.device)
        return none.scatter(1, local_Fk, True)[:, :size]

    def _plan_exact(self, slots_Tk: Tensor, num_slots: int) -> tuple[Leg, PlanNode, int | None]:
        """The first leg, the second one once its rows are there, and the number of assignments."""
        counts, is_sent_TN = self._exchange_counts(slots_Tk, num_slots)
        top_k = slots_Tk.shape[1]

        def plan(axis: Axis, send: Counts, receive: Counts, label: str, is_sent: Tensor) -> Leg:
            return plan_leg(axis, is_sent, send, receive, top_k, label)

        splits = counts.network_send, counts.network_receive
        network = plan(self.axes.network, *splits, "network", is_sent_TN)
        splits = counts.node_send, counts.node_receive
        return network, partial(plan, self.axes.node, *splits, "node"), counts.assignments

    def _plan_padded(self, slots_Tk: Tensor, num_slots: int) -> tuple[Leg, PlanNode, int | None]:
        """The same with equal splits; the number of assignments is not known."""
        assert self.step_tokens is not None, "a padded step has a known size"
        tokens, top_k = slots_Tk.shape
        if tokens > self.step_tokens:
            raise ArgumentError(
                f"{tokens} tokens in a step for which all ranks agreed on at most "
                f"{self.step_tokens}",
                where=str(self.axis),
                next="call set_step_tokens with the largest number of all ranks, or with None",
            )
        layout = get_dispatch_layout(slots_Tk, num_slots, self.axis.size)
        is_sent_TN = layout.is_token_in_rank_TW[:, self._members_NL].any(dim=2)
        node, network = self.axes.node, self.axes.network
        forwarded = network.size * self.step_tokens
        return (
            pad_leg(network, is_sent_TN, self.step_tokens, top_k, "network"),
            lambda is_sent: pad_leg(node, is_sent, forwarded, top_k, "node"),
            None,
        )

    def _mark_invalid(self, slots_Tk: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        """The slots without invalid ones, and this rank's mark."""
        is_invalid_Tk = (slots_Tk < 0) | (slots_Tk >= num_slots)
        mark = is_invalid_Tk.any().int() * (self.axis.index + 1)
        return slots_Tk.int().masked_fill(is_invalid_Tk, -1), mark

    def _record_mark(self, mark_R1: Tensor) -> None:
        """Remember, without waiting for the device, which rank had invalid slots."""
        if not mark_R1.shape[0]:
            return
        if self.invalid_mark is None:
            self.invalid_mark = mark_R1.new_zeros(())
        torch.maximum(self.invalid_mark, mark_R1.amax(), out=self.invalid_mark)

    def _exchange_counts(self, slots_Tk: Tensor, num_slots: int) -> tuple[RowCounts, Tensor]:
        """The splits of all legs, and [T, N]: the nodes of each token. Raises on all ranks."""
        size, nodes = self.axis.size, self.axes.network.size
        layout = get_dispatch_layout(slots_Tk, num_slots, size)
        is_sent_TW, rank_S = layout.is_token_in_rank_TW, layout.rank_Tk.flatten()
        is_sent_TN = is_sent_TW[:, self._members_NL].any(dim=2)
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
        fields = RouteFields(wire.row_bytes, top_k)
        weights_Rk = fields.read_weights(rows_RB, weights_Tk.dtype)
        return x_RD, weights_Rk

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_RD, weights_Rk = gradients
        for leg in (ctx.node, ctx.network):
            # One message for both: their bytes side by side.
            x_RB = x_RD.contiguous().view(torch.uint8)
            rows_RB = torch.cat((x_RB, weights_Rk.contiguous().view(torch.uint8)), dim=1)
            back_HB = leg.backward(rows_RB, "dispatch of gradients")
            x_HD = read_field(back_HB, 0, x_RD.shape[1], x_RD.dtype)
            weights_Hk = read_field(back_HB, x_RB.shape[1], weights_Rk.shape[1], weights_Rk.dtype)
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


def _resolve(name: str, x: Tensor) -> WireFormat:
    return WireFormat(WIRE_FORMAT_OF_DTYPE[x.dtype] if name == SAME_DTYPE else name, x.shape[1])


def _check_counts(rows_WW: Tensor, invalid_W: Tensor, capacity: int | None) -> None:
    if invalid_W.any():
        rank = int(invalid_W.argmax())
        raise _invalid_slot_error(rank, f"{int(invalid_W[rank])} ")
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


def _invalid_slot_error(rank: int, count: str = "") -> ArgumentError:
    return ArgumentError(
        f"rank {rank} of the expert axis sent {count}tokens to experts that don't exist",
        next="check the router and the replica table; NaN logits select any expert",
    )
