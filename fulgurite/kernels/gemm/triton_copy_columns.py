# mypy: allow-untyped-defs, allow-incomplete-defs
"""Copy the first columns of a matrix into contiguous rows: target[r, c] = source[r, c] for c < N.

In: source [R, N'], N' >= N, rows at any distance; target [R, N] contiguous. A program copies BLOCK columns
of one row. Rows of the target may start at any multiple of the element size (odd vocabularies).
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch

BLOCK, NUM_WARPS = 2048, 4


@cached_launch()
def copy_columns_kernel(source_ptr, target_ptr, columns, source_stride, BLOCK: tl.constexpr):
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < columns
    value = tl.load(source_ptr + row * source_stride + column, is_inside)
    tl.store(target_ptr + row * columns + column, value, is_inside)


def copy_columns(source_RP: Tensor, target_RN: Tensor) -> None:
    """Copy as many columns as the target has."""
    rows, columns = target_RN.shape
    assert source_RP.stride(1) == 1 and target_RN.is_contiguous(), "rows are contiguous"
    if rows and columns:
        grid = (rows, -(-columns // BLOCK))
        copy_columns_kernel[grid](
            source_RP, target_RN, columns, source_RP.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS
        )
