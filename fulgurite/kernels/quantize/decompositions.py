"""Casts to quantized formats in elementwise ops and reductions, which the fuser turns into kernels.

In: a float tensor with K contiguous, and its format. Out: packed data and scales, the same bits as
`fulgurite.quant`; NotImplemented for formats and shapes that only the operator takes.

    fp8 by rows or 1x128, int8    amax of a row or block, codes
    MXFP8, MXFP4                  amax of 32 columns; its exponent is the scale
    NVFP4                         amax of the matrix, then of 16 columns

So in a compiled function a cast shares a kernel with the norm or the gate before it. Exponents are
read from the bits of a float: exact, and without subnormal numbers, which GPUs may flush.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fulgurite.kernels.quantize.scale_layout import has_column_major_scales
from fulgurite.quant import WHOLE_DIM
from fulgurite.quant.codecs.blocks import (
    amax_over_dims,
    compute_scale,
    divide,
)
from fulgurite.quant.codecs.integer import round_to_codes
from fulgurite.quant.codecs.minifloat import E8M0_NAN, quantize_e2m1, saturating_cast
from fulgurite.quant.format import E2M1, E4M3, Format

FLOAT32_MANTISSA_BITS = 23


def decompose_quantize(x: Tensor, format: Format) -> list[Tensor]:
    """Packed data and separate scales, as `fulgurite::quantize` returns them."""
    if x.dim() < 2 or x.numel() == 0 or x.stride(-1) != 1:
        return NotImplemented
    width = x.shape[-1] if format.block[1] == WHOLE_DIM else format.block[1]
    if format.block[0] != 1 or x.shape[-1] % width:
        return NotImplemented
    blocks = x.float().unflatten(-1, (x.shape[-1] // width, width))
    if format.family == "fp8" or format.name == "int8":
        codes, scale = _quantize_scaled(blocks, format)
        if has_column_major_scales(x, format):
            scale = scale.t().contiguous().t()
        return [codes.flatten(-2), scale]
    if format.family == "mx":
        return _quantize_mx(blocks, format)
    return _quantize_nvfp4(blocks) if format.family == "nvfp4" else NotImplemented


def _quantize_scaled(blocks: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales: amax becomes the largest code."""
    amax = _amax(blocks, keep_nan=not format.element.has_nan)
    scale = compute_scale(amax, format.element.max_value)
    steps = blocks / scale.unsqueeze(-1)
    if format.family == "fp8":
        return saturating_cast(steps, format.element, format.data_dtype), scale
    return round_to_codes(steps, format), scale


def _quantize_mx(blocks: Tensor, format: Format) -> list[Tensor]:
    """scale = 2^(exponent of amax - emax), as its biased exponent; codes = element(x / scale)."""
    emax = math.floor(math.log2(format.element.max_value))
    is_4bit = format.element.bits == 4
    amax = _amax(blocks, keep_nan=not format.element.has_nan)
    exponent = amax.view(torch.int32) >> FLOAT32_MANTISSA_BITS  # 255: NaN, 0: subnormals and zero
    code = torch.where(exponent == E8M0_NAN, E8M0_NAN, (exponent - emax).clamp(min=0))
    # 1 / scale = 2^(127 - code) is a normal number, because code is at most 254 - emax
    inverse = ((254 - code.clamp(max=253)) << FLOAT32_MANTISSA_BITS).view(torch.float32)
    inverse = torch.where(code == E8M0_NAN, float("nan"), inverse).unsqueeze(-1)
    scale = code.to(torch.uint8).view(torch.float8_e8m0fnu)
    if is_4bit:
        return [_pack_nibbles(quantize_e2m1(blocks * inverse)), scale]
    codes = saturating_cast(blocks * inverse, format.element, format.data_dtype)
    return [codes.flatten(-2), scale]


def _quantize_nvfp4(blocks: Tensor) -> list[Tensor]:
    """A float32 scale of each matrix, an e4m3 scale of each block, e2m1 codes."""
    matrix_amax = amax_over_dims(blocks, (-3, -2, -1), keep_nan=False)
    tensor_scale = compute_scale(matrix_amax, E4M3.max_value * E2M1.max_value)[..., None, None]
    amax = _amax(blocks, keep_nan=True)
    block_scale = (divide(amax, E2M1.max_value) / tensor_scale).clamp_min(E4M3.smallest_subnormal)
    scale = saturating_cast(torch.where(amax == 0, 1.0, block_scale), E4M3, torch.float8_e4m3fn)
    effective = (scale.float() * tensor_scale).unsqueeze(-1)
    return [_pack_nibbles(quantize_e2m1(blocks / effective)), scale, tensor_scale]


def _amax(blocks: Tensor, keep_nan: bool) -> Tensor:
    return amax_over_dims(blocks, (-1,), keep_nan=keep_nan)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte, low nibble first: a sum over pairs, nested in the amax of a block."""
    pairs = codes.to(torch.int32).unflatten(-1, (codes.shape[-1] // 2, 2))
    shifts = 4 * torch.arange(2, device=codes.device, dtype=torch.int32)
    return (pairs << shifts).sum(-1, dtype=torch.int32).to(torch.uint8).flatten(-2)
