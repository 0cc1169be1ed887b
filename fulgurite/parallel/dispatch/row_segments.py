"""Sums of rows in a fixed order: which rows belong together in, their sums out, with gradients.

A dispatcher repeats a row for each of its experts, and sums the results of a row, of a node or of a token.
Rows of one sum are listed in the order in which they are added, so sums don't depend on when rows arrive.
The last row is always zeros: sums with fewer rows are padded with it.

Shapes: R rows; S rows of a sum, and one of zeros; D hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fulgurite.kernels.moe.ops import combine_op


class RowSegments(NamedTuple):
    """Which rows are summed together.

    `rows[i]` are the rows of sum i, padded with the last row, which is zeros. `segment_of_row` is
    the sum that each row belongs to, the last row included.
    """

    rows: Tensor
    segment_of_row: Tensor


def sum_segments(rows_SD: Tensor, segments: RowSegments) -> Tensor:
    """The sum of each segment's rows, in order; the last row is zeros."""
    if segments.rows.shape[0] == 0:
        return rows_SD[:0]
    segment_of_row = segments.segment_of_row
    out: Tensor = combine_op(rows_SD, segments.rows, segment_of_row, segment_of_row, None)
    return out


def repeat_rows(x_RD: Tensor, segments: RowSegments) -> Tensor:
    """The reverse: the row of its segment for each row, and a padding row. Gradients are summed."""
    repeated: Tensor = _RepeatRows.apply(x_RD, segments)
    return repeated


def append_zero_row(segment_of_row: Tensor) -> Tensor:
    """With the row of zeros at the end, which may belong to any sum."""
    return torch.cat((segment_of_row.int(), segment_of_row.new_zeros(1, dtype=torch.int32)))


class _RepeatRows(Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, segments: RowSegments) -> Tensor:
        ctx.segments = segments
        if not x_RD.shape[0]:
            return x_RD.new_zeros(1, x_RD.shape[1])
        return x_RD[segments.segment_of_row]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows = gradients[0].clone()
        rows[-1] = 0
        return sum_segments(rows, ctx.segments), None
