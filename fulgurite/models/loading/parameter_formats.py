"""Which parameters stay quantized: the sources of each parameter in, its number format out.

A parameter keeps the format of the file if its module supports quantized weights, all of its
sources have one format, their conversions only select rows, and they meet at block boundaries. FP8
scales that several rows share become scales of single rows where that is needed: for two tensors in
one matrix (gate and up of an expert), or for rows that end inside a 128x128 block. The values stay
the same. NVFP4 tensors in one matrix stay packed if their tensor scales are equal. Otherwise the
parameter is dequantized, and the choice says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from fulgurite.kernels.gemm.modules import quantizable_parameters
from fulgurite.models.config import ModelConfig
from fulgurite.models.loading.fill import find_target_ranges
from fulgurite.models.loading.packed_rows import can_select_rows, find_selected_rows
from fulgurite.models.loading.weight_assignment import ParameterSource
from fulgurite.quant import WHOLE_DIM, Format, QuantTensor, resolve_format
from fulgurite.quant.repack import REPACKED_FORMAT

# FP8 formats -> the same values with scales of single rows
SINGLE_ROW_FORMATS = {
    f"fp8_{element}_{shared}": f"fp8_{element}_{single}"
    for element in ("e4m3", "e5m2")
    for shared, single in (("tensor", "row"), ("128x128", "1x128"))
}


class FormatChoice(NamedTuple):
    """The number format of a parameter. None: dense, and `reason` says why."""

    format: Format | None
    reason: str = ""


def choose_parameter_formats(
    model: nn.Module,
    sources: Mapping[str, Sequence[ParameterSource]],
    config: ModelConfig,
    repack: bool,
) -> dict[str, FormatChoice]:
    """The choice for each parameter with a source that is stored quantized.

    `repack`: GGUF blocks become grouped integers, which the kernels of the device read.
    """
    parameters = dict(model.named_parameters())
    result = {}
    for name, found in sources.items():
        if any(source.entry.is_quantized for source in found):
            choice = _choose_format(model, name, parameters[name], found, config)
            if repack and choice.format is not None and choice.format.name in REPACKED_FORMAT:
                choice = FormatChoice(resolve_format(REPACKED_FORMAT[choice.format.name]))
            result[name] = choice
    return result


def _choose_format(
    model: nn.Module,
    name: str,
    parameter: Tensor,
    sources: Sequence[ParameterSource],
    config: ModelConfig,
) -> FormatChoice:
    reasons = [source.entry.reason for source in sources if source.entry.reason]
    if reasons:
        return FormatChoice(None, reasons[0])
    names = {getattr(source.entry.format, "name", "dense") for source in sources}
    format = sources[0].entry.format
    if len(names) > 1 or format is None:
        return FormatChoice(None, f"its tensors are stored as {' and '.join(sorted(names))}")
    reason = _reject_module(model, name, format)
    if reason:
        return FormatChoice(None, reason)
    distinct = _distinct_sources(sources)
    reason = _reject_any(distinct, format, parameter, config)
    if reason and format.name in SINGLE_ROW_FORMATS:
        format = resolve_format(SINGLE_ROW_FORMATS[format.name])
        reason = _reject_any(distinct, format, parameter, config)
    if reason:
        return FormatChoice(None, reason)
    if any(_fills_part_of_a_matrix(source, parameter, config) for source in distinct):
        return _unite_tensor_scales(format, sources)
    return FormatChoice(format)


def _reject_any(
    sources: Sequence[ParameterSource], format: Format, parameter: Tensor, config: ModelConfig
) -> str:
    for source in sources:
        reason = _reject_rows(source, format, config)
        reason = reason or _reject_target(source, format, parameter, config)
        if reason:
            return reason
    return ""


def _distinct_sources(sources: Sequence[ParameterSource]) -> list[ParameterSource]:
    """One source of each kind: those of other experts are alike."""
    kinds: dict[object, ParameterSource] = {}
    for source in sources:
        mapping = source.assignment.mapping
        kinds.setdefault((mapping.convert, mapping.target_view, source.entry.shape), source)
    return list(kinds.values())


def _reject_module(model: nn.Module, name: str, format: Format) -> str:
    """Why a module can't hold a quantized parameter, or ""."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if type(module) is nn.Embedding and last == "weight":
        if any(scale.block[0] not in (1, WHOLE_DIM) for scale in format.separate_scales):
            return f"rows of an embedding can't be looked up in {format.name}"
        return ""
    if last in quantizable_parameters(module):
        return ""
    return f"{type(module).__name__} has no quantized kernels"


def _reject_rows(source: ParameterSource, format: Format, config: ModelConfig) -> str:
    """Why a conversion can't be applied to packed data, or ""."""
    convert, shape = source.assignment.mapping.convert, source.entry.shape
    index = find_selected_rows(lambda t: convert(t, config), shape[-2], len(shape))
    if index is None:
        return f"{convert.__name__} can't be applied to packed data"
    if not can_select_rows(format, shape[-2], index):
        return f"{convert.__name__} does not end at blocks of {format.block[0]} rows"
    return ""


def _reject_target(
    source: ParameterSource, format: Format, parameter: Tensor, config: ModelConfig
) -> str:
    """Why a source can't be copied into its part of the parameter, or ""."""
    shape, mapping = tuple(parameter.shape), source.assignment.mapping
    ranges = find_target_ranges(mapping.target_view, shape, config, source.assignment.expert)
    view = mapping.target_view(parameter, config, source.assignment.expert)
    numel = 1
    for first, last in ranges:
        numel *= last - first
    if numel != view.numel():
        return "it fills rows that are not contiguous"
    block = max(1, format.block[0])
    if any(end % block and end != shape[-2] for end in ranges[-2]):
        return f"rows {ranges[-2][0]} to {ranges[-2][1]} don't end at blocks of {block}"
    return ""


def _fills_part_of_a_matrix(
    source: ParameterSource, parameter: Tensor, config: ModelConfig
) -> bool:
    mapping, shape = source.assignment.mapping, tuple(parameter.shape)
    ranges = find_target_ranges(mapping.target_view, shape, config, source.assignment.expert)
    return ranges[-2] != (0, shape[-2])


def _unite_tensor_scales(format: Format, sources: Sequence[ParameterSource]) -> FormatChoice:
    """A format for matrices whose parts have tensor scales of their own, if they have any."""
    if all(scale.block[0] != WHOLE_DIM for scale in format.separate_scales):
        return FormatChoice(format)
    if format.name in SINGLE_ROW_FORMATS:
        return FormatChoice(resolve_format(SINGLE_ROW_FORMATS[format.name]))
    scales: dict[int, Tensor] = {}
    for source in sources:
        weight = source.entry.load().data
        assert isinstance(weight, QuantTensor), f"{source.entry.name} has a format"
        scale = weight.scales["tensor_scale"].flatten()
        first = scales.setdefault(source.assignment.expert, scale)
        if bool((first != scale).any()):
            return FormatChoice(
                None, f"the tensor scale of {source.entry.name} differs from its partner's"
            )
    return FormatChoice(format)
