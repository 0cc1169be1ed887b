"""GGUF blocks Q4_0, Q4_1, Q8_0, Q4_K and Q6_K: the bytes of a .gguf file, and their values.

    q4_0   d * q          q in [-8, 7]         q4_k   (d * sub_scale) * q - dmin * sub_minimum
    q4_1   d * q + m      q in [0, 15]         q6_k   (d * sub_scale) * q
    q8_0   d * q          q in [-128, 127]

In: float tensors whose K is a multiple of 32 (256 for K-quants), or uint8 rows of a file. Out:
uint8 rows [..., K / block * bytes per block], identical to the file's; or codes and scales.

Values are computed in float32 in the order above, so they are bit-identical to llama.cpp's. The
scales d, m and dmin are float16. The sub-scales of K-quants are 6-bit or int8.

Quantizing to Q4_0, Q4_1 and Q8_0 produces the same bytes as llama.cpp for finite input:
- Rounding: Q4_0 and Q4_1 add 0.5 and truncate; Q8_0 rounds halves away from zero. Both use x times
  the float32 reciprocal of the scale, before the scale is rounded to float16. Codes saturate.
- Zeros: a block of zeros has d = 0 and value 0. A block too small for a float16 scale dequantizes
  to 0.
- Beyond llama.cpp: a scale above 65504 saturates. A NaN makes d NaN, so its block dequantizes to
  NaN. An infinity saturates and does not count towards the scale.
- float16 subnormal scales are used.
K-quants are quantized by `gguf_kquants.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulgurite.quant.codecs.blocks import Codes, PackedData, divide, expand_blocks, unflatten_last
from fulgurite.quant.codecs.gguf_kquants import quantize_q4_k, quantize_q6_k
from fulgurite.quant.format import Format, get_scale_spec

F16_MAX = 65504.0


def quantize(x: Tensor, format: Format) -> Codes:
    """Quantize to codes [..., K] and scales [..., K / block of the scale]."""
    blocks = unflatten_last(x.float(), x.shape[-1] // format.block[1], format.block[1])
    codes, scales = _QUANTIZERS[format.name](blocks)
    return Codes(codes.flatten(-2), {name: scale.flatten(-2) for name, scale in scales.items()})


def dequantize(codes: Codes, format: Format) -> Tensor:
    """Dequantize to float32."""
    values = codes.codes.float()

    def expand(name: str) -> Tensor:
        return expand_blocks(
            codes.scales[name].float(), get_scale_spec(format, name).block, values.shape
        )

    if format.name == "q4_k":
        return expand("scale") * expand("sub_scale") * values - (
            expand("minimum_scale") * expand("sub_minimum")
        )
    if format.name == "q6_k":
        return expand("scale") * expand("sub_scale") * values
    scaled = expand("scale") * values
    return scaled + expand("minimum") if format.name == "q4_1" else scaled


def pack(codes: Codes, format: Format) -> PackedData:
    """Pack into the bytes of a file."""
    count = codes.codes.shape[-1] // format.block[1]
    blocks = unflatten_last(codes.codes, count, format.block[1])
    scales = {
        name: unflatten_last(scale, count, format.block[1] // get_scale_spec(format, name).block[1])
        for name, scale in codes.scales.items()
    }
    return PackedData(torch.cat(_PACKERS[format.name](blocks, scales), dim=-1).flatten(-2), {})


def unpack(packed: PackedData, format: Format) -> Codes:
    """Unpack the bytes of a file into codes and scales."""
    size = format.items_per_pack
    blocks = unflatten_last(packed.data, packed.data.shape[-1] // size, size)
    codes, scales = _UNPACKERS[format.name](blocks)
    return Codes(codes.flatten(-2), {name: scale.flatten(-2) for name, scale in scales.items()})


BlockFields = tuple[Tensor, dict[str, Tensor]]
"""Codes [..., blocks, width] and scales [..., blocks, scales per block]."""


def _zero_infinities(blocks: Tensor) -> Tensor:
    return blocks.masked_fill(blocks.abs() == float("inf"), 0.0)


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _quantize_q4_0(blocks: Tensor) -> BlockFields:
    finite = _zero_infinities(blocks)
    # The element of largest magnitude, with its sign, becomes code -8. argmax picks a NaN first.
    largest = finite.gather(-1, finite.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).clamp(-F16_MAX, F16_MAX)
    steps = (blocks * _reciprocal(scale) + 8.5).nan_to_num(nan=8.0).clamp(0, 15.5)
    return steps.trunc().to(torch.int8) - 8, {"scale": scale.half()}


def _quantize_q4_1(blocks: Tensor) -> BlockFields:
    finite = _zero_infinities(blocks)
    low, high = finite.amin(-1, keepdim=True), finite.amax(-1, keepdim=True)
    scale = divide(high - low, 15).clamp_max(F16_MAX)
    low = low.clamp(-F16_MAX, F16_MAX)
    steps = ((blocks - low) * _reciprocal(scale) + 0.5).nan_to_num(nan=0.0).clamp(0, 15.5)
    return steps.trunc().to(torch.uint8), {"scale": scale.half(), "minimum": low.half()}


def _quantize_q8_0(blocks: Tensor) -> BlockFields:
    scale = divide(_zero_infinities(blocks).abs().amax(-1, keepdim=True), 127).clamp_max(F16_MAX)
    steps = (blocks * _reciprocal(scale)).nan_to_num(nan=0.0).clamp(-127, 127)
    floor = steps.abs().floor()
    rounded = floor + (2 * (steps.abs() - floor)).floor()
    return (steps.sign() * rounded).to(torch.int8), {"scale": scale.half()}


_QUANTIZERS: dict[str, Callable[[Tensor], BlockFields]] = {
    "q4_0": _quantize_q4_0,
    "q4_1": _quantize_q4_1,
    "q8_0": _quantize_q8_0,
    "q4_k": quantize_q4_k,
    "q6_k": quantize_q6_k,
}


def _view_as_bytes(field: Tensor) -> Tensor:
    """View [..., n] of any dtype as bytes [..., n * itemsize]."""
    return field.contiguous().view(torch.uint8)


def _read_float16(blocks: Tensor, start: int) -> Tensor:
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _pack_split_nibbles(codes: Tensor, width: int) -> Tensor:
    """Pack runs of 2 * width codes: the first half in low nibbles, the second half in high ones."""
    runs = unflatten_last(codes.to(torch.uint8), codes.shape[-1] // (2 * width), 2, width)
    return (runs[..., 0, :] | (runs[..., 1, :] << 4)).flatten(-2)


def _unpack_split_nibbles(data: Tensor, width: int) -> Tensor:
    runs = unflatten_last(data, data.shape[-1] // width, width)
    return torch.stack((runs & 0xF, runs >> 4), dim=-2).flatten(-3)


def _pack_q4_0(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    return [_view_as_bytes(scales["scale"]), _pack_split_nibbles(codes + 8, 16)]


def _unpack_q4_0(blocks: Tensor) -> BlockFields:
    codes = _unpack_split_nibbles(blocks[..., 2:], 16).to(torch.int8) - 8
    return codes, {"scale": _read_float16(blocks, 0)}


def _pack_q4_1(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    return [
        _view_as_bytes(scales["scale"]),
        _view_as_bytes(scales["minimum"]),
        _pack_split_nibbles(codes, 16),
    ]


def _unpack_q4_1(blocks: Tensor) -> BlockFields:
    fields = {"scale": _read_float16(blocks, 0), "minimum": _read_float16(blocks, 2)}
    return _unpack_split_nibbles(blocks[..., 4:], 16), fields


def _pack_q8_0(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    return [_view_as_bytes(scales["scale"]), _view_as_bytes(codes)]


def _unpack_q8_0(blocks: Tensor) -> BlockFields:
    return blocks[..., 2:].contiguous().view(torch.int8), {"scale": _read_float16(blocks, 0)}


def _pack_q4_k(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    """Eight 6-bit pairs in 12 bytes. The first four pairs' bytes also hold upper bits of the last
    four.
    """
    scale, minimum = scales["sub_scale"], scales["sub_minimum"]
    first = scale[..., :4] | (scale[..., 4:] >> 4 << 6)
    second = minimum[..., :4] | (minimum[..., 4:] >> 4 << 6)
    third = (scale[..., 4:] & 0xF) | ((minimum[..., 4:] & 0xF) << 4)
    head = [_view_as_bytes(scales["scale"]), _view_as_bytes(scales["minimum_scale"])]
    return [*head, first, second, third, _pack_split_nibbles(codes, 32)]


def _unpack_q4_k(blocks: Tensor) -> BlockFields:
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    fields = {
        "scale": _read_float16(blocks, 0),
        "minimum_scale": _read_float16(blocks, 2),
        "sub_scale": torch.cat((first & 63, (third & 0xF) | (first >> 6 << 4)), dim=-1),
        "sub_minimum": torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1),
    }
    return _unpack_split_nibbles(blocks[..., 16:], 32), fields


def _pack_q6_k(codes: Tensor, scales: dict[str, Tensor]) -> list[Tensor]:
    """Lower four bits as nibbles, 64 bytes per half block; upper two bits of four runs of 32 per
    byte.
    """
    unsigned = (codes + 32).to(torch.uint8)
    quarters = unflatten_last(unsigned >> 4, 2, 4, 32)
    upper = quarters[..., 0, :]
    for index in (1, 2, 3):
        upper = upper | (quarters[..., index, :] << (2 * index))
    low = _pack_split_nibbles(unsigned & 0xF, 64)
    return [
        low,
        upper.flatten(-2),
        _view_as_bytes(scales["sub_scale"]),
        _view_as_bytes(scales["scale"]),
    ]


def _unpack_q6_k(blocks: Tensor) -> BlockFields:
    low = _unpack_split_nibbles(blocks[..., :128], 64)
    packed = unflatten_last(blocks[..., 128:192], 2, 32)
    upper = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)
    codes = (low | (upper << 4)).to(torch.int8) - 32
    sub_scale = blocks[..., 192:208].contiguous().view(torch.int8)
    return codes, {"scale": _read_float16(blocks, 208), "sub_scale": sub_scale}


_PACKERS: dict[str, Callable[[Tensor, dict[str, Tensor]], list[Tensor]]] = {
    "q4_0": _pack_q4_0,
    "q4_1": _pack_q4_1,
    "q8_0": _pack_q8_0,
    "q4_k": _pack_q4_k,
    "q6_k": _pack_q6_k,
}
_UNPACKERS: dict[str, Callable[[Tensor], BlockFields]] = {
    "q4_0": _unpack_q4_0,
    "q4_1": _unpack_q4_1,
    "q8_0": _unpack_q8_0,
    "q4_k": _unpack_q4_k,
    "q6_k": _unpack_q6_k,
}
