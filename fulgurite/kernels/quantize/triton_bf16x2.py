# mypy: allow-untyped-defs, allow-incomplete-defs
"""FP8 casts of bfloat16 that read two numbers in a word: maxima of tensors, and 128x128 tiles.

In: x [E, R, K] with K dense, in bfloat16. Out: the bits of each matrix's largest magnitude; codes and
scales of tiles. `quantize.py` has the same for all dtypes, one number at a time.

    R  rows    K  columns    E  matrices of a stack
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_bf16x2 import (
    ABS_MASK,
    max_bf16x2,
    max_of_halves,
    quantize_fp8_bf16x2,
    reduce_max_bf16x2,
    saturate_infinities,
    zero_nonfinite,
)
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_numerics import INFINITY_BITS, NATIVE, compute_scale
from fulgurite.kernels.tuning.heuristics import num_sms

# words and warps of a step of `amax_bf16x2_kernel`, programs for each processor; warps of a tile, and
# words that a lane of it stores at once: H200, `fulgurite bench quant`
AMAX_WORDS, AMAX_WARPS, AMAX_PROGRAMS = 2048, 8, 8
TILE_WARPS, LANE_WORDS = 8, tl.constexpr(8)


@triton.jit
def amax_bf16x2_kernel(x_ptr, amax_ptr, words, programs, WORDS: tl.constexpr, C: tl.constexpr):
    """amax_E: the bits of the largest finite |x| of each matrix of `words` words, by atomic maximum."""
    x_ptr += tl.program_id(1).to(tl.int64) * words
    place = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    most = tl.zeros([WORDS], tl.int32)
    for step in range(0, words, programs * WORDS):
        word = tl.load(x_ptr + step + place, step + place < words, 0)
        most = max_bf16x2(most, word & ABS_MASK, C)
    amax = max_of_halves(reduce_max_bf16x2(most, 0, C))
    if amax >= INFINITY_BITS:  # rare enough to read everything again
        most = tl.zeros([WORDS], tl.int32)
        for step in range(0, words, programs * WORDS):
            word = tl.load(x_ptr + step + place, step + place < words, 0)
            most = max_bf16x2(most, zero_nonfinite(word & ABS_MASK, False), C)
        amax = max_of_halves(reduce_max_bf16x2(most, 0, C))
    tl.atomic_max(amax_ptr + tl.program_id(1), amax)


@triton.jit
def quantize_128x128_bf16x2_kernel(
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
    size = word & ABS_MASK
    amax = max_of_halves(reduce_max_bf16x2(reduce_max_bf16x2(size, 1, C), 0, C))
    strange = amax >= INFINITY_BITS
    if strange:
        size = zero_nonfinite(size, False)
        amax = max_of_halves(reduce_max_bf16x2(reduce_max_bf16x2(size, 1, C), 0, C))
    scale = compute_scale(amax.to(tl.float32, bitcast=True), HIGHEST)
    tl.store(scale_ptr + tile.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), scale)
    if strange:
        word = saturate_infinities(word, scale, scale, 2.0 * HIGHEST)
    code = quantize_fp8_bf16x2(word, scale, tl.div_rn(1.0, scale), HIGHEST, C)
    into = data_ptr + full * words + tl.max_contiguous(column[None, :], [1, LANE_WORDS])
    tl.store(into, code, here)


def can_read_bf16x2(x: Tensor) -> bool:
    """Whether the rows of x [E, R, K] can be read as words of two bfloat16."""
    aligned = x.stride(-2) % 2 == 0 and x.data_ptr() % 4 == 0
    return x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0 and aligned


def has_dense_rows(x: Tensor) -> bool:
    """Whether the rows of x [E, R, K] lie one after another."""
    return x.stride(1) == x.shape[2] or x.shape[0] * x.shape[1] == 1


def view_as_words(x: Tensor) -> Tensor:
    """The rows of x [E, R, K] as words: [E * R, K / 2], whatever lies between them."""
    matrices, rows, columns = x.shape
    return x.as_strided((matrices * rows, columns), (x.stride(1), 1)).view(torch.int32)


def compute_amax_bf16x2(x: Tensor) -> Tensor:
    """The bits of each matrix's largest finite magnitude; x is dense."""
    matrices, rows, columns = x.shape
    amax = torch.zeros(matrices, dtype=torch.int32, device=x.device)
    words = rows * columns // 2
    programs = max(1, AMAX_PROGRAMS * num_sms(x.device) // matrices)
    programs = min(programs, triton.cdiv(words, AMAX_WORDS))
    amax_bf16x2_kernel[(programs, matrices)](
        view_as_words(x), amax, words, programs, WORDS=AMAX_WORDS, C=NATIVE,
        num_warps=AMAX_WARPS,
    )  # fmt: skip
    return amax


def quantize_128x128_bf16x2(x: Tensor, data: Tensor, scale: Tensor, highest: float) -> None:
    """Fills codes and scales of 128x128 tiles."""
    matrices, rows, columns = x.shape
    down = triton.cdiv(rows, 128)
    quantize_128x128_bf16x2_kernel[(triton.cdiv(columns, 128), matrices * down)](
        view_as_words(x), data.view(torch.int16), scale, rows, columns // 2, x.stride(1) // 2, down,
        HIGHEST=highest, C=NATIVE, num_warps=TILE_WARPS,
    )  # fmt: skip
