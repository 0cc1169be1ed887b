# mypy: allow-untyped-defs, allow-incomplete-defs
"""Float tensors to 4-bit codes, two a byte, with a scale each 16, 32, 64 or 128 columns.

In: x [E, R, K] with K dense. Out: bytes and scales of MXFP4, NVFP4 or symmetric INT4.

The two numbers of a byte come in one 32-bit word where x is bfloat16 (`PAIRED`, `pairs.py`), and are
otherwise read apart, as the even and the odd columns. A lane makes whole bytes: nothing moves between
threads but the largest magnitude of a block.

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
from fulgurite.quant import Format

# Numbers of a warp, and warps: NVFP4's do the most for each block, and don't wait for each other.
# LANE_BYTES: what a lane stores at once, having read four times as many. H200, `fulgurite bench quant`
TILE, WARPS, NVFP4_WARPS = 1024, 4, 1
LANE_BYTES = tl.constexpr(16)
INT4_RANGE = tl.constexpr(7.5)
SIXTH = tl.constexpr(0.16666667163372039794921875)  # 1 / 6 as a float32
MIN_EXACT_SCALE = tl.constexpr(2.0**-80)  # under it the remainders of a division may be inexact


@triton.jit
def compute_nvfp4_scale(amax, tensor_scale, ONE: tl.constexpr, C: tl.constexpr):
    """The e4m3 of (amax / 6) / tensor_scale, from 2^-9 to 448, 1 for zeros."""
    if C and ONE:
        if tensor_scale < MIN_EXACT_SCALE:
            wanted = tl.div_rn(tl.div_rn(amax, 6.0), tensor_scale)
        else:
            sixth = divide_positive(amax, 6.0, SIXTH, C)
            wanted = divide_positive(sixth, tensor_scale, tl.div_rn(1.0, tensor_scale), C)
    else:
        wanted = tl.div_rn(tl.div_rn(amax, 6.0), tensor_scale)
    wanted = tl.where(wanted < 0.001953125, 0.001953125, wanted)
    return to_float8(saturate(tl.where(amax == 0.0, 1.0, wanted), 448.0), tl.float8e4nv, C)


@triton.jit
def quantize_4bit_scalar(low_bits, high_bits, scale, inverse, KIND: tl.constexpr, C: tl.constexpr):
    """Two codes a byte of numbers that come apart, as the bits of float32."""
    low = low_bits.to(tl.float32, bitcast=True)
    high = high_bits.to(tl.float32, bitcast=True)
    if KIND == "int4":
        low, high = divide(low, scale, inverse, C), divide(high, scale, inverse, C)
        return (quantize_int4(low) & 0x0F) | ((quantize_int4(high) << 4) & 0xF0)
    if KIND == "mxfp4":
        low, high = tl.abs(low) * inverse, tl.abs(high) * inverse
    else:
        low = divide_positive(tl.abs(low), scale, inverse, C)
        high = divide_positive(tl.abs(high), scale, inverse, C)
    code = (e2m1_magnitude(low) & 0x07) | ((e2m1_magnitude(high) << 4) & 0x70)
    return code | ((low_bits >> 28) & 0x08) | ((high_bits >> 24) & 0x80)


@triton.jit
def quantize_4bit_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, tensor_scale_ptr, blocks, across, stride, blocks_of_matrix,
    KIND: tl.constexpr, PAIRED: tl.constexpr, FLAT: tl.constexpr, ONE: tl.constexpr,
    BLOCKS: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """byte[i] = code(x[2i]) | code(x[2i + 1]) << 4, by the scale of their block.

    FLAT: rows lie one after another. The stride counts what x_ptr points at: words where PAIRED.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside, here = block < blocks, (block < blocks)[:, None]
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * B // 2)
    byte = tl.arange(0, BLOCKS)[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
    if FLAT:
        source = x_ptr + first
        pair = byte
    else:
        row = block // across  # divided in 32 bits: in 64 it would cost more than the rest
        source = x_ptr + row.to(tl.int64)[:, None] * stride
        pair = (block - row * across)[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
    if PAIRED:
        word = tl.load(source + pair, here, 0)
        size = word & ABS_MASK
        most = max_of_halves(reduce_max_bf16x2(size, 1, C))
        strange = tl.max(most, 0) >= INFINITY_BITS
        if strange:
            most = max_of_halves(reduce_max_bf16x2(zero_nonfinite(size, True), 1, C))
        amax = most.to(tl.float32, bitcast=True)
    else:
        low = tl.load(source + 2 * pair, here, 0.0).to(tl.float32)
        high = tl.load(source + 2 * pair + 1, here, 0.0).to(tl.float32)
        bits = tl.maximum(magnitude_bits(low, True), magnitude_bits(high, True))
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    valid = amax == amax  # a NaN makes the scale NaN, and the codes zeros
    scale = amax
    if KIND == "mxfp4":
        exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 2, 0)
        tl.store(scale_ptr + block, tl.where(valid, exponent, 255).to(tl.uint8), inside)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two: exact
    elif KIND == "nvfp4":
        if ONE:
            tensor_scale = compute_scale(tl.load(amax_ptr).to(tl.float32, bitcast=True), 2688.0)
            if tl.program_id(0) == 0:
                tl.store(tensor_scale_ptr, tensor_scale)
        else:
            matrix = block // blocks_of_matrix
            most = tl.load(amax_ptr + matrix, inside, 0)
            tensor_scale = compute_scale(most.to(tl.float32, bitcast=True), 2688.0)
            begins = inside & (block == matrix * blocks_of_matrix)
            tl.store(tensor_scale_ptr + matrix, tensor_scale, begins)
        stored = compute_nvfp4_scale(amax, tensor_scale, ONE, C)
        tl.store(scale_ptr + block, stored, inside)
        scale = tl.where(valid, stored.to(tl.float32) * tensor_scale, 1.0)
        inverse = reciprocal(scale, C)
    else:
        scale = compute_scale(amax, INT4_RANGE)
        tl.store(scale_ptr + block, scale, inside)
        scale = tl.where(valid, scale, 1.0)
        inverse = reciprocal(scale, C)
    scale, inverse, valid = scale[:, None], inverse[:, None], valid[:, None]
    if PAIRED and C:
        if KIND == "mxfp4":
            code = quantize_mxfp4_bf16x2(word, inverse, valid)
        else:
            if strange:
                STEPS: tl.constexpr = 7.75 if KIND == "int4" else 16.0
                word = tl.where(valid, saturate_infinities(word, scale, scale, STEPS), 0)
            code = quantize_4bit_bf16x2(word, scale, inverse, KIND)
    else:
        if PAIRED:
            low_bits, high_bits = word << 16, word & -65536
        else:
            low_bits, high_bits = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
        code = quantize_4bit_scalar(low_bits, high_bits, scale, inverse, KIND, C)
        code = tl.where(valid, code, 0x88 if KIND == "int4" else 0).to(tl.uint8)
    together: tl.constexpr = min(LANE_BYTES, B // 2)
    tl.store(data_ptr + first + tl.max_contiguous(byte, [1, together]), code, here)


def quantize_4bit(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, amax: Tensor | None
) -> None:
    """Fills bytes and scales; `amax` holds the bits of each matrix's largest magnitude (NVFP4)."""
    matrices, rows, columns = x.shape
    width, stride = format.block[1], x.stride(1)
    if format.family == "mx":
        scales = [scales[0].view(torch.uint8)]  # Triton knows no e8m0
    paired = x.dtype == torch.bfloat16 and stride % 2 == 0 and x.data_ptr() % 4 == 0
    flat = paired and (stride == columns or matrices * rows == 1)
    if paired:
        # as pairs: a dense row of K has K / 2 words, whatever lies between rows
        x = x.as_strided((matrices * rows, columns), (stride, 1)).view(torch.int32)
        stride //= 2
    across = columns // width
    blocks = matrices * rows * across
    assert blocks < 2**31, f"{blocks} blocks are more than a 32-bit number counts"
    warps = NVFP4_WARPS if format.family == "nvfp4" else WARPS
    together = TILE * warps // width
    quantize_4bit_kernel[(triton.cdiv(blocks, together),)](
        x, data, scales[0], scales[0] if amax is None else amax, scales[-1],
        blocks, across, stride, rows * across,
        KIND="int4" if format.family == "int" else format.name, PAIRED=paired, FLAT=flat,
        ONE=matrices == 1, BLOCKS=together, B=width, C=NATIVE, num_warps=warps,
    )  # fmt: skip
