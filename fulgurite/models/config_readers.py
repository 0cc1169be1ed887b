"""Parts of a config.json that most families share: fields in; rotary embedding, dtype, layer types out.

Files of transformers 4 and 5 store them under different names. Both are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fulgurite.errors import WeightsError
from fulgurite.models.config import DTYPES, ROPE_TYPES, ConfigFields, RopeConfig, yarn_mscale

# hidden_act in transformers -> the name here. Several are the same function.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}
ROPE_BASE = ("rope_theta", "partial_rotary_factor", "mrope_section")  # not of a scaling


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    interleaved: bool = False,
    layer_type: str | None = None,
    yarn_is_longrope: bool = False,
    partial_rotary_factor: float = 1.0,
) -> RopeConfig:
    """Read the rotary embedding from `rope_parameters`, or from `rope_scaling` and `rope_theta`
    (older).

    `layer_type` selects an entry of `rope_parameters` that is keyed by layer type (Gemma 3).
    `partial_rotary_factor` is the family's default.
    """
    scaling = fields.get_section(
        "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    )
    if layer_type is not None:
        scaling = scaling.get_section(layer_type)
    rope_type = scaling.get_str("rope_type", scaling.get_str("type", "default"))
    if rope_type == "mrope":
        rope_type = "default"
    if rope_type == "su" or (rope_type == "yarn" and yarn_is_longrope):
        rope_type = "longrope"
    if rope_type not in ROPE_TYPES:
        raise scaling.error(
            f"rope_type={rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    partial = scaling.get_positive_float(
        "partial_rotary_factor",
        fields.get_positive_float("partial_rotary_factor", partial_rotary_factor),
    )
    max_positions = fields.get_positive_int("max_position_embeddings")
    original = fields.get_optional_positive_int("original_max_position_embeddings")
    if original is None:
        original = scaling.get_positive_int("original_max_position_embeddings", max_positions)
    if rope_type in ("linear", "dynamic", "llama3"):
        factor = scaling.get_positive_float("factor")
    else:
        factor = scaling.get_positive_float("factor", max_positions / original)
    rope = RopeConfig(
        rope_type=rope_type,
        rotary_dim=int(head_dim * partial),
        theta=scaling.get_positive_float(
            "rope_theta", fields.get_positive_float("rope_theta", theta)
        ),
        max_positions=max_positions,
        interleaved=interleaved,
        factor=factor,
        original_max_positions=original,
        attention_factor=_read_attention_factor(rope_type, scaling, factor, original),
        beta_fast=scaling.get_positive_float("beta_fast", 32.0),
        beta_slow=scaling.get_positive_float("beta_slow", 1.0),
        truncate=scaling.get_bool("truncate", True),
        low_freq_factor=scaling.get_float("low_freq_factor", 1.0),
        high_freq_factor=scaling.get_float("high_freq_factor", 4.0),
        short_factors=scaling.get_floats("short_factor"),
        long_factors=scaling.get_floats("long_factor"),
        mscale_all_dim=scaling.get_float("mscale_all_dim", 0.0),
        mrope_sections=tuple(int(size) for size in scaling.get_floats("mrope_section")),
        mrope_interleaved=scaling.get_bool("mrope_interleaved", False),
    )
    _check_mrope(rope, scaling)
    if not 2 <= rope.rotary_dim <= head_dim or rope.rotary_dim % 2:
        raise scaling.error(
            f"rotary_dim={rope.rotary_dim} must be even and between 2 and head_dim={head_dim}"
        )
    if rope_type in ("yarn", "longrope") and (rope.theta == 1 or original == 1):
        raise scaling.error(
            f"{rope_type} needs rope_theta and original_max_position_embeddings other than 1"
        )
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope_type == "longrope" and len(factors) != rope.rotary_dim // 2:
            raise scaling.error(
                f"{name} has {len(factors)} numbers; "
                f"it needs rotary_dim / 2 = {rope.rotary_dim // 2}"
            )
    return rope


def merge_rope_scaling(fields: ConfigFields) -> ConfigFields:
    """The fields with one section of the rotary embedding.

    Model cards say to add `rope_scaling` to config.json. In a file that has `rope_parameters`, it
    replaces the scaling there, and the base and the rotated part stay.
    """
    parameters = fields.get_section("rope_parameters")
    is_by_layer_type = any(isinstance(value, Mapping) for value in parameters.values.values())
    if "rope_scaling" not in fields or not parameters.values or is_by_layer_type:
        return fields
    kept = {
        name: parameters.values[name]
        for name in ROPE_BASE
        if name in parameters and name not in fields
    }
    merged = {**kept, **fields.get_section("rope_scaling").values}
    values = {**fields.values, "rope_parameters": merged, "rope_scaling": None}
    return ConfigFields(values, fields.where)


def _check_mrope(rope: RopeConfig, scaling: ConfigFields) -> None:
    sections, pairs = rope.mrope_sections, rope.rotary_dim // 2
    if sections and (len(sections) != 3 or min(sections) < 0 or sum(sections) != pairs):
        raise scaling.error(
            f"mrope_section={list(sections)} must be 3 numbers with the sum rotary_dim / 2 = {pairs}"
        )


def _read_attention_factor(
    rope_type: str, scaling: ConfigFields, factor: float, original: int
) -> float:
    """The factor of cos and sin."""
    if rope_type in ("yarn", "longrope") and "attention_factor" in scaling:
        return scaling.get_float("attention_factor")
    if rope_type == "yarn":
        mscale, all_dim = scaling.get_float("mscale", 0.0), scaling.get_float("mscale_all_dim", 0.0)
        if mscale and all_dim:
            return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        return yarn_mscale(factor)
    if rope_type == "longrope" and factor > 1 and original > 1:
        return math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0


def read_activation(fields: ConfigFields, default: str, name: str = "hidden_act") -> str:
    """The activation of an MLP."""
    value = fields.get_str(name, default)
    if value not in ACTIVATION_NAMES:
        raise WeightsError(
            f"{name}={value!r} is not supported; supported: {', '.join(ACTIVATION_NAMES)}",
            where=fields.where,
            next="run transformers' own modules: implementation='transformers'",
        )
    return ACTIVATION_NAMES[value]


def read_dtype(fields: ConfigFields) -> torch.dtype:
    """The dtype of the checkpoint; float32 if config.json does not say."""
    name = fields.get_str("dtype", fields.get_str("torch_dtype", "float32"))
    name = name.removeprefix("torch.")
    if name == "float64":  # stored so, computed in float32
        return torch.float32
    if name not in DTYPES:
        raise fields.error(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def read_layer_types(
    fields: ConfigFields,
    count: int,
    default: list[str],
    allowed: tuple[str, ...] = ("full_attention", "sliding_attention"),
) -> list[str]:
    """`layer_types` of the file, or the family's default."""
    types = [str(name) for name in fields.get_list("layer_types")] or default
    if len(types) != count:
        raise fields.error(f"layer_types has {len(types)} entries for {count} layers")
    for kind in types:
        if kind not in allowed:
            raise fields.error(
                f"layer_types: {kind!r} is not supported; supported: {', '.join(allowed)}"
            )
    return types
