"""GGUF blocks Q4_0, Q4_1, Q8_0, Q4_K and Q6_K: the bytes of a .gguf file, and what they stand for.

    q4_0   d * q          q in [-8, 7]         q4_k   (d * sub_scale) * q - dmin * sub_minimum
    q4_1   d * q + m      q in [0, 15]         q6_k   (d * sub_scale) * q
    q8_0   d * q          q in [-128, 127]

In: float tensors whose K is a multiple of 32 (256 for the K formats), or uint8 rows of a file. Out:
uint8 rows [..., K / block * bytes a block], identical to the file's; unpacked, codes and scales.

Values are computed in float32 in the order written above, which makes them bit-identical to the
reference decoder. The scales d, m and dmin are float16, the K formats' sub-scales 6-bit or int8.

Quantizing Q4_0, Q4_1 and Q8_0 gives the reference quantizer's bytes for finite input:
- Rounding: Q4_0 and Q4_1 add a half and cut, Q8_0 rounds halves away from zero; both on x times
  the float32 reciprocal of the scale, before that is rounded to float16. Codes saturate.
- Zeros: a block of zeros has d = 0 and value 0. A block too small for a float16 scale reads as 0.
- Beyond the reference: a scale over 65504 saturates there; a NaN makes d NaN, so its block reads as
  NaN; an infinity saturates and does not count towards the scale.
- Denormals: float16 subnormal scales are used.
The K formats are quantized by `gguf_search.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulgurite.quant.blocks import Codes, Packed, divide, split_last, spread
from fulgurite.quant.format import Format, level
from fulgurite.quant.gguf_search import fit_q4_k, fit_q6_k

F16_LARGEST = 65504.0


def encode(x: Tensor, format: Format) -> Codes:
    """Quantizes to codes [..., K] and scales [..., K / their block]."""
    blocks = split_last(x.float(), x.shape[-1] // format.block[1], format.block[1])
    codes, scales = _ENCODERS[format.name](blocks)
    return Codes(codes.flatten(-2), {name: scale.flatten(-2) for name, scale in scales.items()})


def decode(codes: Codes, format: Format) -> Tensor:
    """The float32 tensor the codes stand for."""
    values = codes.codes.float()

    def full(name: str) -> Tensor:
        return spread(codes.scales[name].float(), level(format, name).block, values.shape)

    if format.name == "q4_k":
        return full("scale") * full("sub_scale") * values - (
            full("minimum_scale") * full("sub_minimum")
        )
    if format.name == "q6_k":
        return full("scale") * full("sub_scale") * values
    scaled = full("scale") * values
    return scaled + full("minimum") if format.name == "q4_1" else scaled


def pack(codes: Codes, format: Format) -> Packed:
    """The bytes of the file."""
    count = codes.codes.shape[-1] // format.block[1]
    blocks = split_last(codes.codes, count, format.block[1])
    scales = {
        name: split_last(scale, count, format.block[1] // level(format, name).block[1])
        for name, scale in codes.scales.items()
    }
    return Packed(torch.cat(_PACKERS[format.name](blocks, scales), dim=-1).flatten(-2), {})


def unpack(packed: Packed, format: Format) -> Codes:
    """Codes and scales of the file's bytes."""
    size = format.items_per_group
    blocks = split_last(packed.data, packed.data.shape[-1] // size, size)
    codes, scales = _UNPACKERS[format.name](blocks)
    return Codes(codes.flatten(-2), {name: scale.flatten(-2) for name, scale in scales.items()})


Fields = tuple[Tensor, dict[str, Tensor]]
"""Codes [..., blocks, width] and scales [..., blocks, scales a block]."""


def _finite(blocks: Tensor) -> Tensor:
    return blocks.masked_fill(blocks.abs() == float("inf"), 0.0)


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _encode_q4_0(blocks: Tensor) -> Fields:
    finite = _finite(blocks)
    # The element of largest magnitude, with its sign, becomes code -8. A NaN is the largest.
    largest = finite.gather(-1, finite.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).clamp(-F16_LARGEST, F16_LARGEST)
    steps = (blocks * _reciprocal(scale) + 8.5).nan_to_num(nan=8.0).clamp(0, 15.5)
    return steps.trunc().to(torch.int8) - 8, {"scale": scale.half()}


def _encode_q4_1(blocks: Tensor) -> Fields:
    finite = _finite(blocks)
    low, high = finite.amin(-1, keepdim=True), finite.amax(-1, keepdim=True)
    scale = divide(high - low, 15).clamp_max(F16_LARGEST)
    low = low.clamp(-F16_LARGEST, F16_LARGEST)
    steps = ((blocks - low) * _reciprocal(scale) + 0.5).nan_to_num(nan=0.0).clamp(0, 15.5)
    return steps.trunc().to(torch.uint8), {"scale": scale.half(), "minimum": low.half()}


def _encode_q8_0(blocks: Tensor) -> Fields:
    scale = divide(_finite(blocks).abs().amax(-1, keepdim=True), 127).clamp_max(F16_LARGEST)
    steps = (blocks * _reciprocal(scale)).nan_to_num(nan=0.0).clamp(-127, 127)
    whole = steps.abs().floor()
    rounded = whole + (2 * (steps.abs() - whole)).floor()
    return (steps.sign() * rounded).to(torch.int8), {"scale": scale.half()}


_ENCODERS: dict[str, Callable[[Tensor], Fields]] = {
    "q4_0": _encode_q4_0,
    "q4_1": _encode_q4_1,
    "q8_0": _encode_q8_0,
    "q4_k": fit_q4_k,
    "q6_k": fit_q6_k,
}


def _bytes(field: Tensor) -> Tensor:
    """[..., n] of any dtype as its bytes [..., n * itemsize]."""
    return field.contiguous().view(torch.uint8)


def _f16(blocks: Tensor, start: int) -> Tensor:
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _halves(codes: Tensor, width: int) -> Tensor:
    """Nibbles in runs of 2 * width: the run's first half low, its second half high."""
    runs = split_last(codes.to(torch.uint8), codes.shape[-1] // (2 * width), 2, width)
    return (runs[..., 0, :] | (runs[..., 1, :] << 4)).flatten(-2)


def _unhalves(data: Tensor, width: int) -> Tensor:
    runs = split_last(data, data.shape[-1] // width, width)
    return torch.stack((runs & 0xF, runs >> 4), dim=-2).flatten(-3)


def _pack_q4_0(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    return [_bytes(scales["scale"]), _halves(codes + 8, 16)]


def _unpack_q4_0(blocks: Tensor) -> Fields:
    codes = _unhalves(blocks[..., 2:], 16).to(torch.int8) - 8
    return codes, {"scale": _f16(blocks, 0)}


def _pack_q4_1(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    return [_bytes(scales["scale"]), _bytes(scales["minimum"]), _halves(codes, 16)]


def _unpack_q4_1(blocks: Tensor) -> Fields:
    fields = {"scale": _f16(blocks, 0), "minimum": _f16(blocks, 2)}
    return _unhalves(blocks[..., 4:], 16), fields


def _pack_q8_0(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    return [_bytes(scales["scale"]), _bytes(codes)]


def _unpack_q8_0(blocks: Tensor) -> Fields:
    return blocks[..., 2:].contiguous().view(torch.int8), {"scale": _f16(blocks, 0)}


def _pack_q4_k(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    """Eight 6-bit pairs in 12 bytes: the last four pairs' upper bits ride on the first four's."""
    scale, minimum = scales["sub_scale"], scales["sub_minimum"]
    first = scale[..., :4] | (scale[..., 4:] >> 4 << 6)
    second = minimum[..., :4] | (minimum[..., 4:] >> 4 << 6)
    third = (scale[..., 4:] & 0xF) | ((minimum[..., 4:] & 0xF) << 4)
    head = [_bytes(scales["scale"]), _bytes(scales["minimum_scale"])]
    return [*head, first, second, third, _halves(codes, 32)]


def _unpack_q4_k(blocks: Tensor) -> Fields:
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    fields = {
        "scale": _f16(blocks, 0),
        "minimum_scale": _f16(blocks, 2),
        "sub_scale": torch.cat((first & 63, (third & 0xF) | (first >> 6 << 4)), dim=-1),
        "sub_minimum": torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1),
    }
    return _unhalves(blocks[..., 16:], 32), fields


def _pack_q6_k(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    """Low four bits in nibbles, 64 bytes a half block; upper two in quarters of 32 elements."""
    unsigned = (codes + 32).to(torch.uint8)
    quarters = split_last(unsigned >> 4, 2, 4, 32)
    upper = quarters[..., 0, :]
    for index in (1, 2, 3):
        upper = upper | (quarters[..., index, :] << (2 * index))
    low = _halves(unsigned & 0xF, 64)
    return [low, upper.flatten(-2), _bytes(scales["sub_scale"]), _bytes(scales["scale"])]


def _unpack_q6_k(blocks: Tensor) -> Fields:
    low = _unhalves(blocks[..., :128], 64)
    packed = split_last(blocks[..., 128:192], 2, 32)
    upper = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)
    codes = (low | (upper << 4)).to(torch.int8) - 32
    sub_scale = blocks[..., 192:208].contiguous().view(torch.int8)
    return codes, {"scale": _f16(blocks, 208), "sub_scale": sub_scale}


_PACKERS: dict[str, Callable[[Tensor, dict[str, Tensor]], list[Tensor]]] = {
    "q4_0": _pack_q4_0,
    "q4_1": _pack_q4_1,
    "q8_0": _pack_q8_0,
    "q4_k": _pack_q4_k,
    "q6_k": _pack_q6_k,
}
_UNPACKERS: dict[str, Callable[[Tensor], Fields]] = {
    "q4_0": _unpack_q4_0,
    "q4_1": _unpack_q4_1,
    "q8_0": _unpack_q8_0,
    "q4_k": _unpack_q4_k,
    "q6_k": _unpack_q6_k,
}
