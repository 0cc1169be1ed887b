"""FP8: 8-bit floats e4m3 or e5m2 with float32 scales per tensor, row, 1x128 or 128x128 block.

    scale = amax(block) / largest        code = e4m3(x / scale)        value = code * scale

In: a float tensor. Out: float8 codes of the same shape and float32 scales, one a block.

- Rounding: nearest even, once, on the float32 quotient; the ends saturate (448, 57344).
- Zeros: a block of zeros has scale 1 and codes 0; -0 keeps its sign.
- NaN becomes the NaN code of its element and does not touch its neighbours; an infinity saturates;
  neither counts towards amax.
- Denormals: subnormal codes are used (down to 2^-9, 2^-16). A scale is at least 2^-126.
- A 128-wide block may be partial at the end of a row or column, as DeepSeek-V3 publishes them.
- `value` is one float32 product, so it is rounded once. float64 input is rounded to float32 first.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.quant.blocks import (
    Codes,
    Packed,
    block_amax,
    given_scale,
    scale_for,
    spread,
)
from fulgurite.quant.format import Format
from fulgurite.quant.minifloat import saturating_cast


def encode(x: Tensor, format: Format, scale: Tensor | float | None = None) -> Codes:
    """Quantizes; with `scale` given (static activations) amax is not looked at."""
    (level,) = format.scales
    x = x.float()
    if scale is None:
        scale = scale_for(block_amax(x, level, keep_nan=False), format.element.highest)
    else:
        scale = given_scale(scale, level, x)
    scaled = x / spread(scale, level.block, x.shape)
    return Codes(saturating_cast(scaled, format.element, format.data_dtype), {"scale": scale})


def decode(codes: Codes, format: Format) -> Tensor:
    """The float32 tensor the codes stand for."""
    (level,) = format.scales
    values = codes.codes.float()
    return values * spread(codes.scales["scale"], level.block, values.shape)


def pack(codes: Codes, format: Format) -> Packed:
    """A byte an element already is the packed form."""
    return Packed(codes.codes, codes.scales)


def unpack(packed: Packed, format: Format) -> Codes:
    """The inverse of `pack`."""
    return Codes(packed.data, packed.scales)
