"""The legs of a hierarchical dispatch: which rows go where in, one all-to-all of rows and its way back out.

A row has the token in the wire format, then its routes (`RouteFields`). A leg has exact splits, which the
host knows, or equal ones: then rows without a token are padding, and their slots are -1.

Shapes: T tokens or rows; k experts of a token; W ranks of a leg; F rows at the forwarder; R rows at the
ranks of their experts; S assignments; H sent rows; B bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fulgurite.kernels.dispatch.wire_format import WireFormat, align
from fulgurite.parallel.collectives import all_to_all_rows
from fulgurite.parallel.dispatch.row_segments import RowSegments, append_zero_row
from fulgurite.parallel.mesh import Axis

Counts = tuple[int, ...]
NO_SLOT_BYTE = 255  # four of them are the slot -1


class RouteFields(NamedTuple):
    """Where a row of bytes has its routes: k slots, a mark and k weights, after the token.

    The mark is the number of the last rank with invalid slots, from 1 on; 0: no rank had any.
    """

    offset: int
    top_k: int

    def read_slots(self, rows_RB: Tensor) -> Tensor:
        return read_field(rows_RB, self.offset, self.top_k, torch.int32)

    def read_mark(self, rows_RB: Tensor) -> Tensor:
        return read_field(rows_RB, self.mark_offset, 1, torch.int32)

    def read_weights(self, rows_RB: Tensor, dtype: torch.dtype) -> Tensor:
        return read_field(rows_RB, self.mark_offset + 4, self.top_k, dtype)

    @property
    def mark_offset(self) -> int:
        return self.offset + 4 * self.top_k

    def stamp(self, rows_HB: Tensor, is_padding_H: Tensor, mark: Tensor | None) -> Tensor:
        """Padding rows get no slots, and all rows the mark."""
        slots_HB = rows_HB[:, self.offset : self.mark_offset]
        slots_HB.masked_fill_(is_padding_H[:, None], NO_SLOT_BYTE)
        if mark is not None:
            rows_HB[:, self.mark_offset : self.mark_offset + 4] = mark.view(1).view(torch.uint8)
        return rows_HB


@dataclass(frozen=True, eq=False)
class Leg:
    """One all-to-all of rows: `source_H` are the rows to send, `returned_rows` the sums on the way back.

    `is_padding_H`: rows without a token; None: there are none.
    """

    axis: Axis
    source_H: Tensor
    returned_rows: RowSegments
    send: Counts
    receive: Counts
    label: str
    is_padding_H: Tensor | None = None

    def forward(self, rows: Tensor, routes: RouteFields) -> Tensor:
        """Send rows; padding rows have no slots, and all have the largest mark of any."""
        label = f"{self.label} dispatch"
        if self.is_padding_H is None:
            sent = rows[self.source_H]
        else:
            mark = routes.read_mark(rows).amax() if rows.shape[0] else None
            rows = rows if rows.shape[0] else rows.new_zeros(1, rows.shape[1])
            sent = routes.stamp(rows[self.source_H], self.is_padding_H, mark)
        return all_to_all_rows(sent, self.axis, self.send, self.receive, label)

    def backward(self, rows: Tensor, what: str = "combine") -> Tensor:
        """The same way back; a row of zeros is appended."""
        label = f"{self.label} {what}"
        return all_to_all_rows(rows, self.axis, self.receive, self.send, label, padding=1)


def plan_leg(
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


def pad_leg(axis: Axis, is_sent_TW: Tensor, width: int, top_k: int, label: str) -> Leg:
    """`_plan_leg` with `width` rows to every rank, of which the first ones have tokens."""
    (tokens, size), device = is_sent_TW.shape, is_sent_TW.device
    total = size * width
    offsets_W = torch.arange(size, device=device) * width
    position_TW = is_sent_TW.long().cumsum(0) - 1 + offsets_W
    position_TW = position_TW.masked_fill(~is_sent_TW, total)
    rows = position_TW.sort(dim=1).values[:, : min(top_k, size)]
    token_TW = torch.arange(tokens, device=device)[:, None].expand(tokens, size)
    source_H = torch.full((total + 1,), -1, device=device)
    source_H = source_H.scatter(0, position_TW.flatten(), token_TW.flatten())[:total]
    is_padding_H = source_H < 0
    source_H = source_H.clamp(min=0)
    segments = RowSegments(rows.int(), append_zero_row(source_H))
    counts = (width,) * size
    return Leg(axis, source_H, segments, counts, counts, label, is_padding_H)


def mask_assignments(
    is_local_Rk: Tensor, expert_Rk: Tensor, weights_Rk: Tensor, num_slots: int
) -> tuple[RowSegments, Tensor, Tensor]:
    """All k assignments of each row, their experts and weights; those elsewhere are padding."""
    (count, top_k), device = is_local_Rk.shape, is_local_Rk.device
    pair_S = torch.arange(count * top_k, device=device)
    rows = pair_S.view(count, top_k).masked_fill(~is_local_Rk, count * top_k)
    segments = RowSegments(rows.int(), append_zero_row(pair_S // top_k))
    expert_S = expert_Rk.masked_fill(~is_local_Rk, num_slots).flatten()
    return segments, expert_S, weights_Rk.masked_fill(~is_local_Rk, 0).flatten()


def plan_assignments(is_local_Rk: Tensor, total: int) -> tuple[RowSegments, Tensor]:
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


def pack_rows(
    x_TD: Tensor, slots_Tk: Tensor, weights_Tk: Tensor, wire: WireFormat, mark: Tensor
) -> Tensor:
    """Each token as bytes: the wire format's row, its `RouteFields`; aligned."""
    mark_T1 = mark.view(1, 1).expand(slots_Tk.shape[0], 1)
    fields = (wire.pack(x_TD.detach()), slots_Tk, mark_T1, weights_Tk.detach())
    rows_TB = torch.cat([field.contiguous().view(torch.uint8) for field in fields], dim=1)
    return pad(rows_TB, (0, align(rows_TB.shape[1]) - rows_TB.shape[1]))


def read_field(rows_RB: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` values of each row from byte `offset` on."""
    field = rows_RB[:, offset : offset + count * dtype.itemsize]
    return field.clone(memory_format=torch.contiguous_format).view(dtype)
