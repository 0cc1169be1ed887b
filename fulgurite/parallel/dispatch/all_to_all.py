"""The all-to-all dispatcher: a `TokenDispatcher` on every backend, by collectives.

A token is sent once to each rank that has experts of it, packed once by the sender (`WireFormat`). There
it is repeated for each of them, and the sum of their results is the one row that comes back.

In inference a layer has one all-to-all in each direction, whose rows have their routes with them
(payload.py). How many rows go to each rank:

    exact     all ranks first all-gather their counts, which the host reads: one host sync a layer. If a
              rank exceeds its capacity, or sends to an invalid slot, all ranks raise before a row is sent
    padded    in small steps whose largest number of tokens C all ranks know (`set_step_tokens`): C rows to
              every rank, as many of them padding as needed. No counts, and nothing waits for the device;
              an invalid slot raises in `check` on all ranks

Both give the same bits. Work between start and finish overlaps with the transfer. With gradients enabled
the splits are exact.

Shapes: T tokens of this rank; k experts of a token; P slots of all ranks; W ranks; R received rows;
S assignments of received rows to experts; H sent rows, which is also the number of returned rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.kernels.dispatch.layout import DispatchLayout, get_dispatch_layout
from fulgurite.kernels.dispatch.wire_format import WIRE_FORMATS, WireFormat
from fulgurite.parallel.collectives import (
    PendingRows,
    all_gather,
    all_to_all,
    all_to_all_rows,
    start_all_to_all_rows,
)
from fulgurite.parallel.dispatch.dispatcher import (
    SAME_DTYPE,
    WIRE_FORMAT_OF_DTYPE,
    DispatchedTokens,
    can_pad,
)
from fulgurite.parallel.dispatch.payload import (
    ReceivedRows,
    SendOrder,
    gather_rows,
    order_rows,
    pack_payload,
    unpack_payload,
)
from fulgurite.parallel.dispatch.row_segments import (
    RowSegments,
    append_zero_row,
    repeat_rows,
    sum_segments,
)
from fulgurite.parallel.mesh import Axis

SendReceiveCounts = tuple[tuple[int, ...], tuple[int, ...]]  # to each rank, and from each


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Row counts by rank, and the sums of the combine."""

    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    assignments: RowSegments  # sums of a received row
    returned_rows: RowSegments  # sums of a token of this rank


@dataclass(frozen=True, eq=False)
class PendingPayload:
    """Rows on their way to their experts."""

    rows: PendingRows
    order: SendOrder
    wire: WireFormat
    counts: SendReceiveCounts  # rows
    num_assignments: int | None  # received; None: unknown, the rows are padded
    max_assignments: int  # of a received row
    x_TD: Tensor
    slots_Tk: Tensor
    weights_Tk: Tensor
    num_slots: int


@dataclass(eq=False)
class PayloadHandle:
    """The way back. `returned` are rows on it, between start and finish of the combine."""

    counts: SendReceiveCounts
    assignments: RowSegments
    returned_rows: RowSegments
    returned: PendingRows | None = None
    wire: WireFormat | None = None
    dtype: torch.dtype | None = None


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
        self.step_tokens: int | None = None
        self.num_invalid_W: Tensor | None = None  # by rank: invalid slots in padded steps

    # ---- the size of a step ------------------------------------------------------------------------

    def set_step_tokens(self, count: int | None) -> None:
        self.step_tokens = count

    @property
    def is_padded(self) -> bool:
        """Whether the next step has equal splits, so that the host reads no counts."""
        return can_pad(self.step_tokens, self.axis.size, self.capacity)

    @property
    def can_capture_step(self) -> bool:
        return self.is_padded

    @property
    def can_capture(self) -> bool:
        """NCCL's collectives can be captured; small steps of known size read nothing on the host."""
        group = self.axis.group
        return group is not None and "nccl" in dist.get_backend_config(group)

    def check(self) -> None:
        if self.num_invalid_W is None:
            return
        counts: list[int] = self.num_invalid_W.tolist()
        if any(counts):
            self.num_invalid_W.zero_()
            raise _invalid_slot_error(counts)

    # ---- inference ---------------------------------------------------------------------------------

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> PendingPayload | DispatchedTokens:
        if torch.is_grad_enabled():
            return self._dispatch_with_gradients(x_TD, slots_Tk, num_slots, weights_Tk)
        layout = get_dispatch_layout(slots_Tk, num_slots, self.axis.size)
        size, top_k = self.axis.size, slots_Tk.shape[1]
        is_sent_TW, num_assignments, max_assignments = layout.is_token_in_rank_TW, None, top_k
        if self.is_padded:
            assert self.step_tokens is not None, "a padded step has a known size"
            self._check_step(x_TD.shape[0], self.step_tokens)
            counts = (self.step_tokens,) * size, (self.step_tokens,) * size
            offsets_W = torch.arange(size, device=x_TD.device) * self.step_tokens
            num_invalid = (layout.rank_Tk == size).sum(dtype=torch.int32)
        else:
            exchanged = self._exchange_counts(layout)
            counts, pairs = exchanged.rows, exchanged.pairs
            num_assignments, max_assignments = sum(pairs[1]), exchanged.max_assignments
            rows_W = is_sent_TW.sum(0)
            offsets_W, num_invalid = rows_W.cumsum(0) - rows_W, rows_W.new_zeros(())
        order = order_rows(layout, offsets_W, sum(counts[0]))
        wire = WireFormat(_resolve_wire_format(self.dispatch_format, x_TD.dtype), x_TD.shape[1])
        payload_HB = pack_payload(
            x_TD, slots_Tk, weights_Tk, order, wire, num_slots // size, num_invalid
        )
        rows = start_all_to_all_rows(payload_HB, self.axis, *counts, "dispatch")
        return PendingPayload(
            rows, order, wire, counts, num_assignments, max_assignments, x_TD, slots_Tk, weights_Tk,
            num_slots,
        )  # fmt: skip

    def finish_dispatch(
        self, pending: PendingPayload | DispatchedTokens, keep_fp8: bool = False
    ) -> DispatchedTokens:
        if isinstance(pending, DispatchedTokens):
            return pending  # with gradients, `start_dispatch` has waited for everything
        x_TD, top_k = pending.x_TD, pending.slots_Tk.shape[1]
        received = unpack_payload(
            pending.rows.wait(), top_k, pending.wire, x_TD.dtype, pending.weights_Tk.dtype,
            keep_quantized=keep_fp8 and pending.wire.name == "fp8",
        )  # fmt: skip
        if pending.num_assignments is None:
            self._record_invalid_slots(received.num_invalid_R)
            pair_S = torch.arange(received.experts_Rk.numel(), device=x_TD.device)
        else:
            pair_S = _compact(received.experts_Rk, pending.num_assignments)
        experts_S = received.experts_Rk.flatten()[pair_S]
        # One padding row: what the experts compute of it is the row of zeros that sums need.
        is_padding_S = experts_S < 0
        experts_S = experts_S.masked_fill(is_padding_S, pending.num_slots)
        experts_S = torch.cat((experts_S, experts_S.new_full((1,), pending.num_slots)))
        weights_S = received.weights_Rk.flatten()[pair_S].masked_fill(is_padding_S, 0)
        weights_S = torch.cat((weights_S, weights_S.new_zeros(1)))
        row_S = append_zero_row(pair_S // top_k)
        segments = _payload_segments(received, pending, pair_S, row_S)
        x_SD = gather_rows(received.x_RD, row_S)
        returned_rows = RowSegments(
            _returned_rows(pending.order, top_k), append_zero_row(pending.order.token_H)
        )
        handle = PayloadHandle(pending.counts, segments, returned_rows)
        return DispatchedTokens(x_SD, experts_S, weights_S, handle)

    def combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> Tensor:
        if isinstance(dispatched.handle, DispatchHandle):
            return self._combine_with_gradients(y_SD, dispatched.handle)
        self.start_combine(y_SD, dispatched)
        return self.finish_combine(dispatched)

    def start_combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> None:
        handle: PayloadHandle = dispatched.handle
        y_RD = sum_segments(y_SD, handle.assignments)
        wire = WireFormat(_resolve_wire_format(self.combine_format, y_RD.dtype), y_RD.shape[1])
        handle.wire, handle.dtype = wire, y_RD.dtype
        counts = handle.counts[1], handle.counts[0]
        handle.returned = start_all_to_all_rows(
            wire.pack(y_RD), self.axis, *counts, "combine", padding=1
        )

    def finish_combine(self, dispatched: DispatchedTokens) -> Tensor:
        handle: PayloadHandle = dispatched.handle
        assert handle.returned is not None and handle.wire is not None, "start_combine comes first"
        assert handle.dtype is not None
        returned_HD = handle.wire.unpack(handle.returned.wait(), handle.dtype)
        handle.returned = None
        return sum_segments(returned_HD, handle.returned_rows)

    def _check_step(self, tokens: int, step_tokens: int) -> None:
        if tokens > step_tokens:
            raise ArgumentError(
                f"{tokens} tokens in a step for which all ranks agreed on at most {step_tokens}",
                where=str(self.axis),
                next="call set_step_tokens with the largest number of all ranks, or with None",
            )

    def _record_invalid_slots(self, num_invalid_R: Tensor) -> None:
        """Remember, without waiting for the device, how many invalid slots each rank had."""
        if not num_invalid_R.shape[0]:
            return
        found_W = num_invalid_R.view(self.axis.size, -1)[:, 0]
        if self.num_invalid_W is None:
            self.num_invalid_W = torch.zeros_like(found_W)
        torch.maximum(self.num_invalid_W, found_W, out=self.num_invalid_W)

    # ---- with gradients ----------------------------------------------------------------------------

    def _dispatch_with_gradients(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> DispatchedTokens:
        layout = get_dispatch_layout(slots_Tk, num_slots, self.axis.size)
        exchanged = self._exchange_counts(layout)
        (send, receive), pairs = exchanged.rows, exchanged.pairs
        rows_W = layout.is_token_in_rank_TW.sum(0)
        order = order_rows(layout, rows_W.cumsum(0) - rows_W, sum(send))
        token_H = order.token_H
        returned_rows = RowSegments(
            _returned_rows(order, slots_Tk.shape[1]), append_zero_row(token_H)
        )
        wire = WireFormat(_resolve_wire_format(self.dispatch_format, x_TD.dtype), x_TD.shape[1])
        x_RD = _Dispatch.apply(x_TD, token_H, returned_rows, wire, self.axis, send, receive)
        row_S, experts_S, weights_S = self._send_assignments(
            layout, slots_Tk, num_slots, weights_Tk, pairs
        )
        row_S = row_S + _sender_offsets(receive, pairs[1]).to(x_TD.device)
        assignments = _assignment_segments(row_S, x_RD.shape[0], exchanged.max_assignments)
        handle = DispatchHandle(send, receive, assignments, returned_rows)
        # One padding row: what the experts compute of it is the row of zeros that sums need.
        experts_S = torch.cat((experts_S, experts_S.new_full((1,), num_slots)))
        weights_S = torch.cat((weights_S, weights_S.new_zeros(1)))
        x_SD = repeat_rows(x_RD, assignments)
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

    def _combine_with_gradients(self, y_SD: Tensor, handle: DispatchHandle) -> Tensor:
        y_RD = sum_segments(y_SD, handle.assignments)
        wire = WireFormat(_resolve_wire_format(self.combine_format, y_RD.dtype), y_RD.shape[1])
        counts = handle.receive_counts, handle.send_counts
        returned_HD = _Combine.apply(y_RD, wire, self.axis, *counts)
        return sum_segments(returned_HD, handle.returned_rows)

    # ---- counts ------------------------------------------------------------------------------------

    def _exchange_counts(self, layout: DispatchLayout) -> ExchangedCounts:
        """Rows and assignments to and from each rank, on the host; raises on all ranks.

        The only time that the host waits for the device.
        """
        size, top_k = self.axis.size, layout.rank_Tk.shape[1]
        rank_S = layout.rank_Tk.flatten()
        pairs_W = rank_S.new_zeros(size + 1).scatter_add(0, rank_S, torch.ones_like(rank_S))
        of_token_TW = layout.rank_Tk.new_zeros(layout.rank_Tk.shape[0], size + 1)
        of_token_TW = of_token_TW.scatter_add(1, layout.rank_Tk, torch.ones_like(layout.rank_Tk))
        most_W = of_token_TW[:, :size].amax(0) if len(of_token_TW) else pairs_W[:size]
        own = torch.cat((layout.is_token_in_rank_TW.sum(0), pairs_W[:size], most_W, pairs_W[size:]))
        counts = all_gather(own[None], self.axis, "all-gather of dispatch counts").cpu()
        rows_WW, pairs_WW, most_WW, invalid_W = counts.split((size, size, size, 1), dim=1)
        if invalid_W.any():
            raise _invalid_slot_error(invalid_W.flatten().tolist())
        received_W = rows_WW.sum(0)
        if self.capacity is not None and int(received_W.max()) > self.capacity:
            raise _capacity_error(received_W, self.capacity)
        own_index = self.axis.index
        return ExchangedCounts(
            rows=(tuple(rows_WW[own_index].tolist()), tuple(rows_WW[:, own_index].tolist())),
            pairs=(tuple(pairs_WW[own_index].tolist()), tuple(pairs_WW[:, own_index].tolist())),
            max_assignments=min(top_k, int(most_WW[:, own_index].max())),
        )


class ExchangedCounts(NamedTuple):
    """Rows and assignments to each rank and from each; the most assignments of a received row."""

    rows: SendReceiveCounts
    pairs: SendReceiveCounts
    max_assignments: int


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
        return sum_segments(returned_HD, ctx.returned_rows), None, None, None, None, None, None


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


def _returned_rows(order: SendOrder, top_k: int) -> Tensor:
    """The returned rows of each token, by rank; those it has fewer of are the row of zeros."""
    num_columns = min(top_k, order.row_TW.shape[1])
    # Rows are ordered by rank, and the row of zeros is the last: sorting moves it to the end.
    return order.row_TW.sort(dim=1).values[:, :num_columns].int()


def _compact(experts_Rk: Tensor, count: int) -> Tensor:
    """The indices of the `count` assignments to experts of this rank, in order."""
    is_local = (experts_Rk >= 0).flatten()
    position = (is_local.cumsum(0) - 1).masked_fill(~is_local, count)
    index = torch.arange(position.shape[0], device=position.device)
    return position.new_zeros(count + 1).scatter(0, position, index)[:count]


def _payload_segments(
    received: ReceivedRows, pending: PendingPayload, pair_S: Tensor, row_S: Tensor
) -> RowSegments:
    """The assignments of each received row."""
    if pending.num_assignments is not None:
        return _assignment_segments(row_S[:-1], len(received.x_RD), pending.max_assignments)
    rows = pair_S.view(received.experts_Rk.shape)
    rows = rows.masked_fill(received.experts_Rk < 0, pair_S.shape[0])
    return RowSegments(rows.int(), row_S)


def _assignment_segments(row_S: Tensor, num_rows: int, max_count: int) -> RowSegments:
    """The assignments of each received row, at most `max_count`, which are consecutive."""
    counts_R = torch.zeros(num_rows, dtype=torch.long, device=row_S.device)
    counts_R = counts_R.scatter_add(0, row_S.long(), torch.ones_like(row_S, dtype=torch.long))
    offset = torch.arange(max_count, device=row_S.device)
    rows = (counts_R.cumsum(0) - counts_R)[:, None] + offset
    rows = rows.masked_fill(offset >= counts_R[:, None], row_S.shape[0])
    return RowSegments(rows.int(), append_zero_row(row_S))


def _sender_offsets(rows: tuple[int, ...], pairs: tuple[int, ...]) -> Tensor:
    """For each received assignment, the first row of its sender."""
    rows_W = torch.tensor(rows)
    return (rows_W.cumsum(0) - rows_W).repeat_interleave(torch.tensor(pairs)).int()


def _resolve_wire_format(name: str, dtype: torch.dtype) -> str:
    return WIRE_FORMAT_OF_DTYPE[dtype] if name == SAME_DTYPE else name


def _invalid_slot_error(invalid_W: list[int]) -> ArgumentError:
    count = max(invalid_W)
    return ArgumentError(
        f"rank {invalid_W.index(count)} of the expert axis sent {count} tokens to experts that "
        "don't exist",
        next="check the router and the replica table; NaN logits select any expert",
    )


def _capacity_error(received_W: Tensor, capacity: int) -> CapacityError:
    rank = int(received_W.argmax())
    rows, mean = int(received_W[rank]), float(received_W.float().mean())
    return CapacityError(
        f"rank {rank} of the expert axis would receive {rows} rows, but its capacity is {capacity}",
        where=f"rows by rank: {', '.join(map(str, received_W.tolist()))}; mean {mean:.0f}",
        next=f"use capacity={rows} or more, fewer tokens a step, or replicas of the busiest experts "
        "(fulgurite plan --expert-load); nothing was sent",
    )
