# mypy: allow-untyped-defs, allow-incomplete-defs
"""Batch-invariant sums of rows on GPUs: out[r] = sum over k of x[r, k], in float32.

In: x [R, K]. Out: float32 [R]. A program takes one row: columns k, k + BLOCK, .. are added in order,
then the BLOCK sums by one tree. torch's own reductions choose the shape of that tree by the number of
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch

BLOCK, NUM_WARPS = 1024, 4


@cached_launch(do_not_specialize=["size", "stride"])
def row_sum_kernel(x_ptr, out_ptr, size, stride, BLOCK: tl.constexpr):
    """One row. Its stride is not specialized: the tree must not depend on its divisors."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = x_ptr + row * stride + start + column
        total += tl.load(at, start + column < size, 0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total, 0))


def row_sum(x_RK: Tensor) -> Tensor:
    """The sum of each row."""
    x_RK = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
    out_R = torch.empty(x_RK.shape[0], dtype=torch.float32, device=x_RK.device)
    if len(out_R):
        row_sum_kernel[(len(out_R),)](
            x_RK, out_R, x_RK.shape[1], x_RK.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return out_R
