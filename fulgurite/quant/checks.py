"""Detects invalid scales: NaN, infinite, or zero over nonzero data.

In: packed data, usually just read from a checkpoint. Out: nothing, or a `WeightsError` that names
the tensor, the first invalid block and what to do.

A zero float16 scale inside a GGUF block is valid: llama.cpp writes one for blocks that are too
small for float16. It dequantizes to zeros. So is the zero amax of a block of zeros in nf4 and fp4,
whose codes may be anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.quant.codecs.blocks import PackedData, expand_blocks, find_nonzero_blocks
from fulgurite.quant.codecs.codec import unpack
from fulgurite.quant.codecs.minifloat import E2M1_VALUES, dequantize_e8m0
from fulgurite.quant.format import Format, ScaleSpec, get_scale_spec
from fulgurite.quant.shapes import logical_shape

FAMILIES_WITH_ZERO_SCALES = ("gguf", "codebook")


def check_scales(packed: PackedData, format: Format, where: str) -> None:
    """Raise if a scale is NaN, infinite, or zero over nonzero codes."""
    if packed.data.is_meta:
        return
    codes = unpack(packed, format) if _has_inline_scales(format) else None
    scales = packed.scales if codes is None else codes.scales
    for scale in format.scales:
        values = scales[scale.name]
        if not values.is_floating_point():
            continue
        numbers = dequantize_e8m0(values) if scale.type == "e8m0" else values.float()
        _raise_if_any(~numbers.isfinite(), numbers, scale, where, "is not finite")
        zero = numbers == 0
        may_be_zero = format.family in FAMILIES_WITH_ZERO_SCALES or scale.name == "minimum"
        if not may_be_zero and bool(zero.any()):
            invalid = zero & find_nonzero_blocks(_code_magnitudes(packed, format), scale)
            _raise_if_any(invalid, numbers, scale, where, "is zero over nonzero data")


def _has_inline_scales(format: Format) -> bool:
    return any(not scale.is_separate for scale in format.scales)


def _code_magnitudes(packed: PackedData, format: Format) -> Tensor:
    """The codes, shifted so that they are zero where the value is zero."""
    codes = unpack(packed, format)
    if format.element.name == "e2m1":
        return codes.codes % len(E2M1_VALUES)
    if "zero_point" in codes.scales:
        shape = torch.Size(logical_shape(format, packed.data.shape))
        zero = expand_blocks(
            codes.scales["zero_point"], get_scale_spec(format, "zero_point").block, shape
        )
        return codes.codes.float() - zero
    return codes.codes


def _raise_if_any(
    invalid: Tensor, numbers: Tensor, scale: ScaleSpec, where: str, problem: str
) -> None:
    count = int(invalid.sum())
    if count == 0:
        return
    index = [int(i) for i in invalid.nonzero()[0]]
    raise WeightsError(
        f"{scale.name} {problem}: {numbers[tuple(index)].item()} at index {index}",
        where=f"{where}, {count} of {invalid.numel()} scales",
        next="the file is damaged, or its original weights contained NaN: download it again, "
        "or quantize again from the original weights; check=False loads it anyway",
    )
