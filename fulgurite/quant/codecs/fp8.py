"""FP8: 8-bit floats e4m3 or e5m2 with float32 scales per tensor, row, 1x128 or 128x128 block.

    scale = amax(block) / max_value      code = e4m3(x / scale)        value = code * scale

In: a float tensor. Out: float8 codes of the same shape, and one float32 scale per block.

- Rounding: nearest even, once, on the float32 quotient. Out-of-range values saturate (448, 57344).
- Zeros: a block of zeros has scale 1 and codes 0. -0 keeps its sign.
- NaN becomes the NaN code of its element and does not affect its neighbours. An infinity saturates.
  Neither counts towards amax.
- Subnormal codes are used (down to 2^-9, 2^-16). A scale is at least 2^-126.
- A 128-wide block may be partial at the end of a row or column, as in DeepSeek-V3 checkpoints.
- `value` is one float32 product, so it is rounded once. float64 inputs are rounded to float32
  first.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.quant.codecs.blocks import (
    Codes,
    PackedData,
    block_amax,
    check_static_scale,
    compute_scale,
    expand_blocks,
)
from fulgurite.quant.codecs.minifloat import saturating_cast
from fulgurite.quant.format import Format


def quantize(x: Tensor, format: Format, scale: Tensor | float | None = None) -> Codes:
    """Quantize. With a static `scale` no amax is computed."""
    (spec,) = format.scales
    x = x.float()
    if scale is None:
        scale = compute_scale(block_amax(x, spec, keep_nan=False), format.element.max_value)
    else:
        scale = check_static_scale(scale, spec, x)
    scaled = x / expand_blocks(scale, spec.block, x.shape)
    return Codes(saturating_cast(scaled, format.element, format.data_dtype), {"scale": scale})


def dequantize(codes: Codes, format: Format) -> Tensor:
    """Dequantize to float32."""
    (spec,) = format.scales
    values = codes.codes.float()
    return values * expand_blocks(codes.scales["scale"], spec.block, values.shape)


def pack(codes: Codes, format: Format) -> PackedData:
    """The codes are already packed: one byte per element."""
    return PackedData(codes.codes, codes.scales)


def unpack(packed: PackedData, format: Format) -> Codes:
    """The inverse of `pack`."""
    return Codes(packed.data, packed.scales)
