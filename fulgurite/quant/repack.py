"""Repacks GGUF blocks into grouped integers: the same values in the layout that GPU kernels read.

In: a `QuantTensor` in a GGUF format. Out: one in a grouped-integer format that dequantizes to
bit-identical values. Codes are in order and aligned; scales are separate tensors. A scale and its
sub-scale are multiplied into one float32 scale, which is exact.

    q4_0   int4_g32        4.5 -> 5 bits per element     q8_0   int8_g32   8.5 -> 9
    q4_1   int4_g32_min    5 -> 6                        q6_k   int8_g16   6.56 -> 10
    q4_k   int4_g32_min    4.5 -> 6
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant.codecs import codec
from fulgurite.quant.codecs.blocks import Codes, expand_blocks
from fulgurite.quant.format import Format, get_scale_spec, resolve_format
from fulgurite.quant.tensor import QuantTensor

MAX_ELEMENTS_AT_ONCE = (
    1 << 28
)  # elements of a stack of experts: their codes take a byte each, several times

REPACKED_FORMAT = {
    "q4_0": "int4_g32",
    "q4_1": "int4_g32_min",
    "q8_0": "int8_g32",
    "q4_k": "int4_g32_min",
    "q6_k": "int8_g16",
}


def repack_gguf(weight: QuantTensor) -> QuantTensor:
    """Repack a GGUF weight; a weight in another format is returned unchanged."""
    if weight.format.name not in REPACKED_FORMAT:
        return weight
    if weight.dim() == 3 and len(weight) > 1 and weight.numel() > MAX_ELEMENTS_AT_ONCE:
        return _repack_in_chunks(weight)
    entry = resolve_format(REPACKED_FORMAT[weight.format.name])
    codes = weight.unpack()
    scale = _combine_scales(codes, weight.format, entry, "scale", "sub_scale")
    scales = {"scale": scale}
    if weight.format.name == "q4_k":
        low = _combine_scales(codes, weight.format, entry, "minimum_scale", "sub_minimum")
        scales["minimum"] = -low
    elif "minimum" in codes.scales:
        scales["minimum"] = codes.scales["minimum"].float()
    # GGUF allows a zero scale over any codes. Here checks.py rejects it, so zero the codes.
    zero_scale = expand_blocks(scale == 0, entry.block, codes.codes.shape)
    packed = codec.pack(Codes(codes.codes.masked_fill(zero_scale, 0), scales), entry)
    return QuantTensor(entry, packed.data, packed.scales, weight.dtype)


def _repack_in_chunks(weight: QuantTensor) -> QuantTensor:
    """Repack a stack of matrices, some at a time."""
    step = max(1, MAX_ELEMENTS_AT_ONCE * len(weight) // weight.numel())
    parts = [repack_gguf(weight[start : start + step]) for start in range(0, len(weight), step)]
    scales = {name: torch.cat([part.scales[name] for part in parts]) for name in parts[0].scales}
    packed = torch.cat([part.packed for part in parts])
    return QuantTensor(parts[0].format, packed, scales, weight.dtype)


def _combine_scales(codes: Codes, format: Format, entry: Format, outer: str, inner: str) -> Tensor:
    """Scales times their sub-scales, if the format has any, as float32."""
    scale = codes.scales[outer].float()
    if inner not in codes.scales:
        return scale
    sub_scale = codes.scales[inner].float()
    ratio = get_scale_spec(format, outer).block[1] // entry.block[1]
    return expand_blocks(scale, (1, ratio), sub_scale.shape) * sub_scale
