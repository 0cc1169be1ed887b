# mypy: allow-untyped-defs, allow-incomplete-defs
"""Quantize to 4 bits: two codes a byte, with a scale for every 16, 32, 64 or 128 columns.

    byte[i] = code(x[2i]) | code(x[2i + 1]) << 4

In: x [E, R, K] with K contiguous. Out: bytes and scales of MXFP4, NVFP4 or symmetric INT4.

If x is bfloat16, the two values of a byte come in one 32-bit word (`BF16X2`, `triton_bf16x2.py`).
Otherwise even and odd columns are read separately. A thread makes whole bytes: threads exchange
nothing but the amax of a block.

    B  columns of a block    E  matrices    R  rows of each    K  columns
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_bf16x2 import (
    ABS_MASK,
    max_of_halves,
    quantize_4bit_bf16x2,
    quantize_mxfp4_bf16x2,
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
    divide,
    divide_positive,
    e2m1_magnitude,
    magnitude_bits,
    quantize_int4,
    reciprocal,
    saturate,
    to_float8,
)
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import Format

INT4_RANGE = tl.constexpr(7.5)
SIXTH = tl.constexpr(0.16666667163372039794921875)  # 1 / 6 as a float32
MIN_EXACT_SCALE = tl.constexpr(2.0**-80)  # below it the remainder of a division may be inexact


@triton.jit
def compute_nvfp4_scale(amax, tensor_scale, SINGLE_MATRIX: tl.constexpr, NATIVE: tl.constexpr):
    """The e4m3 of (amax / 6) / tensor_scale, from 2^-9 to 448, 1 for zeros."""
    if NATIVE and SINGLE_MATRIX:
        if tensor_scale < MIN_EXACT_SCALE:
            wanted = tl.div_rn(tl.div_rn(amax, 6.0), tensor_scale)
        else:
            sixth = divide_positive(amax, 6.0, SIXTH, NATIVE)
            wanted = divide_positive(sixth, tensor_scale, tl.div_rn(1.0, tensor_scale), NATIVE)
    else:
        wanted = tl.div_rn(tl.div_rn(amax, 6.0), tensor_scale)
    wanted = tl.where(wanted < 0.001953125, 0.001953125, wanted)
    return to_float8(saturate(tl.where(amax == 0.0, 1.0, wanted), 448.0), tl.float8e4nv, NATIVE)


@triton.jit
def quantize_4bit_scalar(
    low_bits, high_bits, scale, inverse, KIND: tl.constexpr, NATIVE: tl.constexpr
):
    """Two codes a byte, from the bits of two float32 values."""
    low = low_bits.to(tl.float32, bitcast=True)
    high = high_bits.to(tl.float32, bitcast=True)
    if KIND == "int4":
        low, high = divide(low, scale, inverse, NATIVE), divide(high, scale, inverse, NATIVE)
        return (quantize_int4(low) & 0x0F) | ((quantize_int4(high) << 4) & 0xF0)
    if KIND == "mxfp4":
        low, high = tl.abs(low) * inverse, tl.abs(high) * inverse
    else:
        low = divide_positive(tl.abs(low), scale, inverse, NATIVE)
        high = divide_positive(tl.abs(high), scale, inverse, NATIVE)
    code = (e2m1_magnitude(low) & 0x07) | ((e2m1_magnitude(high) << 4) & 0x70)
    return code | ((low_bits >> 28) & 0x08) | ((high_bits >> 24) & 0x80)


@cached_launch
def quantize_4bit_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, tensor_scale_ptr, blocks, row_blocks, stride, blocks_per_matrix,
    KIND: tl.constexpr, BF16X2: tl.constexpr, FLAT: tl.constexpr, SINGLE_MATRIX: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, STORE_BYTES: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """byte[i] = code(x[2i]) | code(x[2i + 1]) << 4, by the scale of their block.

    FLAT: rows are contiguous. The stride counts elements of x_ptr: words if BF16X2.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside, mask = block < blocks, (block < blocks)[:, None]
    BYTES: tl.constexpr = BLOCK_WIDTH // 2
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * BYTES)
    byte = tl.arange(0, BLOCKS)[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    if FLAT:
        source = x_ptr + first
        pair = byte
    else:
        row = block // row_blocks  # a division in 64 bits would cost more than the rest
        source = x_ptr + row.to(tl.int64)[:, None] * stride
        pair = (block - row * row_blocks)[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    if BF16X2:
        word = tl.load(source + pair, mask, 0)
        magnitudes = word & ABS_MASK
        max_bits = max_of_halves(reduce_max_bf16x2(magnitudes, 1, NATIVE))
        has_nonfinite_value = tl.max(max_bits, 0) >= INFINITY_BITS
        if has_nonfinite_value:
            max_bits = max_of_halves(reduce_max_bf16x2(zero_nonfinite(magnitudes, True), 1, NATIVE))
        amax = max_bits.to(tl.float32, bitcast=True)
    else:
        low = tl.load(source + 2 * pair, mask, 0.0).to(tl.float32)
        high = tl.load(source + 2 * pair + 1, mask, 0.0).to(tl.float32)
        bits = tl.maximum(magnitude_bits(low, True), magnitude_bits(high, True))
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    valid = amax == amax  # a NaN makes the scale NaN and the codes zeros
    scale = amax
    if KIND == "mxfp4":
        exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 2, 0)
        tl.store(scale_ptr + block, tl.where(valid, exponent, 255).to(tl.uint8), inside)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two: exact
    elif KIND == "nvfp4":
        if SINGLE_MATRIX:
            tensor_scale = compute_scale(tl.load(amax_ptr).to(tl.float32, bitcast=True), 2688.0)
            if tl.program_id(0) == 0:
                tl.store(tensor_scale_ptr, tensor_scale)
        else:
            matrix = block // blocks_per_matrix
            max_bits = tl.load(amax_ptr + matrix, inside, 0)
            tensor_scale = compute_scale(max_bits.to(tl.float32, bitcast=True), 2688.0)
            is_first = inside & (block == matrix * blocks_per_matrix)
            tl.store(tensor_scale_ptr + matrix, tensor_scale, is_first)
        stored = compute_nvfp4_scale(amax, tensor_scale, SINGLE_MATRIX, NATIVE)
        tl.store(scale_ptr + block, stored, inside)
        scale = tl.where(valid, stored.to(tl.float32) * tensor_scale, 1.0)
        inverse = reciprocal(scale, NATIVE)
    else:
        scale = compute_scale(amax, INT4_RANGE)
        tl.store(scale_ptr + block, scale, inside)
        scale = tl.where(valid, scale, 1.0)
        inverse = reciprocal(scale, NATIVE)
    scale, inverse, valid = scale[:, None], inverse[:, None], valid[:, None]
    if BF16X2 and NATIVE:
        if KIND == "mxfp4":
            code = quantize_mxfp4_bf16x2(word, inverse, valid)
        else:
            if has_nonfinite_value:
                STEPS: tl.constexpr = 7.75 if KIND == "int4" else 16.0
                word = tl.where(valid, saturate_infinities(word, scale, scale, STEPS), 0)
            code = quantize_4bit_bf16x2(word, scale, inverse, KIND)
    else:
        if BF16X2:
            low_bits, high_bits = word << 16, word & -65536
        else:
            low_bits, high_bits = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
        code = quantize_4bit_scalar(low_bits, high_bits, scale, inverse, KIND, NATIVE)
        code = tl.where(valid, code, 0x88 if KIND == "int4" else 0).to(tl.uint8)
    store_width: tl.constexpr = min(STORE_BYTES, BYTES)
    tl.store(data_ptr + first + tl.max_contiguous(byte, [1, store_width]), code, mask)


def quantize_4bit(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, amax: Tensor | None
) -> None:
    """Fill bytes and scales; `amax` holds the bits of each matrix's largest magnitude (NVFP4)."""
    matrices, rows, columns = x.shape
    width, stride = format.block[1], x.stride(1)
    if format.family == "mx":
        scales = [scales[0].view(torch.uint8)]  # Triton has no e8m0
    is_bf16x2 = x.dtype == torch.bfloat16 and stride % 2 == 0 and x.data_ptr() % 4 == 0
    is_flat = is_bf16x2 and (stride == columns or matrices * rows == 1)
    if is_bf16x2:
        # a contiguous row of K has K / 2 words, whatever is between rows
        x = x.as_strided((matrices * rows, columns), (stride, 1)).view(torch.int32)
        stride //= 2
    row_blocks = columns // width
    blocks = matrices * rows * row_blocks
    assert blocks < 2**31, f"{blocks} blocks don't fit in a 32-bit index"
    heuristics = heuristics_for(x.device)
    config = heuristics.quantize_4bit(format.family, width)
    quantize_4bit_kernel[(cdiv(blocks, config.block_m),)](
        x, data, scales[0], scales[0] if amax is None else amax, scales[-1],
        blocks, row_blocks, stride, rows * row_blocks,
        KIND="int4" if format.family == "int" else format.name, BF16X2=is_bf16x2, FLAT=is_flat,
        SINGLE_MATRIX=matrices == 1, BLOCKS=config.block_m, BLOCK_WIDTH=width,
        STORE_BYTES=heuristics.store_bytes, NATIVE=NATIVE, num_warps=config.num_warps,
    )  # fmt: skip
