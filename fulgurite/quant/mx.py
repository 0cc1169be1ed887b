"""OCP Microscaling (MX): e2m1, e4m3 or e5m2 elements, a power-of-two scale each 32 elements of K.

    exponent = floor(log2(amax(block))) - emax        emax = 2 (e2m1), 8 (e4m3), 15 (e5m2)
    scale    = e8m0(exponent) = 2^exponent, exponent clamped to [-127, 127]
    code     = element(x / scale)                     value = code * scale

In: a float tensor whose K is a multiple of 32. Out: nibbles or float8 codes, e8m0 scales
[..., K / 32].

- Rounding: nearest even; elements saturate. amax itself may: its mantissa can exceed the element's
  largest (amax = 7.9 becomes 6), which is the published rule.
- Zeros: a block of zeros has the smallest scale (code 0, 2^-127) and codes 0; -0 keeps its sign.
- NaN: in MXFP8 it becomes the element's NaN; in MXFP4, which has none, the block's scale becomes
  NaN (code 255) and the block reads as NaN. An infinity saturates; neither counts towards amax.
- Denormals: subnormal codes are used. float32 subnormals in the input are honoured down to the
  smallest scale.
- `value` is exact in float32, except that scales over 2^125 (which quantizing never makes) can
  overflow to infinity.
"""

from __future__ import annotations

import math

from torch import Tensor

from fulgurite.quant.blocks import (
    Codes,
    Packed,
    block_amax,
    pack_nibbles,
    spread,
    unpack_nibbles,
)
from fulgurite.quant.format import Format
from fulgurite.quant.minifloat import (
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e8m0,
    floor_log2,
    saturating_cast,
)


def encode(x: Tensor, format: Format) -> Codes:
    """Quantizes by the published rule for the shared exponent."""
    (level,) = format.scales
    x = x.float()
    amax = block_amax(x, level, keep_nan=not format.element.has_nan)
    emax = math.floor(math.log2(format.element.highest))
    scale = encode_e8m0(floor_log2(amax) - emax)
    scaled = x / spread(decode_e8m0(scale), level.block, x.shape)
    if format.element.bits == 4:
        return Codes(encode_e2m1(scaled), {"scale": scale})
    return Codes(saturating_cast(scaled, format.element, format.data_dtype), {"scale": scale})


def decode(codes: Codes, format: Format) -> Tensor:
    """The float32 tensor the codes stand for."""
    (level,) = format.scales
    values = decode_e2m1(codes.codes) if format.element.bits == 4 else codes.codes.float()
    return values * spread(decode_e8m0(codes.scales["scale"]), level.block, values.shape)


def pack(codes: Codes, format: Format) -> Packed:
    """MXFP4: two codes a byte along K, low nibble first. MXFP8: bytes already."""
    data = pack_nibbles(codes.codes) if format.element.bits == 4 else codes.codes
    return Packed(data, codes.scales)


def unpack(packed: Packed, format: Format) -> Codes:
    """The inverse of `pack`."""
    data = unpack_nibbles(packed.data) if format.element.bits == 4 else packed.data
    return Codes(data, packed.scales)
