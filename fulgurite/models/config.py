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
# How hidden states are normalized: `ModelConfig.norm_type`.
RMS_NORM, LAYER_NORM, LAYER_NORM_WITHOUT_BIAS = "rms_norm", "layer_norm", "layer_norm_without_bias"
MAX_NUMBER = 1e30  # larger numbers overflow float32 arithmetic
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Value = TypeVar("Value")


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding (RoPE), with its scaling.

    `mrope_sections` (multimodal models): how many pairs rotate by the time, the height and the width
    of a token's position. With `mrope_interleaved` the three alternate; otherwise they follow each
    other. All three are equal for text.
    """

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
    long_attention_factor: float | None = None
    mrope_sections: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    @property
    def needs_sequence_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.rope_type == "dynamic" or self.switches_factors

    @property
    def switches_factors(self) -> bool:
        """Whether sequences longer than `original_max_positions` use other factors (LongRoPE)."""
        is_same = self.short_factors == self.long_factors and self.long_attention_factor is None
        return self.rope_type == "longrope" and not is_same

    @property
    def softmax_scale_factor(self) -> float:
        """DeepSeek's YaRN also multiplies the softmax scale by this factor."""
        if self.rope_type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


@dataclass(frozen=True)
class AttentionTemperature:
    """q *= 1 + attn_scale * log(1 + floor((position + offset) / floor_scale)).

    Llama 4 uses it in layers without RoPE (offset 1), Ministral 3 in every layer (offset 0).
    """

    floor_scale: float
    attn_scale: float
    offset: int = 1


@dataclass(frozen=True)
class LayerConfig:
    """The settings that may differ between the layers of a model."""

    rope: RopeConfig | None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    is_moe: bool = False
    is_linear_attention: bool = False
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
    shared_expert_gate: bool = False
    jitter_eps: float = 0.0
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
class LinearAttentionConfig:
    """The layers with linear attention (gated DeltaNet), or with a short convolution only."""

    conv_taps: int
    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_key_heads and self.num_value_heads % self.num_key_heads:
            raise WeightsError(
                f"linear_num_value_heads={self.num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.num_key_heads}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Everything that a family needs to build its modules.

    norm_type           "rms_norm", "layer_norm" or "layer_norm_without_bias"
    qk_norm_scope       "head": each head by itself; "projection": all heads of a token at once
    qk_norm_after_rope  whether queries and keys are normalized after the rotation
    qkv_clip            queries, keys and values are clamped to plus and minus this
    attention_output_gate    attention outputs are multiplied by sigmoid(gate_proj(x))
    residual_scale      the factor of a block's output when it is added to the residual
    logit_scale         the factor of the logits, before the soft cap
    """

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
    qk_norm_scope: str = "head"
    qk_norm_after_rope: bool = False
    qkv_clip: float | None = None
    attention_output_gate: bool = False
    norm_type: str = RMS_NORM
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    lm_head_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    linear_attention: LinearAttentionConfig | None = None
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

    def with_defaults(self, **defaults: object) -> ConfigFields:
        """The fields, with these values for those that are absent."""
        missing = {name: value for name, value in defaults.items() if name not in self}
        return ConfigFields({**self.values, **missing}, self.where)

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
