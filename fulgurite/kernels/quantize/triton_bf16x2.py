# mypy: allow-untyped-defs, allow-incomplete-defs
"""FP8 casts of bfloat16 that read two numbers in a word: maxima of tensors, and 128x128 tiles.

In: x [E, R, K] with K dense, in bfloat16. Out: the bits of each matrix's largest magnitude; codes and
scales of tiles. `quantize.py` has the same for all dtypes, one number at a time.

    R  rows    K  columns    E  matrices of a stack
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.common.triton_bf16x2 import (
    MAGNITUDES,
    either_larger,
    finite_pairs,
    fp8_pairs,
    larger_half,
    largest_pair,
    without_infinities,
)
from fulgurite.kernels.common.triton_numerics import CORRECTED, INFINITY_BITS, scale_of
from fulgurite.kernels.tuning.gemm import processors

# words and warps of a step of `amax_pairs_kernel`, programs for each processor; warps of a tile, and
# words that a lane of it stores at once: H200, `fulgurite bench quant`
AMAX_WORDS, AMAX_WARPS, AMAX_PROGRAMS = 2048, 8, 8
TILE_WARPS, LANE_WORDS = 8, tl.constexpr(8)


@triton.jit
def amax_pairs_kernel(x_ptr, amax_ptr, words, programs, WORDS: tl.constexpr, C: tl.constexpr):
    """amax_E: the bits of the largest finite |x| of each matrix of `words` words, by atomic maximum."""
    x_ptr += tl.program_id(1).to(tl.int64) * words
    place = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    most = tl.zeros([WORDS], tl.int32)
    for step in range(0, words, programs * WORDS):
        word = tl.load(x_ptr + step + place, step + place < words, 0)
        most = either_larger(most, word & MAGNITUDES, C)
    amax = larger_half(largest_pair(most, 0, C))
    if amax >= INFINITY_BITS:  # rare enough to read everything again
        most = tl.zeros([WORDS], tl.int32)
        for step in range(0, words, programs * WORDS):
            word = tl.load(x_ptr + step + place, step + place < words, 0)
            most = either_larger(most, finite_pairs(word & MAGNITUDES, False), C)
        amax = larger_half(largest_pair(most, 0, C))
    tl.atomic_max(amax_ptr + tl.program_id(1), amax)


@triton.jit
def tile_pairs_kernel(
    x_ptr, data_ptr, scale_ptr, rows, words, stride, down, HIGHEST: tl.constexpr, C: tl.constexpr
):
    """One scale for each 128 x 128 tile of each matrix; tiles at the edges may be partial.

    Tiles that lie side by side are taken one after another: together they read whole rows.
    """
    tile = tl.program_id(1)
    matrix, row_tile = (tile // down).to(tl.int64), tile % down
    row = row_tile * 128 + tl.arange(0, 128)
    column = tl.program_id(0) * 64 + tl.arange(0, 64)
    here = (row < rows)[:, None] & (column < words)[None, :]
    full = (matrix * rows + row)[:, None]
    word = tl.load(x_ptr + full * stride + column[None, :], here, 0)
    size = word & MAGNITUDES
    amax = larger_half(largest_pair(largest_pair(size, 1, C), 0, C))
    strange = amax >= INFINITY_BITS
    if strange:
        size = finite_pairs(size, False)
        amax = larger_half(largest_pair(largest_pair(size, 1, C), 0, C))
    scale = scale_of(amax.to(tl.float32, bitcast=True), HIGHEST)
    tl.store(scale_ptr + tile.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), scale)
    if strange:
        word = without_infinities(word, scale, scale, 2.0 * HIGHEST)
    code = fp8_pairs(word, scale, tl.div_rn(1.0, scale), HIGHEST, C)
    into = data_ptr + full * words + tl.max_contiguous(column[None, :], [1, LANE_WORDS])
    tl.store(into, code, here)


def in_words(x: Tensor) -> bool:
    """Whether the rows of x [E, R, K] can be read as words of two bfloat16."""
    aligned = x.stride(-2) % 2 == 0 and x.data_ptr() % 4 == 0
    return x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0 and aligned


def dense(x: Tensor) -> bool:
    """Whether the rows of x [E, R, K] lie one after another."""
    return x.stride(1) == x.shape[2] or x.shape[0] * x.shape[1] == 1


def words_of(x: Tensor) -> Tensor:
    """The rows of x [E, R, K] as words: [E * R, K / 2], whatever lies between them."""
    matrices, rows, columns = x.shape
    return x.as_strided((matrices * rows, columns), (x.stride(1), 1)).view(torch.int32)


def amax_of_pairs(x: Tensor) -> Tensor:
    """The bits of each matrix's largest finite magnitude; x is dense."""
    matrices, rows, columns = x.shape
    amax = torch.zeros(matrices, dtype=torch.int32, device=x.device)
    words = rows * columns // 2
    programs = max(1, AMAX_PROGRAMS * processors(x.device) // matrices)
    programs = min(programs, triton.cdiv(words, AMAX_WORDS))
    amax_pairs_kernel[(programs, matrices)](
        words_of(x), amax, words, programs, WORDS=AMAX_WORDS, C=CORRECTED,
        num_warps=AMAX_WARPS,
    )  # fmt: skip
    return amax


def tiles_of_pairs(x: Tensor, data: Tensor, scale: Tensor, highest: float) -> None:
    """Fills codes and scales of 128x128 tiles."""
    matrices, rows, columns = x.shape
    down = triton.cdiv(rows, 128)
    tile_pairs_kernel[(triton.cdiv(columns, 128), matrices * down)](
        words_of(x), data.view(torch.int16), scale, rows, columns // 2, x.stride(1) // 2, down,
        HIGHEST=highest, C=CORRECTED, num_warps=TILE_WARPS,
    )  # fmt: skip
