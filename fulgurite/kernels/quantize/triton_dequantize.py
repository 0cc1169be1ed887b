# mypy: allow-untyped-defs, allow-incomplete-defs
"""Dequantize to 16-bit floats, for GEMMs that don't take the quantized operand.

    out[m, k] = code[m, k] * scale[m, k / B]

In: packed data [M, K] and its scales. Out: [M, K].

    dequantize_activations   MX and NVFP4 activations to bfloat16, exactly; NVFP4's tensor scale is
                             returned as a factor
    dequantize_weight        weights of any format that the GEMM kernels take, rounded once
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_dequantize import e8m0_to_bfloat16
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_operands import DequantScheme, QuantizedOperand
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import Format


@cached_launch
def dequantize_blocks_kernel(
    data_ptr, scale_ptr, out_ptr, blocks,
    BLOCK_WIDTH: tl.constexpr, BLOCKS: tl.constexpr, IS_4BIT: tl.constexpr,
):  # fmt: skip
    """out = code * scale, blocks of B columns; rows are whole blocks, so they are contiguous."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    scale = tl.load(scale_ptr + tl.where(inside, block, 0))
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = e8m0_to_bfloat16(scale)
    scale = scale.to(tl.float32)[:, None]
    if IS_4BIT:
        at = block[:, None] * (BLOCK_WIDTH // 2) + tl.arange(0, BLOCK_WIDTH // 2)[None, :]
        pair = tl.load(data_ptr + at, inside[:, None], 0).to(tl.int32)
        both = tl.join(_e2m1_to_float32(pair & 15) * scale, _e2m1_to_float32(pair >> 4) * scale)
        value = tl.reshape(both, [BLOCKS, BLOCK_WIDTH])
    else:
        at = block[:, None] * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
        value = tl.load(data_ptr + at, inside[:, None], 0.0).to(tl.float32) * scale
    into = out_ptr + block[:, None] * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    tl.store(into, value.to(tl.bfloat16), inside[:, None])


@triton.jit
def _e2m1_to_float32(code):
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * (2.0**126)


def dequantize_activations(
    data: Tensor, scales: list[Tensor], format: Format
) -> tuple[Tensor, Tensor | None]:
    """Rows in bfloat16, and the factor that they are still to be multiplied by."""
    is_4bit, width = format.element.bits == 4, format.block[1]
    rows, items = data.shape
    out = data.new_empty((rows, items * (2 if is_4bit else 1)), dtype=torch.bfloat16)
    scale = scales[0].view(torch.uint8) if format.family == "mx" else scales[0]
    num_blocks = out.numel() // width
    config = heuristics_for(data.device).quantize_blocks(width)
    dequantize_blocks_kernel[(cdiv(num_blocks, config.block_m),)](
        data.contiguous(), scale.contiguous(), out, num_blocks,
        BLOCK_WIDTH=width, BLOCKS=config.block_m, IS_4BIT=is_4bit, num_warps=config.num_warps,
    )  # fmt: skip
    return out, scales[1] if format.family == "nvfp4" else None


@cached_launch
def dequantize_weight_kernel(
    data_ptr, scale_ptr, aux_ptr, out_ptr, columns, scale_n, scale_k,
    DEQUANT: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    TENSOR_SCALE: tl.constexpr, ZERO_POINTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[n, k] = (code - zero) * scale * tensor scale, code * scale + minimum, or table[code] * scale.

    A program takes BLOCK_N columns of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    is_table: tl.constexpr = DEQUANT == "codebook"
    is_4bit: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4" or is_table
    byte = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = 2 * byte if is_4bit else column
    inside = at < columns
    scale_at = (row // SCALE_ROWS) * scale_n + (at // GROUP_SIZE) * scale_k
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = e8m0_to_bfloat16(tl.load(scale_ptr + scale_at, inside, 0)).to(tl.float32)
    else:
        scale = tl.load(scale_ptr + scale_at, inside, 0.0).to(tl.float32)
    if is_4bit:
        pair = tl.load(data_ptr + row * (columns // 2) + byte, inside, 0).to(tl.int32)
        if DEQUANT == "e2m1":
            low, high = _e2m1_to_float32(pair & 15) * scale, _e2m1_to_float32(pair >> 4) * scale
        elif is_table:
            low = tl.load(aux_ptr + (pair & 15)) * scale
            high = tl.load(aux_ptr + (pair >> 4)) * scale
        elif DEQUANT == "uint4":
            minimum = tl.load(aux_ptr + scale_at, inside, 0.0)
            low = (pair & 15).to(tl.float32) * scale + minimum
            high = (pair >> 4).to(tl.float32) * scale + minimum
        else:
            zero = tl.load(aux_ptr + scale_at, inside, 0).to(tl.float32) if ZERO_POINTS else 8.0
            low = ((pair & 15).to(tl.float32) - zero) * scale
            high = ((pair >> 4).to(tl.float32) - zero) * scale
        value = tl.reshape(tl.join(low, high), [BLOCK_N])
    else:
        value = tl.load(data_ptr + row * columns + column, inside, 0.0).to(tl.float32)
        if ZERO_POINTS:
            value -= tl.load(aux_ptr + scale_at, inside, 0).to(tl.float32)
        value *= scale
    if TENSOR_SCALE:
        value *= tl.load(aux_ptr)
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), column < columns)


def dequantize_weight(
    dtype: torch.dtype, scheme: DequantScheme, weight: QuantizedOperand
) -> Tensor:
    """A quantized weight [N, K] in `dtype`."""
    data = weight.data.contiguous()  # it may be columns of a larger one
    data = data.view(torch.uint8) if scheme.is_4bit else data
    rows, items = data.shape
    columns = items * 2 if scheme.is_4bit else items
    out = data.new_empty((rows, columns), dtype=dtype)
    config = heuristics_for(data.device).dequantize_weight(columns)
    dequantize_weight_kernel[(rows, cdiv(columns, config.block_n))](
        data, weight.scale, weight.aux, out, columns, *weight.scale_strides,
        DEQUANT=scheme.dequant, GROUP_SIZE=scheme.group_size, SCALE_ROWS=scheme.scale_rows,
        TENSOR_SCALE=weight.has_tensor_scale, ZERO_POINTS=weight.has_zero_points,
        BLOCK_N=config.block_n, num_warps=config.num_warps,
        enable_fp_fusion=False,  # scale * code + minimum is rounded twice, as in the reference
    )  # fmt: skip
    return out
