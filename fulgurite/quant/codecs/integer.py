"""INT8 per row or in groups of 16 or 32, and INT4 in groups of 32, 64 or 128 along K, with float32
scales.

    int8         scale = amax / 127              code = round(x / scale) in [-127, 127]
    int8 asym    scale = (high - low) / 255      zero_point = round(-low / scale) - 128
                                                 code = round(x / scale) + zero_point in [-128, 127]
    int4         scale = amax / 7.5              code = round(x / scale) in [-8, 7]
    int4 asym    scale = (high - low) / 15       zero_point = round(-low / scale) in [0, 15]
                                                 code = round(x / scale) + zero_point in [0, 15]
    int4 min     scale = (high - low) / 15       minimum = low
                                                 code = round((x - low) / scale) in [0, 15]
    value        code * scale, (code - zero_point) * scale, or code * scale + minimum

In: a float tensor; its K is a multiple of the group. Out: int8 codes, or nibbles (signed codes are
stored plus 8), with scales, zero points and minima per row or group. `int4_g32_min`, `int8_g16` and
`int8_g32` represent GGUF blocks exactly (`repack.py`).

- 7.5 uses all sixteen codes of symmetric INT4 with an error of at most half a step: an element of
  magnitude amax rounds to -8 or saturates at 7. low and high are widened to include zero, so zero
  is exact in every variant except the one with a minimum.
- Rounding: nearest even; codes saturate.
- Zeros: a row or group of zeros has scale 1, codes 0 and zero point 0 (int8 asym: both -128). The
  sign of -0 is lost.
- NaN: integers have none, so a NaN makes the scale of its row or group NaN, which dequantizes to
  NaN. An infinity saturates. Neither counts towards amax, low or high.
- float32 subnormals are quantized exactly until the scale reaches its minimum, 2^-126.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant.codecs.blocks import (
    MIN_SCALE,
    Codes,
    PackedData,
    block_amax,
    block_min_max,
    check_static_scale,
    compute_scale,
    divide,
    expand_blocks,
    pack_nibbles,
    unpack_nibbles,
)
from fulgurite.quant.format import INT4, Format, get_scale_spec

INT4_MAX_STEPS = 7.5
INT4_OFFSET = 8


def quantize(x: Tensor, format: Format, scale: Tensor | float | None = None) -> Codes:
    """Quantize. The symmetric formats accept a static `scale`."""
    x = x.float()
    if len(format.scales) == 2:
        return _quantize_asymmetric(x, format)
    (spec,) = format.scales
    if scale is None:
        max_value = (
            INT4_MAX_STEPS if format.element is INT4 else format.element.max_value
        )  # 127 of int8
        scale = compute_scale(block_amax(x, spec, keep_nan=True), max_value)
    else:
        scale = check_static_scale(scale, spec, x)
    steps = x / expand_blocks(scale, spec.block, x.shape)
    return Codes(round_to_codes(steps, format), {"scale": scale})


def _quantize_asymmetric(x: Tensor, format: Format) -> Codes:
    scale_spec = get_scale_spec(format, "scale")
    low, high = block_min_max(x, scale_spec)
    lowest, highest = format.element.min_value, format.element.max_value
    intervals = highest - lowest
    # Divide before subtracting: the difference could overflow.
    step = (divide(high, intervals) - divide(low, intervals)).clamp_min(MIN_SCALE)
    scale = torch.where((low == 0) & (high == 0), 1.0, step)
    block = scale_spec.block
    if _has_scale(format, "minimum"):
        steps = (x - expand_blocks(low, block, x.shape)) / expand_blocks(scale, block, x.shape)
        return Codes(
            _round_and_clamp(steps, format).to(torch.uint8), {"scale": scale, "minimum": low}
        )
    zero = ((-low / scale).round() + lowest).clamp(lowest, highest).nan_to_num(nan=0.0)
    steps = (x / expand_blocks(scale, block, x.shape)).round() + expand_blocks(zero, block, x.shape)
    dtype = get_scale_spec(format, "zero_point").dtype
    codes = _round_and_clamp(steps, format).to(dtype)
    return Codes(codes, {"scale": scale, "zero_point": zero.to(dtype)})


def round_to_codes(steps: Tensor, format: Format) -> Tensor:
    """Round x / scale to signed codes."""
    return _round_and_clamp(steps, format).to(torch.int8)


def _round_and_clamp(steps: Tensor, format: Format) -> Tensor:
    return (
        steps.round().clamp(format.element.min_value, format.element.max_value).nan_to_num(nan=0.0)
    )


def _has_scale(format: Format, name: str) -> bool:
    return any(scale.name == name for scale in format.scales)


def dequantize(codes: Codes, format: Format) -> Tensor:
    """Dequantize to float32."""
    block = get_scale_spec(format, "scale").block
    values = codes.codes.float()
    if _has_scale(format, "zero_point"):
        values -= expand_blocks(codes.scales["zero_point"], block, values.shape)
    values = values * expand_blocks(codes.scales["scale"], block, values.shape)
    if _has_scale(format, "minimum"):
        values += expand_blocks(codes.scales["minimum"], block, values.shape)
    return values


def pack(codes: Codes, format: Format) -> PackedData:
    """INT8: already bytes. INT4: two per byte along K, low nibble first, signed codes plus 8."""
    if format.element.bits == 8:
        return PackedData(codes.codes, codes.scales)
    offset = INT4_OFFSET if format.element is INT4 else 0
    return PackedData(pack_nibbles(codes.codes + offset), codes.scales)


def unpack(packed: PackedData, format: Format) -> Codes:
    """The inverse of `pack`."""
    if format.element.bits == 8:
        return Codes(packed.data, packed.scales)
    nibbles = unpack_nibbles(packed.data)
    if format.element is not INT4:
        return Codes(nibbles, packed.scales)
    return Codes(nibbles.to(torch.int8) - INT4_OFFSET, packed.scales)
