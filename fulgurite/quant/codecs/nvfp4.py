"""NVFP4: 4-bit floats e2m1 with one e4m3 scale per 16 elements of K and one float32 scale per
tensor.

    tensor_scale = amax(tensor) / (448 * 6)
    scale        = e4m3(amax(block) / 6 / tensor_scale)
    code         = e2m1(x / (scale * tensor_scale))
    value        = (code * scale) * tensor_scale

In: a float tensor whose K is a multiple of 16. Out: nibbles, block scales [..., K / 16], and one
tensor scale per matrix.

- Rounding: nearest even in both e4m3 and e2m1. Out-of-range values saturate (448 and 6).
- Zeros: a block of zeros has scale 1 and codes 0; a tensor of zeros has tensor scale 1. -0 keeps
  its sign (code 8).
- If a block is so much smaller than the tensor's amax that its scale would round to zero, it gets
  the smallest e4m3, 2^-9, instead. Its elements still round to the nearest code.
- NaN: e2m1 has none, so a NaN makes its block's scale NaN, and the block dequantizes to NaN. An
  infinity saturates to 6. Neither counts towards amax.
- The subnormal code 0.5 and subnormal e4m3 scales are used.
- `code * scale` is exact in float32, so a value is rounded once, by the tensor scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant.codecs.blocks import (
    Codes,
    PackedData,
    block_amax,
    check_static_scale,
    compute_scale,
    divide,
    expand_blocks,
    pack_nibbles,
    unpack_nibbles,
)
from fulgurite.quant.codecs.minifloat import dequantize_e2m1, quantize_e2m1, saturating_cast
from fulgurite.quant.format import E2M1, E4M3, Format, get_scale_spec


def quantize(x: Tensor, format: Format, tensor_scale: Tensor | float | None = None) -> Codes:
    """Quantize. With a static `tensor_scale` only the amax of each block is computed."""
    block_spec, tensor_spec = (
        get_scale_spec(format, "scale"),
        get_scale_spec(format, "tensor_scale"),
    )
    x = x.float()
    if tensor_scale is None:
        tensor_amax = block_amax(x, tensor_spec, keep_nan=False)
        tensor_scale = compute_scale(tensor_amax, E4M3.max_value * E2M1.max_value)
    else:
        tensor_scale = check_static_scale(tensor_scale, tensor_spec, x)
    amax = block_amax(x, block_spec, keep_nan=True)
    block_scale = (divide(amax, E2M1.max_value) / tensor_scale).clamp_min(E4M3.smallest_subnormal)
    scale = saturating_cast(torch.where(amax == 0, 1.0, block_scale), E4M3, block_spec.dtype)
    effective = expand_blocks(scale.float() * tensor_scale, block_spec.block, x.shape)
    return Codes(quantize_e2m1(x / effective), {"scale": scale, "tensor_scale": tensor_scale})


def dequantize(codes: Codes, format: Format) -> Tensor:
    """Dequantize to float32."""
    block_spec = get_scale_spec(format, "scale")
    values = dequantize_e2m1(codes.codes)
    values *= expand_blocks(codes.scales["scale"].float(), block_spec.block, values.shape)
    return values * codes.scales["tensor_scale"]


def pack(codes: Codes, format: Format) -> PackedData:
    """Two codes per byte along K, low nibble first."""
    return PackedData(pack_nibbles(codes.codes), codes.scales)


def unpack(packed: PackedData, format: Format) -> Codes:
    """The inverse of `pack`."""
    return Codes(unpack_nibbles(packed.data), packed.scales)
