# mypy: allow-untyped-defs, allow-incomplete-defs
"""8-bit casts of a transposed matrix: read as it is stored, written transposed.

    code[n, m] = round(x[m, n] / scale)

In: a view x.t() [N, M] of a dense matrix x [M, N]. Out: codes [N, M] with M contiguous, and scales
of blocks along M, the dimension that both GEMMs of backward contract over. Tiles are read along N
and written along M, so the transpose needs no pass of its own.

`quantize_transposed` is the one entry. It launches one of two kernels: FP8 casts of bfloat16 read
two columns in a 32-bit word (bf16x2), everything else reads one value at a time. In the bf16x2
kernel a thread takes the same words of four rows and makes four bytes of each of their two columns.
So threads exchange words, not bytes, on the way to the transposed layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_bf16x2 import (
    ABS_MASK,
    max_bf16x2,
    max_of_halves,
    quantize_fp8_transposed,
    reduce_max_bf16x2,
    saturate_infinities,
    zero_nonfinite,
)
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import (
    INFINITY_BITS,
    NATIVE,
    compute_scale,
    finite_amax,
    magnitude_bits,
    quantize_8bit,
    reciprocal,
)
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import Format
from fulgurite.quant.format import WHOLE_DIM

MODES = {
    (WHOLE_DIM, WHOLE_DIM): "tensor",
    (1, WHOLE_DIM): "row",
    (1, 128): "block",
    (128, 128): "tile",
}


# ---- bfloat16 in pairs -----------------------------------------------------------------------------


@triton.jit
def max_of_four_rows(one, two, three, four, NATIVE: tl.constexpr):
    """The largest magnitudes of each pair of columns in four rows of words."""
    amax = max_bf16x2(max_bf16x2(one, two, NATIVE), max_bf16x2(three, four, NATIVE), NATIVE)
    return reduce_max_bf16x2(amax, 0, NATIVE)


@cached_launch
def quantize_transposed_bf16x2_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, quads, words, stride, scale_row, scale_column,
    MODE: tl.constexpr, QMAX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """code[n, m] = round(x[m, n] / scale), bfloat16 read as 32-bit words of two columns.

    quads   groups of four rows of x: 32-bit words of a row of codes
    words   pairs of columns of x
    MODE    "block" (1x128), "tile" (128x128), "row" (amax_ptr holds the maxima) or "tensor" (static)
    """
    tile_m, tile_n = tl.program_id(1), tl.program_id(0)
    quad = tile_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    word = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (quad < quads)[:, None] & (word < words)[None, :]
    source = x_ptr + (quad.to(tl.int64) * 4)[:, None] * stride + word[None, :]
    one = tl.load(source, mask, 0)
    two = tl.load(source + stride, mask, 0)
    three = tl.load(source + 2 * stride, mask, 0)
    four = tl.load(source + 3 * stride, mask, 0)
    ABS: tl.constexpr = ABS_MASK
    amax = max_of_four_rows(one & ABS, two & ABS, three & ABS, four & ABS, NATIVE)
    has_nonfinite_value = tl.max(max_of_halves(amax), 0) >= INFINITY_BITS
    if MODE == "block" or MODE == "tile":
        if has_nonfinite_value:
            amax = max_of_four_rows(
                zero_nonfinite(one & ABS, False), zero_nonfinite(two & ABS, False),
                zero_nonfinite(three & ABS, False), zero_nonfinite(four & ABS, False), NATIVE,
            )  # fmt: skip
    if MODE == "block" or MODE == "row":
        low, high = amax << 16, amax & 0x7FFF0000
        if MODE == "row":
            low = tl.load(amax_ptr + 2 * word, word < words, 0)
            high = tl.load(amax_ptr + 2 * word + 1, word < words, 0)
        low = compute_scale(low.to(tl.float32, bitcast=True), QMAX)
        high = compute_scale(high.to(tl.float32, bitcast=True), QMAX)
        if MODE == "block" or tile_m == 0:
            into = scale_ptr + 2 * word.to(tl.int64) * scale_row + tile_m * scale_column
            tl.store(into, low, word < words)
            tl.store(into + scale_row, high, word < words)
        low, high = low[None, :], high[None, :]
        low_inverse, high_inverse = reciprocal(low, NATIVE), reciprocal(high, NATIVE)
    else:
        if MODE == "tile":
            low = compute_scale(tl.max(max_of_halves(amax), 0).to(tl.float32, bitcast=True), QMAX)
            tl.store(scale_ptr + tile_n * scale_row + tile_m * scale_column, low)
        else:
            low = tl.load(scale_ptr)
        high = low
        low_inverse = tl.div_rn(1.0, low)
        high_inverse = low_inverse
    if has_nonfinite_value:
        one = saturate_infinities(one, low, high, 2.0 * QMAX)
        two = saturate_infinities(two, low, high, 2.0 * QMAX)
        three = saturate_infinities(three, low, high, 2.0 * QMAX)
        four = saturate_infinities(four, low, high, 2.0 * QMAX)
    left, right = quantize_fp8_transposed(
        one, two, three, four, low, low_inverse, high, high_inverse, QMAX, NATIVE
    )
    inside = (word < words)[:, None] & (quad < quads)[None, :]
    into = data_ptr + (2 * word.to(tl.int64))[:, None] * quads + quad[None, :]
    tl.store(into, tl.trans(left), inside)
    tl.store(into + quads, tl.trans(right), inside)


@cached_launch
def column_amax_bf16x2_kernel(
    x_ptr, amax_ptr, rows, words, stride, program_rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """amax[n]: the bits of the largest finite |x[m, n]|, by atomic maximum."""
    word = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1).to(tl.int64) * program_rows
    amax = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in range(0, program_rows, BLOCK_M):
        m = start + first + tl.arange(0, BLOCK_M)
        mask = (m < rows)[:, None] & (word < words)[None, :]
        magnitudes = tl.load(x_ptr + m[:, None] * stride + word[None, :], mask, 0) & ABS_MASK
        amax = max_bf16x2(amax, magnitudes, NATIVE)
    pair = reduce_max_bf16x2(amax, 0, NATIVE)
    if tl.max(max_of_halves(pair), 0) >= INFINITY_BITS:  # rare: read everything again
        amax = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for first in range(0, program_rows, BLOCK_M):
            m = start + first + tl.arange(0, BLOCK_M)
            mask = (m < rows)[:, None] & (word < words)[None, :]
            magnitudes = tl.load(x_ptr + m[:, None] * stride + word[None, :], mask, 0) & ABS_MASK
            amax = max_bf16x2(amax, zero_nonfinite(magnitudes, False), NATIVE)
        pair = reduce_max_bf16x2(amax, 0, NATIVE)
    tl.atomic_max(amax_ptr + 2 * word, pair << 16, word < words)
    tl.atomic_max(amax_ptr + 2 * word + 1, pair & 0x7FFF0000, word < words)


# ---- any dtype -------------------------------------------------------------------------------------


@cached_launch
def quantize_transposed_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, rows, columns, stride, scale_row, scale_column,
    MODE: tl.constexpr, QMAX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """code[n, m] = round(x[m, n] / scale), for every dtype. MODE: see the bf16x2 kernel."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    x = tl.load(x_ptr + m[:, None] * stride + n[None, :], mask, 0.0).to(tl.float32)
    KEEP_NAN: tl.constexpr = data_ptr.dtype.element_ty == tl.int8
    if MODE == "block":
        scale = compute_scale(finite_amax(x, 0, KEEP_NAN, NATIVE), QMAX)
        tl.store(scale_ptr + n * scale_row + tl.program_id(0) * scale_column, scale, n < columns)
        scale = scale[None, :]
    elif MODE == "tile":
        bits = tl.max(tl.max(magnitude_bits(x, KEEP_NAN), 0), 0)
        scale = compute_scale(bits.to(tl.float32, bitcast=True), QMAX)
        tl.store(scale_ptr + tl.program_id(1) * scale_row + tl.program_id(0), scale)
    elif MODE == "row":
        scale = compute_scale(
            tl.load(amax_ptr + n, n < columns, 0).to(tl.float32, bitcast=True), QMAX
        )
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + n, scale, n < columns)
        scale = scale[None, :]
    else:
        scale = tl.load(scale_ptr)
    code = quantize_8bit(x, scale, tl.div_rn(1.0, scale), QMAX, data_ptr.dtype.element_ty, NATIVE)
    tl.store(data_ptr + n[:, None] * rows + m[None, :], tl.trans(code), tl.trans(mask))


@cached_launch
def column_amax_kernel(
    x_ptr, amax_ptr, rows, columns, stride, program_rows, KEEP_NAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """amax[n]: the bits of the largest finite |x[m, n]|, by atomic maximum."""
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    start = tl.program_id(0).to(tl.int64) * program_rows
    for first in range(0, program_rows, BLOCK_M):
        m = start + first + tl.arange(0, BLOCK_M)
        mask = (m < rows)[:, None] & (n < columns)[None, :]
        x = tl.load(x_ptr + m[:, None] * stride + n[None, :], mask, 0.0).to(tl.float32)
        bits = tl.maximum(bits, magnitude_bits(x, KEEP_NAN))
    tl.atomic_max(amax_ptr + n, tl.max(bits, 0), n < columns)


# ---- launching -----------------------------------------------------------------------------------


def is_transposed(x: Tensor, format: Format) -> bool:
    """Whether x is the transpose of a dense matrix and the format has one byte a code."""
    is_view = x.dim() == 2 and x.stride(0) == 1 and x.stride(1) >= max(x.shape[0], 2)
    return is_view and format.element.bits == 8 and format.family in ("fp8", "int")


def quantize_transposed(x: Tensor, data: Tensor, scale: Tensor, format: Format) -> None:
    """Fill codes and scales of the view x [N, M]. A per-tensor scale must be in `scale` already."""
    mode, qmax = MODES[format.block], format.element.max_value
    if format.family == "fp8" and _can_read_bf16x2(x.t()):
        _quantize_bf16x2(x.t(), data, scale, mode, qmax)
    else:
        _quantize_any_dtype(x, data, scale, mode, format)


def _can_read_bf16x2(x: Tensor) -> bool:
    """Whether a dense x [M, N] can be read and written in 32-bit words."""
    rows, columns = x.shape
    is_aligned = columns % 2 == 0 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    return x.dtype == torch.bfloat16 and is_aligned and rows % 4 == 0


def _quantize_bf16x2(x: Tensor, data: Tensor, scale: Tensor, mode: str, qmax: float) -> None:
    rows, columns = x.shape
    pairs, words, stride = x.view(torch.int32), columns // 2, x.stride(0) // 2
    heuristics, amax = heuristics_for(x.device), scale
    if mode == "row":
        config, program_rows = heuristics.column_amax_bf16x2, heuristics.column_amax_bf16x2_rows
        amax = torch.zeros(columns, dtype=torch.int32, device=x.device)
        grid = (cdiv(words, config.block_n), cdiv(rows, program_rows))
        column_amax_bf16x2_kernel[grid](
            pairs, amax, rows, words, stride, min(program_rows, next_power_of_2(rows)),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, NATIVE=NATIVE,
            num_warps=config.num_warps,
        )  # fmt: skip
    config = heuristics.quantize_transposed_bf16x2
    grid = (cdiv(words, config.block_n), cdiv(rows, config.block_m))
    quantize_transposed_bf16x2_kernel[grid](
        pairs, data.view(torch.int32), scale, amax, rows // 4, words, stride,
        scale.stride(0), scale.stride(1), MODE=mode, QMAX=qmax, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, NATIVE=NATIVE, num_warps=config.num_warps,
    )  # fmt: skip


def _quantize_any_dtype(x: Tensor, data: Tensor, scale: Tensor, mode: str, format: Format) -> None:
    columns, rows = x.shape
    amax = _compute_column_amax(x, keep_nan=format.name == "int8") if mode == "row" else scale
    config = heuristics_for(x.device).quantize_transposed
    block_n = 128 if mode == "tile" else config.block_n
    quantize_transposed_kernel[(cdiv(rows, config.block_m), cdiv(columns, block_n))](
        x, data, scale, amax, rows, columns, x.stride(1), scale.stride(0), scale.stride(1),
        MODE=mode, QMAX=format.element.max_value, BLOCK_M=config.block_m, BLOCK_N=block_n,
        NATIVE=NATIVE, num_warps=config.num_warps * block_n // config.block_n,
    )  # fmt: skip


def _compute_column_amax(x: Tensor, keep_nan: bool) -> Tensor:
    columns, rows = x.shape
    amax = torch.zeros(columns, dtype=torch.int32, device=x.device)
    heuristics = heuristics_for(x.device)
    config = heuristics.column_amax
    tiles_n = cdiv(columns, config.block_n)
    program_rows = max(64, next_power_of_2(cdiv(rows * tiles_n, heuristics.amax_programs)))
    column_amax_kernel[(cdiv(rows, program_rows), tiles_n)](
        x, amax, rows, columns, x.stride(1), program_rows, KEEP_NAN=keep_nan,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return amax
