# mypy: allow-untyped-defs, allow-incomplete-defs
"""The FP8 cast of a transposed matrix, read as it lies and written turned.

In: a view x.t() [N, M] of a dense matrix x [M, N]. Out: codes [N, M] with M dense, and scales of
blocks along M: what the two matmuls of backward contract over. Tiles are read along N and written
along M, so the transpose costs no pass of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_numerics import (
    NATIVE,
    compute_scale,
    finite_amax,
    magnitude_bits,
    quantize_8bit,
)
from fulgurite.kernels.quantize import triton_transpose_bf16
from fulgurite.quant import Format
from fulgurite.quant.format import WHOLE_DIM

WARPS = 4  # for 64 columns
ROWS, COLUMNS = 128, 64  # of x in a program's tile: H200, `fulgurite bench quant`


@triton.jit
def quantize_transposed_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, rows, columns, stride, across, scale_column,
    MODE: tl.constexpr, HIGHEST: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """code[n, m] = round(x[m, n] / scale); the scale of 128 rows, of a tile, of a column, or given."""
    m = tl.program_id(0).to(tl.int64) * TM + tl.arange(0, TM)
    n = tl.program_id(1).to(tl.int64) * TN + tl.arange(0, TN)
    here = (m < rows)[:, None] & (n < columns)[None, :]
    x = tl.load(x_ptr + m[:, None] * stride + n[None, :], here, 0.0).to(tl.float32)
    keep: tl.constexpr = data_ptr.dtype.element_ty == tl.int8
    if MODE == "block":
        scale = compute_scale(finite_amax(x, 0, keep, C), HIGHEST)
        tl.store(scale_ptr + n * across + tl.program_id(0) * scale_column, scale, n < columns)
        scale = scale[None, :]
    elif MODE == "tile":
        bits = tl.max(tl.max(magnitude_bits(x, keep), 0), 0)
        scale = compute_scale(bits.to(tl.float32, bitcast=True), HIGHEST)
        tl.store(scale_ptr + tl.program_id(1) * across + tl.program_id(0), scale)
    elif MODE == "row":
        scale = compute_scale(
            tl.load(amax_ptr + n, n < columns, 0).to(tl.float32, bitcast=True), HIGHEST
        )
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + n, scale, n < columns)
        scale = scale[None, :]
    else:
        scale = tl.load(scale_ptr)
    code = quantize_8bit(x, scale, tl.div_rn(1.0, scale), HIGHEST, data_ptr.dtype.element_ty, C)
    tl.store(data_ptr + n[:, None] * rows + m[None, :], tl.trans(code), tl.trans(here))


@triton.jit
def column_amax_kernel(
    x_ptr, amax_ptr, rows, columns, stride, each, KEEP_NAN: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """amax[n]: the bits of the largest finite |x[m, n]|, by atomic maximum."""
    n = tl.program_id(1).to(tl.int64) * TN + tl.arange(0, TN)
    bits = tl.zeros([TM, TN], tl.int32)
    start = tl.program_id(0).to(tl.int64) * each
    for first in range(0, each, TM):
        m = start + first + tl.arange(0, TM)
        here = (m < rows)[:, None] & (n < columns)[None, :]
        x = tl.load(x_ptr + m[:, None] * stride + n[None, :], here, 0.0).to(tl.float32)
        bits = tl.maximum(bits, magnitude_bits(x, KEEP_NAN))
    tl.atomic_max(amax_ptr + n, tl.max(bits, 0), n < columns)


def is_transposed(x: Tensor, format: Format) -> bool:
    """Whether x is the transpose of a dense matrix and the format has a byte an element."""
    turned = x.dim() == 2 and x.stride(0) == 1 and x.stride(1) >= max(x.shape[0], 2)
    return turned and format.element.bits == 8 and format.family in ("fp8", "int")


def quantize_transposed(x: Tensor, data: Tensor, scale: Tensor, format: Format) -> None:
    """Fills codes and scales of the view x; a scale of the whole matrix is there already."""
    columns, rows = x.shape
    mode = MODES[format.block]
    if format.family == "fp8" and triton_transpose_bf16.can_read_bf16x2(x.t()):
        return triton_transpose_bf16._quantize_transposed_bf16x2(
            x.t(), data, scale, mode, format.element.max_value
        )
    amax = scale
    if mode == "row":
        amax = _column_amax(x, keep_nan=format.name == "int8")
    width = 128 if mode == "tile" else COLUMNS
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, width))
    quantize_transposed_kernel[grid](
        x, data, scale, amax, rows, columns, x.stride(1), scale.stride(0), scale.stride(1),
        MODE=mode, HIGHEST=format.element.max_value, TM=ROWS, TN=width, C=NATIVE,
        num_warps=WARPS * width // 64,
    )  # fmt: skip


MODES = {(WHOLE_DIM, WHOLE_DIM): "tensor", (1, WHOLE_DIM): "row", (1, 128): "block", (128, 128): "tile"}


def _column_amax(x: Tensor, keep_nan: bool) -> Tensor:
    columns, rows = x.shape
    amax = torch.zeros(columns, dtype=torch.int32, device=x.device)
    each = max(64, triton.next_power_of_2(triton.cdiv(rows * triton.cdiv(columns, 128), 1056)))
    column_amax_kernel[(triton.cdiv(rows, each), triton.cdiv(columns, 128))](
        x, amax, rows, columns, x.stride(1), each, KEEP_NAN=keep_nan, TM=32, TN=128, num_warps=4
    )
    return amax
