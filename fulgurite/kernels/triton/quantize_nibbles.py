"""Float tensors to 4-bit codes, two a byte, with a scale each 16, 32, 64 or 128 columns.

In: x [E, R, K] with K dense. Out: bytes and scales of MXFP4, NVFP4 or symmetric INT4.

The two numbers of a byte are read apart, as the even and the odd columns: of bfloat16 both come in one
32-bit word (`PAIRED`), and nothing has to move between threads until bytes are stored.

    B  columns of a block    E  matrices    R  rows of each    K  columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.triton.numbers import (
    CORRECTED,
    divide,
    divide_positive,
    e2m1_magnitude,
    finite_amax,
    int4_code,
    larger_or_nan,
    saturate,
    scale_of,
    to_float8,
)
from fulgurite.quant import Format

TILE = 4096  # elements of a program: H200, `fulgurite bench quant`
INT4_SPAN = tl.constexpr(7.5)


@triton.jit
def nibbles_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, tensor_scale_ptr, rows, columns, stride, rows_of_matrix,
    KIND: tl.constexpr, PAIRED: tl.constexpr, ONE: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """byte[i] = code(x[2i]) | code(x[2i + 1]) << 4, by the scale of their block."""
    across = columns // B
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row32 = block // across  # divided in 32 bits: in 64 it would cost more than the rest
    pair = (block - row32 * across)[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
    row = row32.to(tl.int64)
    here = (row < rows)[:, None]
    if PAIRED:
        word = tl.load(x_ptr + row[:, None] * stride + pair, here, 0)
        low_bits, high_bits = word << 16, word & -65536
    else:
        source = x_ptr + row[:, None] * stride + 2 * pair
        low_bits = tl.load(source, here, 0.0).to(tl.float32).to(tl.int32, bitcast=True)
        high_bits = tl.load(source + 1, here, 0.0).to(tl.float32).to(tl.int32, bitcast=True)
    low = (low_bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    high = (high_bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    amax = larger_or_nan(finite_amax(low, 1, True, C), finite_amax(high, 1, True, C))
    valid = amax == amax
    if KIND == "mxfp4":
        exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 2, 0)
        tl.store(scale_ptr + block, tl.where(valid, exponent, 255).to(tl.uint8), row < rows)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two: exact
        low, high = low * inverse[:, None], high * inverse[:, None]
    else:
        if KIND == "nvfp4":
            if ONE:
                tensor_scale = scale_of(tl.load(amax_ptr).to(tl.float32, bitcast=True), 2688.0)
                if tl.program_id(0) == 0:
                    tl.store(tensor_scale_ptr, tensor_scale)
            else:
                matrix = row32 // rows_of_matrix
                most = tl.load(amax_ptr + matrix, row < rows, 0)
                tensor_scale = scale_of(most.to(tl.float32, bitcast=True), 2688.0)
                first = (block == matrix * rows_of_matrix * across) & (row < rows)
                tl.store(tensor_scale_ptr + matrix, tensor_scale, first)
            wanted = tl.div_rn(tl.div_rn(amax, 6.0), tensor_scale)
            wanted = tl.where(wanted < 0.001953125, 0.001953125, wanted)
            wanted = saturate(tl.where(amax == 0.0, 1.0, wanted), 448.0)
            stored = to_float8(wanted, tl.float8e4nv, C)
            tl.store(scale_ptr + block, stored, row < rows)
            scale = tl.where(valid, stored.to(tl.float32), amax) * tensor_scale
        else:
            scale = scale_of(amax, INT4_SPAN)
            tl.store(scale_ptr + block, scale, row < rows)
        scale = scale[:, None]
        inverse = tl.div_rn(1.0, scale)
        if KIND == "int4":
            low = divide(low_bits.to(tl.float32, bitcast=True), scale, inverse, C)
            high = divide(high_bits.to(tl.float32, bitcast=True), scale, inverse, C)
        else:
            low = divide_positive(low, scale, inverse, C)
            high = divide_positive(high, scale, inverse, C)
    if KIND == "int4":
        code = (int4_code(low) & 0x0F) | ((int4_code(high) << 4) & 0xF0)
        code = tl.where(valid[:, None], code, 0x88)  # a NaN is in the scale
    else:
        code = (e2m1_magnitude(low) & 0x07) | ((e2m1_magnitude(high) << 4) & 0x70)
        code |= ((low_bits >> 28) & 0x08) | ((high_bits >> 24) & 0x80)
        code = tl.where(valid[:, None], code, 0)
    tl.store(data_ptr + row[:, None] * (columns // 2) + pair, code.to(tl.uint8), here)


def quantize_nibbles(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, amax: Tensor | None
) -> None:
    """Fills bytes and scales; `amax` holds the bits of each matrix's largest magnitude (NVFP4)."""
    matrices, rows, columns = x.shape
    width, stride = format.block[1], x.stride(1)
    if format.family == "mx":
        scales = [scales[0].view(torch.uint8)]  # Triton knows no e8m0
    paired = x.dtype == torch.bfloat16 and stride % 2 == 0 and x.data_ptr() % 4 == 0
    if paired:
        # as pairs: a dense row of K has K / 2 words, whatever lies between rows
        x = x.as_strided((matrices * rows, columns), (stride, 1)).view(torch.int32)
        stride //= 2
    blocks = matrices * rows * (columns // width)
    assert blocks < 2**31, f"{blocks} blocks are more than a 32-bit number counts"
    nibbles_kernel[(triton.cdiv(blocks, TILE // width),)](
        x, data, scales[0], scales[0] if amax is None else amax, scales[-1],
        matrices * rows, columns, stride, rows,
        KIND="int4" if format.family == "int" else format.name, PAIRED=paired, ONE=matrices == 1,
        BLOCKS=TILE // width, B=width, C=CORRECTED, num_warps=4,
    )  # fmt: skip
