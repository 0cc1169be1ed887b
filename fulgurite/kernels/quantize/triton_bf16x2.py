# mypy: allow-untyped-defs, allow-incomplete-defs
"""FP8 casts of bfloat16 that read two values in a 32-bit word (bf16x2): amax of tensors, 128x128
blocks.

In: x [E, R, K] with K contiguous, in bfloat16. Out: the bits of each matrix's largest magnitude;
codes and scales of blocks. `triton_quantize.py` has the same for all dtypes, one value at a time.

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
from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import INFINITY_BITS, NATIVE, compute_scale
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning import heuristics_for, num_sms


@cached_launch
def amax_bf16x2_kernel(
    x_ptr, amax_ptr, words, programs, BLOCK_N: tl.constexpr, NATIVE: tl.constexpr
):
    """amax_E: the bits of the largest finite |x| of each matrix of `words` words, by atomic
    maximum."""
    x_ptr += tl.program_id(1).to(tl.int64) * words
    word_index = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    amax_words = tl.zeros([BLOCK_N], tl.int32)
    for step in range(0, words, programs * BLOCK_N):
        word = tl.load(x_ptr + step + word_index, step + word_index < words, 0)
        amax_words = max_bf16x2(amax_words, word & ABS_MASK, NATIVE)
    amax = max_of_halves(reduce_max_bf16x2(amax_words, 0, NATIVE))
    if amax >= INFINITY_BITS:  # rare: read everything again
        amax_words = tl.zeros([BLOCK_N], tl.int32)
        for step in range(0, words, programs * BLOCK_N):
            word = tl.load(x_ptr + step + word_index, step + word_index < words, 0)
            amax_words = max_bf16x2(amax_words, zero_nonfinite(word & ABS_MASK, False), NATIVE)
        amax = max_of_halves(reduce_max_bf16x2(amax_words, 0, NATIVE))
    tl.atomic_max(amax_ptr + tl.program_id(1), amax)


@cached_launch
def quantize_128x128_bf16x2_kernel(
    x_ptr, data_ptr, scale_ptr, rows, words, stride, tiles_m,
    QMAX: tl.constexpr, STORE_WORDS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One scale for each 128x128 block of each matrix; blocks at the edges may be partial.

    Neighbouring programs take neighbouring blocks of a row: together they read whole rows.
    """
    tile = tl.program_id(1)
    matrix, row_tile = (tile // tiles_m).to(tl.int64), tile % tiles_m
    row = row_tile * 128 + tl.arange(0, 128)
    column = tl.program_id(0) * 64 + tl.arange(0, 64)
    mask = (row < rows)[:, None] & (column < words)[None, :]
    full_row = (matrix * rows + row)[:, None]
    word = tl.load(x_ptr + full_row * stride + column[None, :], mask, 0)
    magnitudes = word & ABS_MASK
    amax = max_of_halves(reduce_max_bf16x2(reduce_max_bf16x2(magnitudes, 1, NATIVE), 0, NATIVE))
    has_nonfinite_value = amax >= INFINITY_BITS
    if has_nonfinite_value:
        magnitudes = zero_nonfinite(magnitudes, False)
        amax = max_of_halves(reduce_max_bf16x2(reduce_max_bf16x2(magnitudes, 1, NATIVE), 0, NATIVE))
    scale = compute_scale(amax.to(tl.float32, bitcast=True), QMAX)
    tl.store(scale_ptr + tile.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), scale)
    if has_nonfinite_value:
        word = saturate_infinities(word, scale, scale, 2.0 * QMAX)
    code = quantize_fp8_bf16x2(word, scale, tl.div_rn(1.0, scale), QMAX, NATIVE)
    into = data_ptr + full_row * words + tl.max_contiguous(column[None, :], [1, STORE_WORDS])
    tl.store(into, code, mask)


def can_read_bf16x2(x: Tensor) -> bool:
    """Whether the rows of x [E, R, K] can be read as words of two bfloat16."""
    is_aligned = x.stride(-2) % 2 == 0 and x.data_ptr() % 4 == 0
    return x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0 and is_aligned


def has_dense_rows(x: Tensor) -> bool:
    """Whether the rows of x [E, R, K] are contiguous."""
    return x.stride(1) == x.shape[2] or x.shape[0] * x.shape[1] == 1


def view_as_words(x: Tensor) -> Tensor:
    """The rows of x [E, R, K] as words [E * R, K / 2], whatever is between them."""
    matrices, rows, columns = x.shape
    return x.as_strided((matrices * rows, columns), (x.stride(1), 1)).view(torch.int32)


def compute_amax_bf16x2(x: Tensor) -> Tensor:
    """The bits of each matrix's largest finite magnitude; x has contiguous rows."""
    matrices, rows, columns = x.shape
    amax = torch.zeros(matrices, dtype=torch.int32, device=x.device)
    words = rows * columns // 2
    heuristics = heuristics_for(x.device)
    config = heuristics.amax_bf16x2
    programs = heuristics.amax_bf16x2_programs_per_sm * num_sms(x.device) // matrices
    programs = min(max(1, programs), cdiv(words, config.block_n))
    amax_bf16x2_kernel[(programs, matrices)](
        view_as_words(x), amax, words, programs, BLOCK_N=config.block_n, NATIVE=NATIVE,
        num_warps=config.num_warps,
    )  # fmt: skip
    return amax


def quantize_128x128_bf16x2(x: Tensor, data: Tensor, scale: Tensor, qmax: float) -> None:
    """Fill codes and scales of 128x128 blocks."""
    matrices, rows, columns = x.shape
    tiles_m, heuristics = cdiv(rows, 128), heuristics_for(x.device)
    quantize_128x128_bf16x2_kernel[(cdiv(columns, 128), matrices * tiles_m)](
        view_as_words(x), data.view(torch.int16), scale, rows, columns // 2, x.stride(1) // 2, tiles_m,
        QMAX=qmax, STORE_WORDS=heuristics.store_words, NATIVE=NATIVE,
        num_warps=heuristics.quantize_128x128_bf16x2.num_warps,
    )  # fmt: skip
