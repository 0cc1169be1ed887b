"""OCP Microscaling (MX): e2m1, e4m3 or e5m2 elements with one power-of-two scale per 32 elements of
K.

    exponent = floor(log2(amax(block))) - emax        emax = 2 (e2m1), 8 (e4m3), 15 (e5m2)
    scale    = e8m0(exponent) = 2^exponent, exponent clamped to [-127, 127]
    code     = element(x / scale)                     value = code * scale

In: a float tensor whose K is a multiple of 32. Out: nibbles or float8 codes, e8m0 scales
[..., K / 32].

- Rounding: nearest even; elements saturate. Even amax may saturate, because its mantissa can exceed
  the largest element (amax = 7.9 becomes 6). This is the rule of the OCP specification.
- Zeros: a block of zeros has the smallest scale (code 0, 2^-127) and codes 0. -0 keeps its sign.
- NaN: in MXFP8 it becomes the element's NaN. MXFP4 has none, so the block's scale becomes NaN (code
  255) and the block dequantizes to NaN. An infinity saturates. Neither counts towards amax.
- Subnormal codes are used. float32 subnormals in the input are quantized down to the smallest
  scale.
- `value` is exact in float32, except that scales above 2^125 (which quantizing never produces) can
  overflow to infinity.
"""

from __future__ import annotations

import math

from torch import Tensor

from fulgurite.quant.codecs.blocks import (
    Codes,
    PackedData,
    block_amax,
    expand_blocks,
    pack_nibbles,
    unpack_nibbles,
)
from fulgurite.quant.codecs.minifloat import (
    dequantize_e2m1,
    dequantize_e8m0,
    floor_log2,
    quantize_e2m1,
    quantize_e8m0,
    saturating_cast,
)
from fulgurite.quant.format import Format


def quantize(x: Tensor, format: Format) -> Codes:
    """Quantize by the OCP rule for the shared exponent."""
    (spec,) = format.scales
    x = x.float()
    amax = block_amax(x, spec, keep_nan=not format.element.has_nan)
    emax = math.floor(math.log2(format.element.max_value))
    scale = quantize_e8m0(floor_log2(amax) - emax)
    scaled = x / expand_blocks(dequantize_e8m0(scale), spec.block, x.shape)
    if format.element.bits == 4:
        return Codes(quantize_e2m1(scaled), {"scale": scale})
    return Codes(saturating_cast(scaled, format.element, format.data_dtype), {"scale": scale})


def dequantize(codes: Codes, format: Format) -> Tensor:
    """Dequantize to float32."""
    (spec,) = format.scales
    values = dequantize_e2m1(codes.codes) if format.element.bits == 4 else codes.codes.float()
    return values * expand_blocks(dequantize_e8m0(codes.scales["scale"]), spec.block, values.shape)


def pack(codes: Codes, format: Format) -> PackedData:
    """MXFP4: two codes per byte along K, low nibble first. MXFP8: already bytes."""
    data = pack_nibbles(codes.codes) if format.element.bits == 4 else codes.codes
    return PackedData(data, codes.scales)


def unpack(packed: PackedData, format: Format) -> Codes:
    """The inverse of `pack`."""
    data = unpack_nibbles(packed.data) if format.element.bits == 4 else packed.data
    return Codes(data, packed.scales)
