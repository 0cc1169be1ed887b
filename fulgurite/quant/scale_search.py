"""Scales of weights with a small squared error: a weight [N, K] in, scales and codes out.

    fit_scales            scales of each block; 4-bit formats try several and keep the one with the
                          smallest squared error
    quantize_to_scales    the nearest code of every element, for given scales

Float scales are rounded to the dtype that a checkpoint stores, before codes are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant.codecs import codec
from fulgurite.quant.codecs.blocks import (
    MIN_SCALE,
    Codes,
    block_amax,
    block_min_max,
    compute_scale,
    expand_blocks,
)
from fulgurite.quant.codecs.integer import INT4_MAX_STEPS
from fulgurite.quant.codecs.minifloat import (
    dequantize_e8m0,
    quantize_e2m1,
    quantize_e8m0,
    saturating_cast,
)
from fulgurite.quant.format import E2M1, E4M3, INT4, WHOLE_DIM, Format, get_scale_spec

Scales = dict[str, Tensor]

MAX_GROUP = 128  # a multiple of every group size
SEARCH_ELEMENTS = 1 << 17  # elements of the rows that are searched at once: they fit into L2
# Scales that are tried, relative to the one that maps amax to the largest code. A smaller scale
# clips the largest elements and rounds the others finer. e2m1 has no values between 4 and 6, so
# mapping amax to 4 (a factor of 1.5) can be better, too.
SEARCH_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
E2M1_SEARCH_FACTORS = (1.0, 0.92, 0.84, 1.12, 1.25, 1.5)
FLOAT32_EXPONENT = 0x7F800000
MX_SEARCH_EXPONENTS = (0, 1)  # the rule of the OCP specification clips up to a quarter of amax


def compute_tensor_scale(weight: Tensor, format: Format) -> Tensor:
    """NVFP4's scale per tensor, as the reciprocal of a float32: checkpoints store the reciprocal.

    So what is read back is the same bits.
    """
    spec = get_scale_spec(format, "tensor_scale")
    amax = block_amax(weight.float(), spec, keep_nan=False)
    return 1.0 / (1.0 / compute_scale(amax, E4M3.max_value * E2M1.max_value))


def fit_scales(
    weight: Tensor,
    format: Format,
    scale_dtype: torch.dtype = torch.float32,
    tensor_scale: Tensor | None = None,
    importance_K: Tensor | None = None,
) -> Scales:
    """The scales of every block; see `round_to_nearest` for the arguments."""
    x = weight.float()
    if format.family == "nvfp4":
        tensor_scale = compute_tensor_scale(x, format) if tensor_scale is None else tensor_scale
    if format.element.bits != 4:
        return next(_candidate_scales(x, format, scale_dtype, tensor_scale))
    rows = max(1, SEARCH_ELEMENTS // max(1, x.shape[1]))
    chunks = [
        _search_scales(chunk, format, scale_dtype, tensor_scale, importance_K)
        for chunk in x.split(rows)
    ]
    merged = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    if tensor_scale is not None:
        merged["tensor_scale"] = chunks[0]["tensor_scale"]
    return merged


def _search_scales(
    x: Tensor,
    format: Format,
    scale_dtype: torch.dtype,
    tensor_scale: Tensor | None,
    importance_K: Tensor | None,
) -> Scales:
    """Of all candidates, the one with the smallest weighted squared error of each block."""
    best: Scales = {}
    least = x.new_empty(0)
    group = group_size(format)
    x_NBg = x.unflatten(-1, (-1, group))
    importance = None if importance_K is None else importance_K.unflatten(0, (-1, group))
    for scales in _candidate_scales(x, format, scale_dtype, tensor_scale):
        step, zero = (None if s is None else s.unsqueeze(-1) for s in get_steps(scales, format))
        assert step is not None, "every format has a scale"
        error = round_values(x_NBg / step, zero, format).mul_(step).sub_(x_NBg).square_()
        least_NB = (error if importance is None else error.mul_(importance)).sum(-1)
        if not best:
            best, least = scales, least_NB
            continue
        is_better = least_NB < least
        least = torch.where(is_better, least_NB, least)
        for name in best.keys() - {"tensor_scale"}:
            best[name] = _select(is_better, scales[name], best[name])
    return best


def _select(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`torch.where` for every dtype, also 8-bit floats."""
    if first.dtype.itemsize > 1:
        return torch.where(condition, first, second)
    chosen = torch.where(condition, first.view(torch.uint8), second.view(torch.uint8))
    return chosen.view(first.dtype)


def _candidate_scales(
    x: Tensor, format: Format, dtype: torch.dtype, tensor_scale: Tensor | None
) -> Iterator[Scales]:
    """Candidates; the first is the one of the codec, from the amax of each block."""
    spec = get_scale_spec(format, "scale")
    if len(format.scales) == 2 and format.family == "int":
        yield from _candidate_zero_points(x, format, dtype)
        return
    if format.family == "mx":
        base = codec.quantize_to_codes(x, format).scales["scale"]
        exponent = torch.log2(dequantize_e8m0(base))
        for offset in MX_SEARCH_EXPONENTS:
            yield {"scale": base if not offset else quantize_e8m0(exponent + offset)}
        return
    amax = block_amax(x, spec, keep_nan=not format.element.has_nan)
    if format.family == "nvfp4":
        assert tensor_scale is not None, "NVFP4 has a scale per tensor"
        base = amax / E2M1.max_value / tensor_scale
        for factor in E2M1_SEARCH_FACTORS:
            scaled = (base * factor).clamp_min(E4M3.smallest_subnormal)
            scale = saturating_cast(torch.where(amax == 0, 1.0, scaled), E4M3, spec.dtype)
            yield {"scale": scale, "tensor_scale": tensor_scale}
        return
    largest = INT4_MAX_STEPS if format.element is INT4 else format.element.max_value
    base = compute_scale(amax, largest)
    for factor in SEARCH_FACTORS:
        yield {"scale": _round_scale(base * factor, dtype)}


def _candidate_zero_points(x: Tensor, format: Format, dtype: torch.dtype) -> Iterator[Scales]:
    low, high = block_min_max(x, get_scale_spec(format, "scale"))
    highest = format.element.max_value
    for factor in SEARCH_FACTORS:
        step = ((high - low) * (factor / highest)).clamp_min(MIN_SCALE)
        scale = _round_scale(torch.where((low == 0) & (high == 0), 1.0, step), dtype)
        zero = (-low * factor / scale).round().clamp(0, highest).nan_to_num(nan=0.0)
        yield {"scale": scale, "zero_point": zero.to(torch.uint8)}


def _round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the dtype that a checkpoint stores; at least its smallest normal number."""
    return scale.to(dtype).float().clamp_min(max(torch.finfo(dtype).tiny, MIN_SCALE))


# ---- codes ---------------------------------------------------------------------------------------


def quantize_to_scales(x: Tensor, scales: Scales, format: Format) -> Codes:
    """Round each element to the nearest code of these scales."""
    step, zero = get_steps(scales, format)
    block = get_scale_spec(format, "scale").block
    step = expand_blocks(step, block, x.shape)
    zero = None if zero is None else expand_blocks(zero, block, x.shape)
    return Codes(to_codes(x.float(), step, zero, format), scales)


def get_steps(scales: Scales, format: Format) -> tuple[Tensor, Tensor | None]:
    """The step between codes in each block, and its zero point."""
    scale = scales["scale"]
    if format.family == "mx":
        return dequantize_e8m0(scale), None
    if format.family == "nvfp4":
        return scale.float() * scales["tensor_scale"], None
    zero = scales.get("zero_point")
    return scale, None if zero is None else zero.float()


def to_codes(x: Tensor, step: Tensor, zero: Tensor | None, format: Format) -> Tensor:
    """The nearest codes of x, one per element; `step` and `zero` broadcast over x."""
    steps = x / step
    if format.element is E2M1:
        return quantize_e2m1(steps)
    if format.data_dtype.is_floating_point:
        return saturating_cast(steps, format.element, format.data_dtype)
    values = round_values(steps, zero, format)
    return values.to(torch.int8) if zero is None else (values + zero).to(torch.uint8)


def round_values(steps: Tensor, zero: Tensor | None, format: Format) -> Tensor:
    """x / step rounded to the nearest code, as a float; less the zero point, if there is one."""
    element = format.element
    if element is E2M1:
        magnitude = steps.abs()
        # Neighbours are 0.5 apart below 2, 1 below 4, and 2 above: half the power of two below the
        # magnitude, which is its float32 without mantissa. Ties go to the even code.
        power = magnitude.clamp(1.0, 4.0).view(torch.int32) & FLOAT32_EXPONENT
        spacing = power.view(torch.float32) * 0.5
        rounded = magnitude.div_(spacing).round_().mul_(spacing).clamp_(max=element.max_value)
        return rounded.copysign_(steps)
    if format.data_dtype.is_floating_point:
        return saturating_cast(steps, element, format.data_dtype).float()
    low, high = element.min_value, element.max_value
    if zero is None:
        return steps.round().clamp_(low, high).nan_to_num_(nan=0.0)
    return (steps.round_().add_(zero).clamp_(low, high).nan_to_num_(nan=0.0)).sub_(zero)


def group_size(format: Format) -> int:
    """The columns that share a scale."""
    group = format.block[1]
    if group == WHOLE_DIM or MAX_GROUP % group:
        raise FormatError(
            f"{format.name} has no groups of columns that divide {MAX_GROUP}",
            next="use a 4-bit format: int4, nvfp4, mxfp4",
        )
    return group
