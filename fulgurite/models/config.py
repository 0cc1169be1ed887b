"""Model configuration: the fields of a config.json in, frozen dataclasses out.

A family's `read_config` turns config.json fields into one `ModelConfig`. Everything that differs
between layers (sliding window, chunk size, rotary embedding, MoE or dense) is resolved into one
`LayerConfig` per layer, so modules contain no per-family conditions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from fulgurite.errors import WeightsError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
MAX_NUMBER = 1e30  # larger numbers overflow float32 arithmetic
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Value = TypeVar("Value")


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding (RoPE), with its scaling."""

    rope_type: str
    rotary_dim: int
    theta: float
    max_positions: int
    interleaved: bool = False
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    mscale_all_dim: float = 0.0

    @property
    def needs_sequence_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.rope_type == "dynamic" or self.switches_factors

    @property
    def switches_factors(self) -> bool:
        """Whether sequences longer than `original_max_positions` use other factors (LongRoPE)."""
        return self.rope_type == "longrope" and self.short_factors != self.long_factors

    @property
    def softmax_scale_factor(self) -> float:
        """DeepSeek's YaRN also multiplies the softmax scale by this factor."""
        if self.rope_type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


@dataclass(frozen=True)
class AttentionTemperature:
    """Llama 4, layers without RoPE: q *= 1 + attn_scale * log(1 + floor((position + 1) /
    floor_scale)).
    """

    floor_scale: float
    attn_scale: float


@dataclass(frozen=True)
class LayerConfig:
    """The settings that may differ between the layers of a model."""

    rope: RopeConfig | None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    is_moe: bool = False
    attention_temperature: AttentionTemperature | None = None


@dataclass(frozen=True)
class MoEConfig:
    """The MoE layers of a model: sizes, routing and activation."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    renormalize: bool = False
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise WeightsError(f"top_k={self.top_k} must be at most num_experts={self.num_experts}")
        if self.num_experts % self.num_groups or self.topk_groups > self.num_groups:
            raise WeightsError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts}, and "
                f"topk_groups={self.topk_groups} must be at most num_groups"
            )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: keys and values come from a vector of `kv_lora_rank`."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything that a family needs to build its modules."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_positions: int
    activation: str = "silu"
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.float32
    attention_scale: float = 0.0
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.attention_scale == 0.0:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)


class ConfigFields:
    """The fields of a config.json, read by name and type. Errors name the field and the file."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get_int(self, name: str, default: int | None = None, minimum: int = 0) -> int:
        value = self._get_typed(name, int, default)
        if not minimum <= value < 2**63:
            raise self.error(f"{name}={value} must be at least {minimum} and fit into 64 bits")
        return value

    def get_positive_int(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        return self.get_int(name, default, minimum=1)

    def get_float(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            value = self._get_typed(name, float, default)
        if not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise self.error(f"{name}={value} is out of range")
        return float(value)

    def get_positive_float(self, name: str, default: float | None = None) -> float:
        value = self.get_float(name, default)
        if value <= 0:
            raise self.error(f"{name}={value:g} must be greater than 0")
        return value

    def get_bool(self, name: str, default: bool | None = None) -> bool:
        return self._get_typed(name, bool, default)

    def get_str(self, name: str, default: str | None = None) -> str:
        return self._get_typed(name, str, default)

    def get_optional_int(self, name: str) -> int | None:
        return self.get_int(name) if name in self else None

    def get_optional_positive_int(self, name: str) -> int | None:
        return self.get_positive_int(name) if name in self else None

    def get_optional_float(self, name: str) -> float | None:
        return self.get_float(name) if name in self else None

    def get_list(self, name: str) -> tuple[object, ...]:
        return tuple(self._get_typed(name, list, []))

    def get_floats(self, name: str) -> tuple[float, ...]:
        found = []
        for value in self.get_list(name):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self.error(f"{name} must be a list of numbers")
            found.append(float(value))
        return tuple(found)

    def get_ints(self, name: str) -> tuple[int, ...]:
        """An integer or a list of integers, such as eos_token_id."""
        value = self.values.get(name)
        if isinstance(value, int):
            return (value,)
        return tuple(int(number) for number in self.get_floats(name))

    def get_choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.get_str(name, default)
        if value not in allowed:
            raise self.error(f"{name}={value!r} is not supported; supported: {', '.join(allowed)}")
        return value

    def get_section(self, name: str) -> ConfigFields:
        """A nested object; empty if absent."""
        values = self.values.get(name)
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise self.error(f"{name} must be an object, not {values!r}")
        return ConfigFields(values, f"{self.where}, {name}")

    def require(self, name: str, supported: object, default: object = None) -> None:
        """Raise if a field has another value than the only supported one."""
        value = self.values.get(name)
        value = default if value is None else value
        if value != supported:
            raise self.error(f"{name}={value!r} is not supported; supported: {supported!r}")

    def error(self, what: str) -> WeightsError:
        return WeightsError(what, where=self.where)

    def _get_typed(self, name: str, kind: type[Value], default: Value | None) -> Value:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(f"the field {name} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{name} must be of type {kind.__name__}, not {value!r}")
        return value


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's scale of queries and keys for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    interleaved: bool = False,
    layer_type: str | None = None,
    yarn_is_longrope: bool = False,
) -> RopeConfig:
    """Read the rotary embedding from `rope_parameters`, or from `rope_scaling` and `rope_theta`
    (older).

    `layer_type` selects an entry of `rope_parameters` that is keyed by layer type (Gemma 3).
    """
    scaling = fields.get_section(
        "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    )
    if layer_type is not None:
        scaling = scaling.get_section(layer_type)
    rope_type = scaling.get_str("rope_type", scaling.get_str("type", "default"))
    if rope_type == "su" or (rope_type == "yarn" and yarn_is_longrope):
        rope_type = "longrope"
    if rope_type not in ROPE_TYPES:
        raise scaling.error(
            f"rope_type={rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    partial = scaling.get_positive_float(
        "partial_rotary_factor", fields.get_positive_float("partial_rotary_factor", 1.0)
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
    )
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


def read_dtype(fields: ConfigFields) -> torch.dtype:
    """The dtype of the checkpoint; float32 if config.json does not say."""
    name = fields.get_str("dtype", fields.get_str("torch_dtype", "float32"))
    if name not in DTYPES:
        raise fields.error(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def read_layer_types(fields: ConfigFields, count: int, default: list[str]) -> list[str]:
    """`layer_types` of the file, or the family's default."""
    types = [str(name) for name in fields.get_list("layer_types")] or default
    if len(types) != count:
        raise fields.error(f"layer_types has {len(types)} entries for {count} layers")
    return types
