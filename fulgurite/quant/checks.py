"""Refusing scales that can't be right: NaN, infinite, or zero over data that isn't zero.

In: packed parts, usually just read from a checkpoint. Out: nothing, or a `WeightsError` that names
the tensor, the first bad block and what to do.

A zero float16 scale inside a GGUF block is allowed: its published quantizers write one where a
block is too small for float16, and it reads as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.quant.blocks import Packed, nonzero_blocks, spread
from fulgurite.quant.codec import unpack
from fulgurite.quant.format import Format, Scale, level
from fulgurite.quant.minifloat import E2M1_VALUES, decode_e8m0
from fulgurite.quant.shapes import logical_shape

FAMILIES_WITH_ZERO_SCALES = ("gguf",)


def check_scales(packed: Packed, format: Format, where: str) -> None:
    """Raises where a scale is NaN, infinite, or zero under codes that are not zero."""
    if packed.data.is_meta:
        return
    codes = unpack(packed, format) if _inside(format) else None
    scales = packed.scales if codes is None else codes.scales
    for scale in format.scales:
        values = scales[scale.name]
        if not values.is_floating_point():
            continue
        numbers = decode_e8m0(values) if scale.type == "e8m0" else values.float()
        _refuse(~numbers.isfinite(), numbers, scale, where, "is not a finite number")
        zero = numbers == 0
        may_be_zero = format.family in FAMILIES_WITH_ZERO_SCALES or scale.name == "minimum"
        if not may_be_zero and bool(zero.any()):
            bad = zero & nonzero_blocks(_magnitudes(packed, format), scale)
            _refuse(bad, numbers, scale, where, "is zero over data that isn't")


def _inside(format: Format) -> bool:
    return any(not scale.stored for scale in format.scales)


def _magnitudes(packed: Packed, format: Format) -> Tensor:
    """Codes as numbers that are zero where the value is."""
    codes = unpack(packed, format)
    if format.element.name == "e2m1":
        return codes.codes % len(E2M1_VALUES)
    if "zero_point" in codes.scales:
        shape = torch.Size(logical_shape(format, packed.data.shape))
        zero = spread(codes.scales["zero_point"], level(format, "zero_point").block, shape)
        return codes.codes.float() - zero
    return codes.codes


def _refuse(bad: Tensor, numbers: Tensor, scale: Scale, where: str, what: str) -> None:
    count = int(bad.sum())
    if count == 0:
        return
    place = [int(i) for i in bad.nonzero()[0]]
    raise WeightsError(
        f"{scale.name} {what}: {numbers[tuple(place)].item()} at {place}",
        where=f"{where}, {count} of {bad.numel()} scales",
        next="the file is damaged or was quantized from weights with NaN: download it again or "
        "quantize again from the original weights; check=False loads it as it is",
    )
