"""GGUF's blocks as groups of integers: the same numbers in the layout that a GPU's kernels read.

In: a `QuantTensor` as a GGUF file has it. Out: one in a format of integers in groups, equal to the last
bit when dequantized: codes in order and aligned, scales beside them, products of two levels multiplied
out (they fit float32).

    q4_0   int4_g32        4.5 bits an element become 5       q8_0   int8_g32   8.5 become 9
    q4_1   int4_g32_min    5 become 6                         q6_k   int8_g16   6.56 become 10
    q4_k   int4_g32_min    4.5 become 6
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant import codec
from fulgurite.quant.blocks import Codes, spread
from fulgurite.quant.format import Format, level, resolve
from fulgurite.quant.tensor import QuantTensor

AT_ONCE = 1 << 28  # elements of a stack of experts: their codes take a byte each, several times

GROUPED = {
    "q4_0": "int4_g32",
    "q4_1": "int4_g32_min",
    "q8_0": "int8_g32",
    "q4_k": "int4_g32_min",
    "q6_k": "int8_g16",
}


def regroup(weight: QuantTensor) -> QuantTensor:
    """The weight in groups, or itself where its format has no blocks of GGUF."""
    if weight.format.name not in GROUPED:
        return weight
    if weight.dim() == 3 and len(weight) > 1 and weight.numel() > AT_ONCE:
        return _in_parts(weight)
    entry = resolve(GROUPED[weight.format.name])
    codes = weight.codes()
    scale = _multiplied(codes, weight.format, entry, "scale", "sub_scale")
    scales = {"scale": scale}
    if weight.format.name == "q4_k":
        low = _multiplied(codes, weight.format, entry, "minimum_scale", "sub_minimum")
        scales["minimum"] = -low
    elif "minimum" in codes.scales:
        scales["minimum"] = codes.scales["minimum"].float()
    # GGUF has scales of zero over any codes; here a zero scale with codes is damage (checks.py)
    idle = spread(scale == 0, entry.block, codes.codes.shape)
    packed = codec.pack(Codes(codes.codes.masked_fill(idle, 0), scales), entry)
    return QuantTensor(entry, packed.data, packed.scales, weight.dtype)


def _in_parts(weight: QuantTensor) -> QuantTensor:
    """A stack, a few matrices after the other."""
    few = max(1, AT_ONCE * len(weight) // weight.numel())
    parts = [regroup(weight[start : start + few]) for start in range(0, len(weight), few)]
    scales = {name: torch.cat([one.scales[name] for one in parts]) for name in parts[0].scales}
    packed = torch.cat([one.packed for one in parts])
    return QuantTensor(parts[0].format, packed, scales, weight.dtype)


def _multiplied(codes: Codes, format: Format, entry: Format, outer: str, inner: str) -> Tensor:
    """A level of scales, times the finer one under it where there is one, as float32."""
    scale = codes.scales[outer].float()
    if inner not in codes.scales:
        return scale
    fine = codes.scales[inner].float()
    several = level(format, outer).block[1] // entry.block[1]
    return spread(scale, (1, several), fine.shape) * fine
