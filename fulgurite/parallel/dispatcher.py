"""Token dispatchers: tokens to the ranks of their experts and back. The interface, and all-to-all.

    pending    = dispatcher.start_dispatch(x_TD, slots_Tk, P, weights_Tk)
    dispatched = dispatcher.finish_dispatch(pending)         rows for the experts of this rank
    y_SD       = experts(dispatched.x_SD, ...)               each row by one expert, weighted
    out_TD     = dispatcher.combine(y_SD, dispatched)

A slot holds one expert; rank r has the slots from r P/W on. A token is sent once to each rank that has
experts of it, packed once by the sender (`WireFormat`). There it is repeated for each of them, and the
sum of their results is the one row that comes back. Gradients take the same ways back in full
precision; the rounding of the wire format has gradient 1. All sums have a fixed order.

`AllToAllDispatcher` works on every backend. It first all-gathers the counts of all ranks. If a rank
exceeds its capacity, or sends to an invalid slot, all ranks raise before any row is sent. Reading the
counts synchronizes with the host once a layer.

Shapes: T tokens of this rank; k experts of a token; P slots of all ranks; W ranks; R received rows;
S assignments of received rows to experts; H sent rows, which is also the number of returned rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.kernels.dispatch.layout import DispatchLayout, get_dispatch_layout
from fulgurite.kernels.dispatch.wire_format import WIRE_FORMATS, WireFormat
from fulgurite.kernels.moe.ops import combine_op
from fulgurite.parallel.collectives import all_gather, all_to_all, all_to_all_rows
from fulgurite.parallel.mesh import Axis

SAME_DTYPE = "same"  # wire format: the dtype of the tokens
SendReceiveCounts = tuple[tuple[int, ...], tuple[int, ...]]  # to each rank, and from each
WIRE_FORMAT_OF_DTYPE = {
    dtype: name for name, dtype in WIRE_FORMATS.items() if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True, eq=False)
class DispatchedTokens:
    """One row for each assignment to an expert of this rank.

    `experts_S` are indices on this rank; rows with an index past the last expert are padding.
    """

    x_SD: Tensor
    experts_S: Tensor
    weights_S: Tensor
    handle: Any  # the dispatcher's state for the combine


class TokenDispatcher(Protocol):
    """Dispatch and combine. All ranks of the axis make the same calls in the same order."""

    @property
    def axis(self) -> Axis: ...

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> Any:
        """Start to send each token, and its router weights, to the ranks of its slots."""
        ...

    def finish_dispatch(self, pending: Any) -> DispatchedTokens:
        """The rows for this rank's experts. Work between `start_dispatch` and this may overlap."""
        ...

    def combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Sum the results of each row, send them back, and sum them for each token: [T, D]."""
        ...


class RowSegments(NamedTuple):
    """Which rows are summed together.

    `rows[i]` are the rows of sum i, padded with the last row, which is zeros. `segment_of_row` is
    the sum that each row belongs to, the last row included.
    """

    rows: Tensor
    segment_of_row: Tensor


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Row counts by rank, and the sums of the combine."""

    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    assignments: RowSegments  # sums of a received row
    returned_rows: RowSegments  # sums of a token of this rank


class AllToAllDispatcher:
    """All-to-all on any backend. `capacity`: the most rows a rank receives; None: no limit."""

    def __init__(
        self,
        axis: Axis,
        dispatch_format: str = SAME_DTYPE,
        combine_format: str = SAME_DTYPE,
        capacity: int | None = None,
    ) -> None:
        for name in (dispatch_format, combine_format):
            if name != SAME_DTYPE and name not in WIRE_FORMATS:
                raise ArgumentError(
                    f"unknown wire format {name!r}",
                    next=f"one of {SAME_DTYPE}, {', '.join(WIRE_FORMATS)}",
                )
        self.axis, self.capacity = axis, capacity
        self.dispatch_format, self.combine_format = dispatch_format, combine_format

    def finish_dispatch(self, pending: DispatchedTokens) -> DispatchedTokens:
        return pending  # `start_dispatch` has waited for everything

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> DispatchedTokens:
        layout = get_dispatch_layout(slots_Tk, num_slots, self.axis.size)
        rows_WW, pairs_WW = self._exchange_counts(layout)
        own = self.axis.index
        send, receive = tuple(rows_WW[own].tolist()), tuple(rows_WW[:, own].tolist())
        pairs = tuple(pairs_WW[own].tolist()), tuple(pairs_WW[:, own].tolist())
        token_H = layout.is_token_in_rank_TW.t().nonzero()[:, 1]
        returned_rows = _token_segments(layout, token_H, slots_Tk.shape[1])
        wire = WireFormat(_resolve_wire_format(self.dispatch_format, x_TD.dtype), x_TD.shape[1])
        x_RD = _Dispatch.apply(x_TD, token_H, returned_rows, wire, self.axis, send, receive)
        row_S, experts_S, weights_S = self._send_assignments(
            layout, slots_Tk, num_slots, weights_Tk, pairs
        )
        row_S = row_S + _sender_offsets(receive, pairs[1]).to(x_TD.device)
        assignments = _assignment_segments(row_S, x_RD.shape[0])
        handle = DispatchHandle(send, receive, assignments, returned_rows)
        # One padding row: what the experts compute of it is the row of zeros that sums need.
        experts_S = torch.cat((experts_S, experts_S.new_full((1,), num_slots)))
        weights_S = torch.cat((weights_S, weights_S.new_zeros(1)))
        x_SD = _RepeatRows.apply(x_RD, assignments)
        return DispatchedTokens(x_SD, experts_S, weights_S, handle)

    def _send_assignments(
        self,
        layout: DispatchLayout,
        slots_Tk: Tensor,
        num_slots: int,
        weights_Tk: Tensor,
        pairs: SendReceiveCounts,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For each received assignment: the row among its sender's, the expert, the weight."""
        pair_S = layout.rank_Tk.flatten().argsort(stable=True)  # by rank, then by token
        row_S = layout.row_index_TW.gather(1, layout.rank_Tk).flatten()[pair_S]
        expert_S = slots_Tk.flatten()[pair_S] % (num_slots // self.axis.size)
        sent_S2 = torch.stack((row_S, expert_S.int()), dim=1)
        received_S2 = all_to_all_rows(sent_S2, self.axis, *pairs, "dispatch of assignments")
        sent_S = weights_Tk.flatten()[pair_S]
        weights_S = all_to_all(sent_S, self.axis, *pairs, "dispatch of router weights")
        return received_S2[:, 0], received_S2[:, 1], weights_S

    def combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> Tensor:
        handle: DispatchHandle = dispatched.handle
        y_RD = _sum_segments(y_SD, handle.assignments)
        wire = WireFormat(_resolve_wire_format(self.combine_format, y_RD.dtype), y_RD.shape[1])
        counts = handle.receive_counts, handle.send_counts
        returned_HD = _Combine.apply(y_RD, wire, self.axis, *counts)
        return _sum_segments(returned_HD, handle.returned_rows)

    def _exchange_counts(self, layout: DispatchLayout) -> tuple[Tensor, Tensor]:
        """Rows and assignments from each rank to each, [W, W] on the host; raises on all ranks."""
        size = self.axis.size
        rank_S = layout.rank_Tk.flatten()
        pairs_W = rank_S.new_zeros(size + 1).scatter_add(0, rank_S, torch.ones_like(rank_S))
        own = torch.cat((layout.is_token_in_rank_TW.sum(0), pairs_W))
        counts = all_gather(own[None], self.axis, "all-gather of dispatch counts").cpu()
        rows_WW, pairs_WW, invalid_W = counts.split((size, size, 1), dim=1)
        if invalid_W.any():
            rank = int(invalid_W.argmax())
            raise ArgumentError(
                f"rank {rank} of the expert axis sent {int(invalid_W[rank])} tokens to experts "
                f"that don't exist",
                next="check the router and the replica table; NaN logits select any expert",
            )
        received_W = rows_WW.sum(0)
        if self.capacity is not None and int(received_W.max()) > self.capacity:
            raise _capacity_error(received_W, self.capacity)
        return rows_WW, pairs_WW


class _Dispatch(Function):
    """Send tokens, packed once, to the ranks of their experts."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        token_H: Tensor,
        returned_rows: RowSegments,
        wire: WireFormat,
        axis: Axis,
        send: tuple[int, ...],
        receive: tuple[int, ...],
    ) -> Tensor:
        ctx.returned_rows, ctx.axis, ctx.counts = returned_rows, axis, (receive, send)
        rows_HB = wire.pack(x_TD)[token_H]
        return wire.unpack(all_to_all_rows(rows_HB, axis, send, receive, "dispatch"), x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        send, receive = ctx.counts
        returned_HD = all_to_all_rows(
            gradients[0], ctx.axis, send, receive, "dispatch of gradients", padding=1
        )
        return _sum_segments(returned_HD, ctx.returned_rows), None, None, None, None, None, None


class _Combine(Function):
    """Send results back to the ranks of their tokens, and append a row of zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        y_RD: Tensor,
        wire: WireFormat,
        axis: Axis,
        send: tuple[int, ...],
        receive: tuple[int, ...],
    ) -> Tensor:
        ctx.axis, ctx.counts = axis, (receive, send)
        rows_HB = all_to_all_rows(wire.pack(y_RD), axis, send, receive, "combine", padding=1)
        return wire.unpack(rows_HB, y_RD.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        send, receive = ctx.counts
        y_RD = all_to_all_rows(gradients[0][:-1], ctx.axis, send, receive, "combine of gradients")
        return y_RD, None, None, None, None


class _RepeatRows(Function):
    """One row for each assignment, and a padding row. The gradient sums them in order."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, assignments: RowSegments) -> Tensor:
        ctx.assignments = assignments
        if not x_RD.shape[0]:
            return x_RD.new_zeros(1, x_RD.shape[1])
        return x_RD[assignments.segment_of_row]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows = gradients[0].clone()
        rows[-1] = 0
        return _sum_segments(rows, ctx.assignments), None


def _sum_segments(rows: Tensor, segments: RowSegments) -> Tensor:
    """The sum of each segment's rows, in order; the last row is zeros."""
    if segments.rows.shape[0] == 0:
        return rows[:0]
    segment_of_row = segments.segment_of_row
    out: Tensor = combine_op(rows, segments.rows, segment_of_row, segment_of_row, None)
    return out


def _token_segments(layout: DispatchLayout, token_H: Tensor, top_k: int) -> RowSegments:
    """The returned rows of each token, by rank. Rows are ordered by rank, then by token."""
    is_sent_TW = layout.is_token_in_rank_TW
    ends_W = is_sent_TW.sum(0).cumsum(0)
    row_TW = layout.row_index_TW + (ends_W - is_sent_TW.sum(0))
    zero_row = token_H.shape[0]
    row_TW = row_TW.masked_fill(~is_sent_TW, zero_row)
    by_rank = is_sent_TW.int().argsort(dim=1, descending=True, stable=True)
    rows = row_TW.gather(1, by_rank[:, : min(top_k, is_sent_TW.shape[1])])
    return RowSegments(rows.int(), _append_zero_row(token_H))


def _assignment_segments(row_S: Tensor, num_rows: int) -> RowSegments:
    """The assignments of each received row, which are consecutive."""
    counts_R = torch.zeros(num_rows, dtype=torch.long, device=row_S.device)
    counts_R = counts_R.scatter_add(0, row_S.long(), torch.ones_like(row_S, dtype=torch.long))
    max_count = int(counts_R.max()) if num_rows else 0
    offset = torch.arange(max_count, device=row_S.device)
    rows = (counts_R.cumsum(0) - counts_R)[:, None] + offset
    rows = rows.masked_fill(offset >= counts_R[:, None], row_S.shape[0])
    return RowSegments(rows.int(), _append_zero_row(row_S))


def _append_zero_row(segment_of_row: Tensor) -> Tensor:
    """With the row of zeros at the end, which may belong to any sum."""
    zero_row = segment_of_row.new_zeros(1, dtype=torch.int32)
    return torch.cat((segment_of_row.int(), zero_row))


def _sender_offsets(rows: tuple[int, ...], pairs: tuple[int, ...]) -> Tensor:
    """For each received assignment, the first row of its sender."""
    rows_W = torch.tensor(rows)
    return (rows_W.cumsum(0) - rows_W).repeat_interleave(torch.tensor(pairs)).int()


def _resolve_wire_format(name: str, dtype: torch.dtype) -> str:
    return WIRE_FORMAT_OF_DTYPE[dtype] if name == SAME_DTYPE else name


def _capacity_error(received_W: Tensor, capacity: int) -> CapacityError:
    rank = int(received_W.argmax())
    rows, mean = int(received_W[rank]), float(received_W.float().mean())
    return CapacityError(
        f"rank {rank} of the expert axis would receive {rows} rows, but its capacity is {capacity}",
        where=f"rows by rank: {', '.join(map(str, received_W.tolist()))}; mean {mean:.0f}",
        next=f"use capacity={rows} or more, fewer tokens a step, or replicas of the busiest experts "
        "(fulgurite plan --expert-load); nothing was sent",
    )
