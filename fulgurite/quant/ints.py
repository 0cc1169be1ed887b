"""INT8 per row or in groups of 16 or 32, INT4 in groups of 32, 64 or 128 along K, with float32 scales.

    int8         scale = amax / 127              code = round(x / scale) in [-127, 127]
    int4         scale = amax / 7.5              code = round(x / scale) in [-8, 7]
    int4 asym    scale = (high - low) / 15       zero_point = round(-low / scale) in [0, 15]
                                                 code = round(x / scale) + zero_point in [0, 15]
    int4 min     scale = (high - low) / 15       minimum = low
                                                 code = round((x - low) / scale) in [0, 15]
    value        code * scale, (code - zero_point) * scale, or code * scale + minimum

In: a float tensor; its K is a multiple of the group. Out: int8 codes, or nibbles (signed codes are
stored plus 8), scales, zero points and minima, one a row or group. `int4_g32_min`, `int8_g16` and
`int8_g32` hold what GGUF's blocks hold, exactly (`regroup.py`).

- 7.5 spreads symmetric INT4 over all sixteen codes with no error over half a step: an element of
  magnitude amax rounds to -8 or saturates at 7. low and high are widened to reach zero, so that
  zero is exact in every variant but the one with a minimum.
- Rounding: nearest even; codes saturate.
- Zeros: a row or group of zeros has scale 1, codes 0 and zero point 0. The sign of -0 is lost.
- NaN: integers have none, so a NaN makes the scale of its row or group NaN, which reads as NaN.
  An infinity saturates; neither counts towards amax, low or high.
- Denormals: float32 subnormals are honoured until the scale reaches 2^-126, its least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant.blocks import (
    SMALLEST_SCALE,
    Codes,
    Packed,
    block_amax,
    block_range,
    divide,
    given_scale,
    pack_nibbles,
    scale_for,
    spread,
    unpack_nibbles,
)
from fulgurite.quant.format import INT4, Format, level

INT4_SPAN = 7.5
INT4_OFFSET = 8


def encode(x: Tensor, format: Format, scale: Tensor | float | None = None) -> Codes:
    """Quantizes; `scale` may be given for the symmetric formats."""
    x = x.float()
    if len(format.scales) == 2:
        return _encode_asymmetric(x, format)
    (only,) = format.scales
    if scale is None:
        span = INT4_SPAN if format.element is INT4 else format.element.highest  # 127 of int8
        scale = scale_for(block_amax(x, only, keep_nan=True), span)
    else:
        scale = given_scale(scale, only, x)
    steps = x / spread(scale, only.block, x.shape)
    return Codes(whole_codes(steps, format), {"scale": scale})


def _encode_asymmetric(x: Tensor, format: Format) -> Codes:
    scale_level = level(format, "scale")
    low, high = block_range(x, scale_level)
    highest = format.element.highest
    # Divided before the difference, which could overflow.
    step = (divide(high, highest) - divide(low, highest)).clamp_min(SMALLEST_SCALE)
    scale = torch.where((low == 0) & (high == 0), 1.0, step)
    block = scale_level.block
    if _has(format, "minimum"):
        steps = (x - spread(low, block, x.shape)) / spread(scale, block, x.shape)
        return Codes(_round(steps, format).to(torch.uint8), {"scale": scale, "minimum": low})
    zero = (-low / scale).round().clamp(0, highest).nan_to_num(nan=0.0)
    steps = (x / spread(scale, block, x.shape)).round() + spread(zero, block, x.shape)
    codes = _round(steps, format).to(torch.uint8)
    return Codes(codes, {"scale": scale, "zero_point": zero.to(torch.uint8)})


def whole_codes(steps: Tensor, format: Format) -> Tensor:
    """Signed codes of x over its scale."""
    return _round(steps, format).to(torch.int8)


def _round(steps: Tensor, format: Format) -> Tensor:
    return steps.round().clamp(format.element.lowest, format.element.highest).nan_to_num(nan=0.0)


def _has(format: Format, name: str) -> bool:
    return any(scale.name == name for scale in format.scales)


def decode(codes: Codes, format: Format) -> Tensor:
    """The float32 tensor the codes stand for."""
    block = level(format, "scale").block
    values = codes.codes.float()
    if _has(format, "zero_point"):
        values -= spread(codes.scales["zero_point"], block, values.shape)
    values = values * spread(codes.scales["scale"], block, values.shape)
    if _has(format, "minimum"):
        values += spread(codes.scales["minimum"], block, values.shape)
    return values


def pack(codes: Codes, format: Format) -> Packed:
    """INT8: bytes already. INT4: two a byte along K, low nibble first, signed codes plus 8."""
    if format.element.bits == 8:
        return Packed(codes.codes, codes.scales)
    offset = INT4_OFFSET if format.element is INT4 else 0
    return Packed(pack_nibbles(codes.codes + offset), codes.scales)


def unpack(packed: Packed, format: Format) -> Codes:
    """The inverse of `pack`."""
    if format.element.bits == 8:
        return Codes(packed.data, packed.scales)
    nibbles = unpack_nibbles(packed.data)
    if format.element is not INT4:
        return Codes(nibbles, packed.scales)
    return Codes(nibbles.to(torch.int8) - INT4_OFFSET, packed.scales)
