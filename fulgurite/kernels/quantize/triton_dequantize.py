# mypy: allow-untyped-defs, allow-incomplete-defs
"""Packed numbers as 16-bit floats, for matmuls whose units don't take the packed form.

In: packed data [M, K] and its scales. Out: bfloat16 [M, K].

    to_bfloat16    MX and NVFP4 activations, exactly, and the factor that is left over (NVFP4's tensor
                   scale): e2m1 and float8 numbers times their block's scale are bfloat16
    weight_as      weights of any format the matmul kernels take, each rounded once
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_dequantize import e8m0_to_bfloat16
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_operands import DequantScheme, QuantizedOperand
from fulgurite.quant import Format

TILE_ELEMENTS = 4096  # elements of a program


@triton.jit
def dequantize_blocks_kernel(
    data_ptr, scale_ptr, out_ptr, blocks, B: tl.constexpr, BLOCKS: tl.constexpr, NIBBLES: tl.constexpr
):  # fmt: skip
    """out = code * scale, blocks of B columns; rows are whole blocks, so they lie end to end."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    scale = tl.load(scale_ptr + tl.where(inside, block, 0))
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = e8m0_to_bfloat16(scale)
    scale = scale.to(tl.float32)[:, None]
    if NIBBLES:
        place = block[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
        pair = tl.load(data_ptr + place, inside[:, None], 0).to(tl.int32)
        both = tl.join(_e2m1_to_float32(pair & 15) * scale, _e2m1_to_float32(pair >> 4) * scale)
        value = tl.reshape(both, [BLOCKS, B])
    else:
        place = block[:, None] * B + tl.arange(0, B)[None, :]
        value = tl.load(data_ptr + place, inside[:, None], 0.0).to(tl.float32) * scale
    into = out_ptr + block[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(into, value.to(tl.bfloat16), inside[:, None])


@triton.jit
def _e2m1_to_float32(code):
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * (2.0**126)


def dequantize_activations(data: Tensor, scales: list[Tensor], format: Format) -> tuple[Tensor, Tensor | None]:
    """Rows in bfloat16 and the factor still to come."""
    nibbles, width = format.element.bits == 4, format.block[1]
    rows, items = data.shape
    out = data.new_empty((rows, items * (2 if nibbles else 1)), dtype=torch.bfloat16)
    scale = scales[0].view(torch.uint8) if format.family == "mx" else scales[0]
    blocks, together = out.numel() // width, TILE_ELEMENTS // width
    dequantize_blocks_kernel[(triton.cdiv(blocks, together),)](
        data.contiguous(), scale.contiguous(), out, blocks,
        B=width, BLOCKS=together, NIBBLES=nibbles, num_warps=4,
    )  # fmt: skip
    return out, scales[1] if format.family == "nvfp4" else None


@triton.jit
def dequantize_weight_kernel(
    data_ptr, scale_ptr, second_ptr, out_ptr, columns, scale_n, scale_k,
    DEQUANT: tl.constexpr, GROUP: tl.constexpr, W_ROWS: tl.constexpr, TENSOR_SCALE: tl.constexpr,
    ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, k] = (code - zero) * scale * tensor scale (or code * scale + minimum), a stretch of a row
    a program."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    nibbles: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4"
    byte = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    at = 2 * byte if nibbles else column
    inside = at < columns
    place = (row // W_ROWS) * scale_n + (at // GROUP) * scale_k
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = e8m0_to_bfloat16(tl.load(scale_ptr + place, inside, 0)).to(tl.float32)
    else:
        scale = tl.load(scale_ptr + place, inside, 0.0).to(tl.float32)
    if nibbles:
        pair = tl.load(data_ptr + row * (columns // 2) + byte, inside, 0).to(tl.int32)
        if DEQUANT == "e2m1":
            low, high = _e2m1_to_float32(pair & 15) * scale, _e2m1_to_float32(pair >> 4) * scale
        elif DEQUANT == "uint4":
            minimum = tl.load(second_ptr + place, inside, 0.0)
            low = (pair & 15).to(tl.float32) * scale + minimum
            high = (pair >> 4).to(tl.float32) * scale + minimum
        else:
            zero = tl.load(second_ptr + place, inside, 0).to(tl.float32) if ZERO else 8.0
            low = ((pair & 15).to(tl.float32) - zero) * scale
            high = ((pair >> 4).to(tl.float32) - zero) * scale
        value = tl.reshape(tl.join(low, high), [BLOCK])
    else:
        value = tl.load(data_ptr + row * columns + column, inside, 0.0).to(tl.float32) * scale
    if TENSOR_SCALE:
        value *= tl.load(second_ptr)
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), column < columns)


def dequantize_weight(dtype: torch.dtype, weight: DequantScheme, parts: QuantizedOperand, format: Format) -> Tensor:
    """A packed weight [N, K] in 16 bits."""
    data = parts.data.contiguous()  # it may be columns of a larger one
    data = data.view(torch.uint8) if weight.is_4bit else data
    rows, items = data.shape
    columns = items * 2 if weight.is_4bit else items
    out = data.new_empty((rows, columns), dtype=dtype)
    block = min(triton.next_power_of_2(columns), 2048)
    dequantize_weight_kernel[(rows, triton.cdiv(columns, block))](
        data, parts.scale, parts.extra_scale, out, columns, *parts.strides,
        DEQUANT=weight.dequant, GROUP=weight.group_size, W_ROWS=weight.scale_rows,
        TENSOR_SCALE=format.family == "nvfp4", ZERO=parts.has_zero_points, BLOCK=block, num_warps=4,
        enable_fp_fusion=False,  # scale * code + minimum, rounded twice as everywhere
    )  # fmt: skip
    return out
