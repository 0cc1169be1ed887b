"""How a checkpoint is quantized: `quantization_config` of config.json in, a typed description out.

    quant_method         where the rest comes from
    compressed-tensors   config_groups (targets, weights, input_activations), ignore
    modelopt             quant_algo, exclude_modules or ignore; also in hf_quant_config.json
    fp8, fbgemm_fp8      activation_scheme, modules_to_not_convert or ignored_layers
    mxfp4, awq, gptq, bitsandbytes, torchao   their own fields
    auto-round           packing_format: the layout of GPTQ or AWQ

The tensors of a weight say how it is stored. This section says what they can't: which method, which
modules are left dense, how activations and the KV cache are quantized. Fields of a single weight
(bits, group size, …) are checked where the weight is read (`fulgurite.quant.files`).
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields

SECTIONS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"
METHODS = (
    "fp8",
    "mxfp4",
    "compressed-tensors",
    "modelopt",
    "fbgemm_fp8",
    "awq",
    "gptq",
    "bitsandbytes",
    "torchao",
    "auto-round",
)
METHOD_ALIASES = {
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "compressed_tensors": "compressed-tensors",
}
# `format` of compressed-tensors, of the model and of a group. mixed-precision: one a group.
COMPRESSED_FORMATS = (
    "dense",
    "fakequant",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
IGNORE_FIELDS = (
    "ignore",
    "exclude_modules",
    "modules_to_not_convert",
    "ignored_layers",
    "llm_int8_skip_modules",
)
MODELOPT_WEIGHT_ONLY = ("W4A16_AWQ", "W4A16", "W8A16", "NVFP4_W4A16", "W4A16_NVFP4", "FP8_W8A16")
FP8_NAMES = ("FP8", "fp8", "float8_e4m3fn", "fp8_e4m3")


@dataclass(frozen=True)
class WeightScheme:
    """How the modules of some targets are quantized.

    targets       module names, `re:` patterns, or class names such as "Linear"
    activations   "none": not quantized (W4A16). "dynamic": scales computed on the fly. "static":
                  scales stored in the checkpoint
    where         the field of the config that says so
    """

    targets: tuple[str, ...]
    activations: str
    where: str


@dataclass(frozen=True)
class CheckpointQuantization:
    """The quantization of a checkpoint; `method` is "" if its config declares none.

    kv_cache   "fp8" if the checkpoint was calibrated for an FP8 KV cache
    section    the fields as published; the readers of single weights use them
    """

    method: str = ""
    schemes: tuple[WeightScheme, ...] = ()
    ignore: tuple[str, ...] = ()
    kv_cache: str | None = None
    section: Mapping[str, object] = field(default_factory=dict)
    where: str = ""

    def is_ignored(self, module: str) -> bool:
        """Whether a module is declared to be dense."""
        return any(matches_module(pattern, module) for pattern in self.ignore)

    def find_scheme(self, module: str) -> WeightScheme | None:
        """The scheme of a module by its name in the checkpoint; None if it is declared dense."""
        if self.is_ignored(module):
            return None
        by_name = [s for s in self.schemes if any(matches_module(t, module) for t in s.targets)]
        by_class = [s for s in self.schemes if any(_is_class(target) for target in s.targets)]
        return next(iter((*by_name, *by_class)), None)


def matches_module(pattern: str, module: str) -> bool:
    """Whether a pattern of an ignore list or of targets names a module.

    `re:` patterns match from the start of the name. Wildcards (`*`) match the whole name. A plain
    name matches the module, modules inside it, and a last component ("lm_head").
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, pattern + ".*")
    return f".{pattern}." in f".{module}."


def _is_class(target: str) -> bool:
    return target.isidentifier() and target[:1].isupper()


def read_quantization(fields: ConfigFields, folder: Path) -> CheckpointQuantization:
    """The quantization that config.json, or ModelOpt's file beside it, declares."""
    for name in SECTIONS:
        if name in fields:
            return parse_quantization(fields.get_section(name))
    file = folder / MODELOPT_FILE
    if file.is_file():
        return parse_quantization(_read_modelopt_file(file))
    return CheckpointQuantization()


def parse_quantization(section: ConfigFields) -> CheckpointQuantization:
    """Parse one section; a method or field that is not supported raises an error that names it."""
    name = section.get_str("quant_method", "modelopt" if "quant_algo" in section else "")
    method = METHOD_ALIASES.get(name, name)
    if method not in METHODS:
        raise WeightsError(
            f"quant_method={name!r} is not supported; supported: {', '.join(METHODS)}",
            where=section.where,
            next="load the original checkpoint, or quantize it with `fulgurite quantize`",
        )
    if method == "auto-round":
        section = _read_auto_round(section)
    ignore: tuple[str, ...] = ()
    for field_name in IGNORE_FIELDS:
        ignore += _read_names(section, field_name)
    parsers = {"compressed-tensors": _parse_groups, "modelopt": _parse_modelopt}
    schemes = parsers.get(method, _parse_plain)(section)
    kv_cache = _read_kv_cache(section)
    return CheckpointQuantization(method, schemes, ignore, kv_cache, section.values, section.where)


def _read_modelopt_file(file: Path) -> ConfigFields:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"cannot parse {file.name}: {error}", where=str(file)) from error
    if not isinstance(values, dict):
        raise WeightsError(f"{file.name} is not a JSON object", where=str(file))
    section = ConfigFields(values, str(file)).get_section("quantization")
    return ConfigFields({"quant_method": "modelopt", **section.values}, section.where)


def _read_names(section: ConfigFields, name: str) -> tuple[str, ...]:
    names = section.get_list(name)
    for value in names:
        if not isinstance(value, str):
            raise section.error(f"{name} must be a list of module names, not {value!r}")
        if value.startswith("re:"):
            _check_pattern(section, name, value)
    return tuple(str(value) for value in names)


def _check_pattern(section: ConfigFields, name: str, value: str) -> None:
    try:
        re.compile(value.removeprefix("re:"))
    except re.error as error:
        raise section.error(f"{name} has an invalid pattern {value!r}: {error}") from error


# ---- methods -------------------------------------------------------------------------------------


def _parse_plain(section: ConfigFields) -> tuple[WeightScheme, ...]:
    """Methods with one scheme for every linear."""
    method = section.get_str("quant_method")
    activations = "none"
    if method == "fp8":
        activations = section.get_choice("activation_scheme", ("dynamic", "static"), "dynamic")
    elif method == "fbgemm_fp8":
        activations = "dynamic"
    return (WeightScheme(("Linear",), activations, f"{section.where}, activation_scheme"),)


def _read_auto_round(section: ConfigFields) -> ConfigFields:
    """AutoRound's fields as those of the layout that it packs weights in.

    `auto_gptq` stores zero points minus one, as GPTQ does. `gptqmodel`, and other backends that are
    neither GPTQ's nor AWQ's, store them as they are. `extra_config` has modules with other bits.
    """
    packing = section.get_str("packing_format", "auto_round:auto_gptq")
    kind = section.get_str("data_type", "int")
    act_bits = section.get_int("act_bits", 16)
    if kind != "int" or act_bits < 16 or "llm_compressor" in packing:
        raise WeightsError(
            f"packing_format={packing!r} with data_type={kind!r} and act_bits={act_bits} is not "
            "supported; supported: integer weights in the layout of GPTQ or AWQ",
            where=section.where,
            next="use a checkpoint in the format of GPTQ, AWQ or compressed-tensors",
        )
    if "awq" in packing:
        layout = {"quant_method": "awq", "version": "gemm"}
    else:
        has_offset = "gptq" in packing and "gptqmodel" not in packing
        layout = {"quant_method": "gptq", "checkpoint_format": "gptq" if has_offset else "gptq_v2"}
    extra = section.get_section("extra_config")
    others = [name for name in extra.values if extra.get_section(name).get_int("bits", 16) < 16]
    return ConfigFields({**section.values, **layout, "dynamic": others}, section.where)


def _parse_modelopt(section: ConfigFields) -> tuple[WeightScheme, ...]:
    if section.get_section("config_groups").values:
        return _parse_groups(section)
    schemes: tuple[WeightScheme, ...] = ()
    layers = section.get_section("quantized_layers")
    for name in layers.values:
        algo = layers.get_section(name).get_str("quant_algo", "")
        schemes += (WeightScheme((name,), _modelopt_activations(algo), f"{layers.where}, {name}"),)
    algo = section.get_str("quant_algo", "")
    if not layers.values:
        where = f"{section.where}, quant_algo"
        schemes = (WeightScheme(("Linear",), _modelopt_activations(algo), where),)
    return schemes


def _modelopt_activations(algo: str) -> str:
    if algo.upper() in MODELOPT_WEIGHT_ONLY:
        return "none"
    return "dynamic" if "PER_TOKEN" in algo.upper() or algo.upper() == "MXFP8" else "static"


def _parse_groups(section: ConfigFields) -> tuple[WeightScheme, ...]:
    """compressed-tensors: `config_groups`, each with its targets."""
    _reject_unsupported(section)
    groups = section.get_section("config_groups")
    schemes = []
    for name in groups.values:
        group = groups.get_section(name)
        where = f"config_groups.{name}"
        targets = _read_names(group, "targets") or ("Linear",)
        if "weights" not in group:
            raise section.error(
                f"{where} quantizes activations but no weights, which is not supported"
            )
        _check_format(group)
        inputs = group.get_section("input_activations")
        activations = "none"
        if inputs.values:
            # "local": NVFP4 with a static scale per tensor and dynamic ones per block
            is_dynamic = inputs.values.get("dynamic") is True
            activations = "dynamic" if is_dynamic else "static"
        schemes.append(WeightScheme(targets, activations, f"{section.where}, {where}"))
    return tuple(schemes)


def _check_format(section: ConfigFields) -> None:
    name = section.get_str("format", "dense")
    if name not in COMPRESSED_FORMATS:
        raise WeightsError(
            f"format={name!r} is not supported; supported: {', '.join(COMPRESSED_FORMATS)}",
            where=section.where,
            next="save the model in one of these formats",
        )


def _reject_unsupported(section: ConfigFields) -> None:
    """Raise for parts of compressed-tensors that change the values and are not supported."""
    _check_format(section)
    status = section.get_str("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise section.error(f"quantization_status={status!r} is not supported; save it compressed")
    sparsity = section.get_section("sparsity_config").get_str("format", "dense")
    if sparsity != "dense":
        raise WeightsError(
            f"sparsity_config.format={sparsity!r} is not supported; supported: 'dense'",
            where=section.where,
            next="save the model without sparse compression",
        )
    transforms = section.get_section("transform_config").get_section("config_groups").values
    for name, values in transforms.items():
        apply = values.get("apply", ()) if isinstance(values, Mapping) else ()
        for entry in apply if isinstance(apply, list) else ():
            location = entry.get("location", "") if isinstance(entry, Mapping) else ""
            if str(location) in ("input", "output", "q_attn", "k_cache"):
                raise WeightsError(
                    f"transform_config.config_groups.{name} transforms activations "
                    f"(location={location!r}), which is not supported",
                    where=section.where,
                    next="use a checkpoint whose transforms are fused into its weights",
                )


def _read_kv_cache(section: ConfigFields) -> str | None:
    """ "fp8" if an FP8 KV cache is declared; other KV caches are only a storage format."""
    algo = section.values.get("kv_cache_quant_algo")
    scheme = section.values.get("kv_cache_scheme")
    if isinstance(algo, str):
        return "fp8" if algo in FP8_NAMES else None
    if isinstance(scheme, str):  # AutoFP8
        return "fp8" if scheme in ("static", *FP8_NAMES) else None
    if isinstance(scheme, Mapping):
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        return "fp8" if is_fp8 else None
    return None
