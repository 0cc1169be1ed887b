"""The fields of `quantization_config` in config.json that readers need.

In: the section as a mapping. Out: `QuantizationFields`. Every field has a default: most layouts
are identified by their tensors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulgurite.errors import WeightsError

# field -> its names in the sections of different projects
FIELD_NAMES: dict[str, tuple[str, ...]] = {
    "bits": ("bits", "w_bit"),
    "group_size": ("group_size", "q_group_size"),
    "version": ("version", "checkpoint_format", "format"),
    "checkpoint_format": ("checkpoint_format", "format"),
}


@dataclass(frozen=True)
class QuantizationFields:
    """What config.json says about the quantized weights. None: it does not say.

    method              quant_method: "awq", "gptq", "compressed-tensors", ...
    bits, group_size    width of the codes; columns that share a scale, -1 for all
    symmetric           GPTQ's `sym`: all zero points are the middle of the range
    desc_act            GPTQ's activation order: columns are in groups by `g_idx`
    checkpoint_format   GPTQ: "gptq" (zero points stored minus 1) or "gptq_v2"
    version             AWQ: "gemm" or "gemv"
    block_size          rows and columns of a block of an FP8 weight
    has_overrides       GPTQModel's `dynamic`: modules with other bits, groups or symmetry
    """

    method: str = ""
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    desc_act: bool | None = None
    checkpoint_format: str = ""
    version: str = ""
    block_size: tuple[int, int] | None = None
    has_overrides: bool = False


def parse_fields(section: Mapping[str, Any] | None) -> QuantizationFields:
    """Read the section `quantization_config`; None or an empty one has defaults only."""
    if not section:
        return QuantizationFields()
    return QuantizationFields(
        method=_read_text(section, ("quant_method",)),
        bits=_read_integer(section, FIELD_NAMES["bits"]),
        group_size=_read_group_size(section),
        symmetric=_read_flag(section, "sym"),
        desc_act=_read_flag(section, "desc_act"),
        checkpoint_format=_read_text(section, FIELD_NAMES["checkpoint_format"]),
        version=_read_text(section, FIELD_NAMES["version"]),
        block_size=_read_block_size(section),
        has_overrides=bool(section.get("dynamic")),
    )


def _find(section: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    return next(
        ((name, section[name]) for name in names if section.get(name) is not None), ("", None)
    )


def _read_text(section: Mapping[str, Any], names: tuple[str, ...]) -> str:
    _, value = _find(section, names)
    return "" if value is None else str(value).lower()


def _read_integer(section: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    name, value = _find(section, names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _field_error(name, value, "an integer")
    return value


def _read_flag(section: Mapping[str, Any], name: str) -> bool | None:
    value = section.get(name)
    if value is not None and not isinstance(value, bool):
        raise _field_error(name, value, "true or false")
    return value


def _read_group_size(section: Mapping[str, Any]) -> int | None:
    """`group_size`, or the one of compressed-tensors' groups if they agree."""
    given = _read_integer(section, FIELD_NAMES["group_size"])
    return given if given is not None else _find_in_groups(section, "group_size")


def _read_block_size(section: Mapping[str, Any]) -> tuple[int, int] | None:
    """`weight_block_size`, or `block_structure` of compressed-tensors' groups if they agree."""
    name, value = "weight_block_size", section.get("weight_block_size")
    if value is None:
        name, value = "block_structure", _find_in_groups(section, "block_structure")
    if value is None:
        return None
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(_is_size(v) for v in value)
    ):
        raise _field_error(name, value, "two positive integers")
    return value[0], value[1]


def _find_in_groups(section: Mapping[str, Any], field: str) -> Any:
    """The value of a field of `weights` in compressed-tensors' `config_groups`, if there is one."""
    found = []
    for group in (section.get("config_groups") or {}).values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        value = weights.get(field) if isinstance(weights, Mapping) else None
        if value is not None and value not in found:
            found.append(value)
    return found[0] if len(found) == 1 else None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _field_error(name: str, value: object, expected: str) -> WeightsError:
    return WeightsError(
        f"{name}={value!r} must be {expected}",
        where="quantization_config in config.json",
        next="download config.json again; it must belong to these weights",
    )
