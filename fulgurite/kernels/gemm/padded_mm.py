"""GEMM with padded columns whose result has none: out = (a @ b + bias)[:, :columns], contiguous.

In: a [M, K], b [K, P], bias [P] or None, P >= columns. Out: [M, columns].

Libraries have no fast kernel that writes rows which don't start at multiples of 16 bytes
(`transforms/align_gemm.py`). So blocks of rows are computed with P columns, in one buffer that is used again and
again, and copied. The buffer takes a fraction of the result's memory, and a block is still in L2 when it is
copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.gemm.triton_copy_columns import copy_columns
from fulgurite.op import op

MAX_BLOCKS = 8
MIN_BLOCK_ROWS = 512  # fewer rows than this fill an H200 badly at the end of each GEMM
ROW_MULTIPLE = 128  # rows of a GEMM tile


def block_rows(rows: int) -> int:
    """Rows of a block, for a result of so many rows."""
    fraction = -(-rows // MAX_BLOCKS)
    return min(rows, max(MIN_BLOCK_ROWS, -(-fraction // ROW_MULTIPLE) * ROW_MULTIPLE))


@op("fulgurite::padded_mm")
def padded_mm(a_MK: Tensor, b_KP: Tensor, bias_P: Tensor | None, columns: int) -> Tensor:
    """The operator."""
    rows = a_MK.shape[0]
    out_MN = a_MK.new_empty(rows, columns)
    size = block_rows(rows)
    buffer_RP = a_MK.new_empty(size, b_KP.shape[1])
    for start in range(0, rows, max(size, 1)):
        a_RK, out_RN = a_MK[start : start + size], out_MN[start : start + size]
        block_RP = buffer_RP[: len(a_RK)]
        if bias_P is None:
            torch.mm(a_RK, b_KP, out=block_RP)
        else:
            torch.addmm(bias_P, a_RK, b_KP, out=block_RP)
        if a_MK.device.type == "cuda":
            copy_columns(block_RP, out_RN)
        else:
            out_RN.copy_(block_RP[:, :columns])
    return out_MN


@padded_mm.fake
def _(a_MK: Tensor, b_KP: Tensor, bias_P: Tensor | None, columns: int) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], columns)
