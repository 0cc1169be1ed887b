"""Reads quantized weights in the layouts of other projects, without requantizing.

In: a checkpoint's tensors by name, and the base name of one weight (`model.layers.0.mlp.up_proj`).
Out: a `CheckpointWeight`: the quantized weight [.., N, K] and the static scale of the layer's input,
if the checkpoint has one.

    find_quantized_weights      shapes and dtypes of a file -> the weights in it, with their layouts
    describe_quantized_weight   the same -> format, shape and tensors of one weight, before its data
                                is read
    read_quantized_weight       tensors -> the weight

`CHECKPOINT_LAYOUTS` is the table; `layouts/` has the readers. A weight that no format holds is
dequantized, and the result says why. The static input scale is `input_scale`, `activation_scale` or
`act_quant_scale`, or `input_global_scale`, which is a reciprocal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant.files.layouts.awq import AWQ_LAYOUTS
from fulgurite.quant.files.layouts.bitsandbytes import BITSANDBYTES_LAYOUTS
from fulgurite.quant.files.layouts.compressed_tensors import COMPRESSED_TENSORS_LAYOUTS
from fulgurite.quant.files.layouts.fp8 import FP8_LAYOUTS
from fulgurite.quant.files.layouts.gpt_oss import GPT_OSS_LAYOUTS
from fulgurite.quant.files.layouts.gptq import GPTQ_LAYOUTS
from fulgurite.quant.files.layouts.modelopt import MODELOPT_LAYOUTS
from fulgurite.quant.files.layouts.section import parse_fields
from fulgurite.quant.files.layouts.stored import (
    CheckpointLayout,
    DenseWeight,
    PackedWeight,
    ReadWeight,
    StoredParts,
    StoredTensor,
    require_finite,
)
from fulgurite.quant.files.layouts.torchao import TORCHAO_LAYOUTS
from fulgurite.quant.format import Format
from fulgurite.quant.tensor import QuantTensor

# Of layouts with the same tensors, the first that matches counts: more specific ones come first.
CHECKPOINT_LAYOUTS: tuple[CheckpointLayout, ...] = (
    *BITSANDBYTES_LAYOUTS,
    *COMPRESSED_TENSORS_LAYOUTS,
    *GPTQ_LAYOUTS,
    *AWQ_LAYOUTS,
    *MODELOPT_LAYOUTS,
    *FP8_LAYOUTS,
    *GPT_OSS_LAYOUTS,
    *TORCHAO_LAYOUTS,
)
INPUT_SCALE_ROLES = ("input_scale", "activation_scale", "act_quant_scale")
RECIPROCAL_ROLE = "input_global_scale"
# Factors of the layer's input, one a column.
INPUT_FACTOR_ROLES = ("pre_quant_scale", "act_pre_scale")


@dataclass(frozen=True)
class CheckpointWeight:
    """A weight of a checkpoint, its layout and its static input scale, if any.

    `reason` is not empty if no format holds the weight: then `weight` is a dense tensor, dequantized
    without further loss.
    """

    layout: str
    weight: QuantTensor | Tensor
    input_scale: Tensor | None = None
    reason: str = ""


@dataclass(frozen=True)
class WeightDescription:
    """A weight before its data is read.

    name         its name in an unquantized checkpoint: `base.weight`, or `base` for stacked experts
    format       the format in which it is read; None: it is dequantized, and `reason` says why
    shape        [.., N, K]
    tensors      the names of all tensors that belong to it
    input_scale  whether it has a static input scale
    """

    layout: str
    name: str
    format: Format | None
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    input_scale: bool
    reason: str = ""


def find_quantized_weights(stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """The base names of all quantized weights in a checkpoint, each with its layout."""
    by_last_part: dict[str, list[str]] = defaultdict(list)
    for name in stored:
        by_last_part[name.rpartition(".")[2]].append(name)
    found: dict[str, str] = {}
    for layout in CHECKPOINT_LAYOUTS:
        role = layout.required[-1]
        ending = role.rpartition(".")[2]  # a checkpoint has few different last parts of names
        for name in (
            n for part in by_last_part if part.endswith(ending) for n in by_last_part[part]
        ):
            base = layout.naming.split(name, role)
            if base is not None and base not in found and layout.is_layout_of(base, stored):
                found[base] = layout.name
    return dict(sorted(found.items()))


def describe_quantized_weight(
    stored: Mapping[str, StoredTensor],
    base: str,
    config: Mapping[str, Any] | None,
    read: Callable[[str], Tensor],
) -> WeightDescription:
    """Format, shape and tensors of a weight, from the headers of a file.

    `config`: the section `quantization_config` of config.json. `read` is called only for small
    tensors that the format or shape depends on.
    """
    layout = _find_layout(stored, base)
    roles = layout.find_roles(base, stored)
    names = tuple(layout.naming.join(base, role) for role in roles)
    section = parse_fields(config)
    # Thousands of experts have the same shapes. Values of tensors are not part of the key.
    key = (layout, section, roles, tuple(stored[name] for name in names))
    has_values = any(role in roles for role in layout.value_roles)
    result = None if has_values else _DESCRIPTIONS.get(key)
    parts = StoredParts(base, layout.naming, roles, _MetaTensors(stored), read, section)
    if result is None:
        result = _describe(_read_weight(layout, parts), parts)
        if not has_values:
            _DESCRIPTIONS[key] = result
    name, has_input_scale = layout.naming.weight_name(base), _find_input_scale(parts) is not None
    format, shape, reason = result
    return WeightDescription(layout.name, name, format, shape, names, has_input_scale, reason)


_DESCRIPTIONS: dict[tuple[object, ...], tuple[Format | None, tuple[int, ...], str]] = {}


def _describe(weight: ReadWeight, parts: StoredParts) -> tuple[Format | None, tuple[int, ...], str]:
    if isinstance(weight, DenseWeight):
        return None, tuple(weight.values.shape), weight.reason
    packed = _build_quant_tensor(weight, parts)
    return packed.format, tuple(packed.shape), ""


def read_quantized_weight(
    tensors: Mapping[str, Tensor],
    base: str,
    dtype: torch.dtype = torch.bfloat16,
    check: bool = True,
    config: Mapping[str, Any] | None = None,
) -> CheckpointWeight:
    """Read the weight `base` (without `.weight`) in any supported layout.

    `check` raises for scales that are NaN, infinite, or zero over nonzero data. `config` is the
    section `quantization_config` of config.json; AWQ and GPTQ weights may need it.
    """
    layout = _find_layout(_TensorHeaders(tensors), base)
    roles = layout.find_roles(base, _TensorHeaders(tensors))
    section = parse_fields(config)
    parts = StoredParts(base, layout.naming, roles, tensors, tensors.__getitem__, section)
    weight = _read_weight(layout, parts)
    input_scale = _read_input_scale(parts)
    where = f"{base} ({layout.name})"
    if isinstance(weight, DenseWeight):
        if check:
            require_finite(weight.values, where)
        return CheckpointWeight(layout.name, weight.values.to(dtype), input_scale, weight.reason)
    packed = _build_quant_tensor(weight, parts, dtype)
    if check:
        packed.check_scales(where)
    return CheckpointWeight(layout.name, packed, input_scale)


class _MetaTensors(Mapping[str, Tensor]):
    """Headers as tensors without data."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored

    def __getitem__(self, name: str) -> Tensor:
        header = self.stored[name]
        return torch.empty(header.shape, dtype=header.dtype, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


class _TensorHeaders(Mapping[str, StoredTensor]):
    """Tensors as `StoredTensor`s, without a copy of the mapping."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> StoredTensor:
        tensor = self.tensors[name]
        return StoredTensor(tuple(tensor.shape), tensor.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _find_layout(stored: Mapping[str, StoredTensor], base: str) -> CheckpointLayout:
    for layout in CHECKPOINT_LAYOUTS:
        if layout.is_layout_of(base, stored):
            return layout
    raise _layout_error(stored, base)


def _layout_error(stored: Iterable[str], base: str) -> WeightsError:
    found = sorted(name for name in stored if name.startswith((f"{base}.", f"{base}_")))[:8]
    supported = dict.fromkeys(
        " + ".join(layout.naming.join("", role) or "name" for role in layout.required)
        for layout in CHECKPOINT_LAYOUTS
    )
    return WeightsError(
        f"{base!r} has no supported quantized layout",
        where=f"found {', '.join(found)}" if found else f"no tensor is named {base}.* or {base}_*",
        next=f"a layout needs all of its tensors: {'; '.join(supported)}",
    )


def _read_weight(layout: CheckpointLayout, parts: StoredParts) -> ReadWeight:
    """The weight, multiplied by the factor of the layer's input if there is one."""
    if parts[layout.required[0]].dim() < 2:
        raise parts.error(
            "a quantized weight has at least two dimensions",
            layout.required[0],
            "the file is damaged or in another layout: download it again",
        )
    weight = layout.read(parts)
    role = next((role for role in INPUT_FACTOR_ROLES if role in parts), None)
    if role is None:
        return weight
    values, reason = _dequantize(weight, parts)
    factor = parts[role].float().reshape(-1)
    if factor.numel() != values.shape[-1]:
        raise parts.error(
            f"{role} has {factor.numel()} values for K = {values.shape[-1]}",
            role,
            "the file is truncated: download it again",
        )
    return DenseWeight(values * factor, reason or f"{role} is a factor of each column")


def _dequantize(weight: ReadWeight, parts: StoredParts) -> tuple[Tensor, str]:
    if isinstance(weight, DenseWeight):
        return weight.values, weight.reason
    return _build_quant_tensor(weight, parts).dequantize(), ""


def _build_quant_tensor(
    weight: PackedWeight, parts: StoredParts, dtype: torch.dtype = torch.float32
) -> QuantTensor:
    """The weight as a tensor; an error about its shapes names the tensors of the checkpoint."""
    try:
        return QuantTensor(weight.format, weight.data, weight.scales, dtype)
    except FormatError as error:
        raise FormatError(
            error.what,
            where=f"{parts.base}; {parts.describe_shapes()}",
            next="the file is damaged or in another layout: download it again",
        ) from error


def _find_input_scale(parts: StoredParts) -> str | None:
    """The role of the static input scale.

    A scale that goes with a zero point is left out: it covers another range of values.
    """
    if parts.get_nonzero("input_zero_point") is not None:
        return None
    return next((role for role in (*INPUT_SCALE_ROLES, RECIPROCAL_ROLE) if role in parts), None)


def _read_input_scale(parts: StoredParts) -> Tensor | None:
    """The static input scale; one for each of stacked experts, if there are several."""
    role = _find_input_scale(parts)
    if role is None:
        return None
    scale = parts[role].float()
    scale = 1.0 / scale if role == RECIPROCAL_ROLE else scale
    return scale.reshape(()) if scale.numel() == 1 else scale
