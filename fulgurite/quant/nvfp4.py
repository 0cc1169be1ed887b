"""NVFP4: 4-bit floats e2m1, an e4m3 scale each 16 elements of K, a float32 scale a tensor.

    tensor_scale = amax(tensor) / (448 * 6)
    scale        = e4m3(amax(block) / 6 / tensor_scale)
    code         = e2m1(x / (scale * tensor_scale))
    value        = (code * scale) * tensor_scale

In: a float tensor whose K is a multiple of 16. Out: nibbles, block scales [..., K / 16], and one
tensor scale a matrix.

- Rounding: nearest even in both e4m3 and e2m1; the ends saturate (448 and 6).
- Zeros: a block of zeros has scale 1 and codes 0; a tensor of zeros has tensor scale 1. -0 keeps
  its sign (code 8).
- A block so much smaller than its tensor's largest element that its scale would round to zero gets
  the smallest e4m3, 2^-9, instead; its elements still find the code nearest to them.
- NaN: e2m1 has none, so a NaN makes its block's scale NaN and the whole block reads as NaN.
  An infinity saturates to 6; neither counts towards amax.
- Denormals: the subnormal code 0.5 and subnormal e4m3 scales are used.
- `code * scale` is exact in float32, so a value is rounded once, by the tensor scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant.blocks import (
    Codes,
    Packed,
    block_amax,
    divide,
    given_scale,
    pack_nibbles,
    scale_for,
    spread,
    unpack_nibbles,
)
from fulgurite.quant.format import E2M1, E4M3, Format, level
from fulgurite.quant.minifloat import decode_e2m1, encode_e2m1, saturating_cast


def encode(x: Tensor, format: Format, tensor_scale: Tensor | float | None = None) -> Codes:
    """Quantizes; with `tensor_scale` given (static activations) only block maxima are taken."""
    block_level, tensor_level = level(format, "scale"), level(format, "tensor_scale")
    x = x.float()
    if tensor_scale is None:
        tensor_amax = block_amax(x, tensor_level, keep_nan=False)
        tensor_scale = scale_for(tensor_amax, E4M3.highest * E2M1.highest)
    else:
        tensor_scale = given_scale(tensor_scale, tensor_level, x)
    amax = block_amax(x, block_level, keep_nan=True)
    wanted = (divide(amax, E2M1.highest) / tensor_scale).clamp_min(E4M3.smallest_subnormal)
    scale = saturating_cast(torch.where(amax == 0, 1.0, wanted), E4M3, block_level.dtype)
    effective = spread(scale.float() * tensor_scale, block_level.block, x.shape)
    return Codes(encode_e2m1(x / effective), {"scale": scale, "tensor_scale": tensor_scale})


def decode(codes: Codes, format: Format) -> Tensor:
    """The float32 tensor the codes stand for."""
    block_level = level(format, "scale")
    values = decode_e2m1(codes.codes)
    values *= spread(codes.scales["scale"].float(), block_level.block, values.shape)
    return values * codes.scales["tensor_scale"]


def pack(codes: Codes, format: Format) -> Packed:
    """Two codes a byte along K, low nibble first."""
    return Packed(pack_nibbles(codes.codes), codes.scales)


def unpack(packed: Packed, format: Format) -> Codes:
    """The inverse of `pack`."""
    return Codes(unpack_nibbles(packed.data), packed.scales)
