# mypy: allow-untyped-defs, allow-incomplete-defs
"""The FP8 cast of a transposed bfloat16 matrix: read in words along its rows, written in words down them.

In: a dense x [M, N] whose transpose is wanted. Out: codes [N, M] with M dense, and scales of blocks
along M. A lane takes the same words of four rows and makes four bytes of each of their two columns, so
that what crosses threads on the way to the other side are words, not bytes. `quantize_turned.py` says
for whom, and has the same for all dtypes.
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
from fulgurite.kernels.common.triton_numerics import (
    INFINITY_BITS,
    NATIVE,
    compute_scale,
    reciprocal,
)

# rows, words and warps of a tile; rows and words of a step of the maxima, and all rows of a program:
# H200, `fulgurite bench quant`
ROWS, WORDS, WARPS = 128, 64, 4
AMAX_ROWS, AMAX_WORDS, AMAX_WARPS, AMAX_EACH = 32, 64, 4, 512


@triton.jit
def max_of_four_rows(one, two, three, four, C: tl.constexpr):
    """The largest magnitudes of the pairs of columns that four rows of words have."""
    most = max_bf16x2(max_bf16x2(one, two, C), max_bf16x2(three, four, C), C)
    return reduce_max_bf16x2(most, 0, C)


@triton.jit
def quantize_transposed_bf16x2_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, quads, words, stride, scale_row, scale_column,
    MODE: tl.constexpr, HIGHEST: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """code[n, m] = round(x[m, n] / scale); the scale of TM rows, of a tile, of a column, or given.

    `quads`: rows of x by fours, words of a row of codes. `words`: columns of x by twos.
    """
    tile_m, tile_n = tl.program_id(1), tl.program_id(0)
    quad = tile_m * (TM // 4) + tl.arange(0, TM // 4)
    word = tile_n * TN + tl.arange(0, TN)
    here = (quad < quads)[:, None] & (word < words)[None, :]
    source = x_ptr + (quad.to(tl.int64) * 4)[:, None] * stride + word[None, :]
    one = tl.load(source, here, 0)
    two = tl.load(source + stride, here, 0)
    three = tl.load(source + 2 * stride, here, 0)
    four = tl.load(source + 3 * stride, here, 0)
    M: tl.constexpr = ABS_MASK
    most = max_of_four_rows(one & M, two & M, three & M, four & M, C)
    strange = tl.max(max_of_halves(most), 0) >= INFINITY_BITS
    if MODE == "block" or MODE == "tile":
        if strange:
            most = max_of_four_rows(
                zero_nonfinite(one & M, False), zero_nonfinite(two & M, False),
                zero_nonfinite(three & M, False), zero_nonfinite(four & M, False), C,
            )  # fmt: skip
    if MODE == "block" or MODE == "row":
        low, high = most << 16, most & 0x7FFF0000
        if MODE == "row":
            low = tl.load(amax_ptr + 2 * word, word < words, 0)
            high = tl.load(amax_ptr + 2 * word + 1, word < words, 0)
        low = compute_scale(low.to(tl.float32, bitcast=True), HIGHEST)
        high = compute_scale(high.to(tl.float32, bitcast=True), HIGHEST)
        if MODE == "block" or tile_m == 0:
            into = scale_ptr + 2 * word.to(tl.int64) * scale_row + tile_m * scale_column
            tl.store(into, low, word < words)
            tl.store(into + scale_row, high, word < words)
        low, high = low[None, :], high[None, :]
        low_inverse, high_inverse = reciprocal(low, C), reciprocal(high, C)
    else:
        if MODE == "tile":
            low = compute_scale(tl.max(max_of_halves(most), 0).to(tl.float32, bitcast=True), HIGHEST)
            tl.store(scale_ptr + tile_n * scale_row + tile_m * scale_column, low)
        else:
            low = tl.load(scale_ptr)
        high = low
        low_inverse = tl.div_rn(1.0, low)
        high_inverse = low_inverse
    if strange:
        one = saturate_infinities(one, low, high, 2.0 * HIGHEST)
        two = saturate_infinities(two, low, high, 2.0 * HIGHEST)
        three = saturate_infinities(three, low, high, 2.0 * HIGHEST)
        four = saturate_infinities(four, low, high, 2.0 * HIGHEST)
    left, right = quantize_fp8_transposed(
        one, two, three, four, low, low_inverse, high, high_inverse, HIGHEST, C
    )
    inside = (word < words)[:, None] & (quad < quads)[None, :]
    into = data_ptr + (2 * word.to(tl.int64))[:, None] * quads + quad[None, :]
    tl.store(into, tl.trans(left), inside)
    tl.store(into + quads, tl.trans(right), inside)


@triton.jit
def column_amax_bf16x2_kernel(
    x_ptr, amax_ptr, rows, words, stride, each, TM: tl.constexpr, TN: tl.constexpr, C: tl.constexpr
):
    """amax[n]: the bits of the largest finite |x[m, n]|, by atomic maximum."""
    word = tl.program_id(0) * TN + tl.arange(0, TN)
    start = tl.program_id(1).to(tl.int64) * each
    most = tl.zeros([TM, TN], tl.int32)
    for first in range(0, each, TM):
        m = start + first + tl.arange(0, TM)
        here = (m < rows)[:, None] & (word < words)[None, :]
        size = tl.load(x_ptr + m[:, None] * stride + word[None, :], here, 0) & ABS_MASK
        most = max_bf16x2(most, size, C)
    pair = reduce_max_bf16x2(most, 0, C)
    if tl.max(max_of_halves(pair), 0) >= INFINITY_BITS:  # rare enough to read everything again
        most = tl.zeros([TM, TN], tl.int32)
        for first in range(0, each, TM):
            m = start + first + tl.arange(0, TM)
            here = (m < rows)[:, None] & (word < words)[None, :]
            size = tl.load(x_ptr + m[:, None] * stride + word[None, :], here, 0) & ABS_MASK
            most = max_bf16x2(most, zero_nonfinite(size, False), C)
        pair = reduce_max_bf16x2(most, 0, C)
    tl.atomic_max(amax_ptr + 2 * word, pair << 16, word < words)
    tl.atomic_max(amax_ptr + 2 * word + 1, pair & 0x7FFF0000, word < words)


def can_read_bf16x2(x: Tensor) -> bool:
    """Whether a dense x [M, N] can be read and written in words."""
    rows, columns = x.shape
    even = columns % 2 == 0 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    return x.dtype == torch.bfloat16 and even and rows % 4 == 0


def _quantize_transposed_bf16x2(x: Tensor, data: Tensor, scale: Tensor, mode: str, highest: float) -> None:
    """Fills codes [N, M] and scales of x [M, N]; a scale of the whole matrix is there already."""
    rows, columns = x.shape
    pairs, words, stride = x.view(torch.int32), columns // 2, x.stride(0) // 2
    amax = scale
    if mode == "row":
        amax = torch.zeros(columns, dtype=torch.int32, device=x.device)
        grid = (triton.cdiv(words, AMAX_WORDS), triton.cdiv(rows, AMAX_EACH))
        column_amax_bf16x2_kernel[grid](
            pairs, amax, rows, words, stride, min(AMAX_EACH, triton.next_power_of_2(rows)),
            TM=AMAX_ROWS, TN=AMAX_WORDS, C=NATIVE, num_warps=AMAX_WARPS,
        )  # fmt: skip
    quantize_transposed_bf16x2_kernel[(triton.cdiv(words, WORDS), triton.cdiv(rows, ROWS))](
        pairs, data.view(torch.int32), scale, amax, rows // 4, words, stride,
        scale.stride(0), scale.stride(1),
        MODE=mode, HIGHEST=highest, TM=ROWS, TN=WORDS, C=NATIVE, num_warps=WARPS,
    )  # fmt: skip
