"""What a model is, as values: config.json fields in, frozen dataclasses out.

A family's `read_config` turns the fields of a checkpoint's config.json into one `ModelConfig`. All
that differs from layer to layer (window, chunk, rotary embedding, experts or not) is resolved here
into one `LayerConfig` a layer, so that modules never ask "which kind am I?".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from fulgurite.errors import WeightsError

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
MOST = 1e30  # of a number: float32 can compute with it
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Value = TypeVar("Value")


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding: how fast each pair of dimensions turns with the position."""

    kind: str
    dim: int
    theta: float
    max_positions: int
    interleaved: bool = False
    factor: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    mscale_all_dim: float = 0.0

    @property
    def needs_extent(self) -> bool:
        """Whether the frequencies depend on how long the whole sequence is."""
        return self.kind == "dynamic" or self.switches

    @property
    def switches(self) -> bool:
        """Whether a sequence past `original_positions` is turned by other factors."""
        return self.kind == "longrope" and self.short_factors != self.long_factors

    @property
    def softmax_factor(self) -> float:
        """DeepSeek's YaRN also sharpens the softmax, by this factor on the attention scale."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_magnitude(self.factor, self.mscale_all_dim) ** 2


@dataclass(frozen=True)
class TemperatureConfig:
    """Llama 4 without RoPE: a query times 1 + scale * log(1 + floor((position + 1) / floor))."""

    floor: float
    scale: float


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between the layers of one model."""

    rope: RopeConfig | None
    window: int | None = None
    chunk: int | None = None
    experts: bool = False
    temperature: TemperatureConfig | None = None


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: how many, how wide, and the numbers of its routing rule."""

    count: int
    per_token: int
    inner: int
    shared_inner: int = 0
    renormalise: bool = False
    scaling: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    gate_alpha: float = 1.702
    gate_limit: float = 7.0

    def __post_init__(self) -> None:
        if self.per_token > self.count:
            raise WeightsError(f"{self.per_token} of {self.count} experts can't be chosen")
        if self.count % self.groups or self.groups_kept > self.groups:
            raise WeightsError(
                f"{self.groups_kept} of {self.groups} groups of {self.count} experts can't be kept"
            )


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention: one compressed vector of `rank` and a rotary key stand for all heads."""

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything a family needs to build its modules."""

    family: str
    vocabulary: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_positions: int
    activation: str = "silu"
    tied: bool = False
    dtype: torch.dtype = torch.float32
    attention_scale: float = 0.0
    query_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.attention_scale == 0.0:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)


class Fields:
    """The fields of a config.json, read by name and type; an error names the field and the file."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        value = self._typed(name, int, default)
        if not least <= value < 2**63:
            raise self.error(f"{name}={value} must be {least} or more, and fit into 64 bits")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """How many there are of something of which there has to be one."""
        return self.integer(name, default, least=1)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            value = self._typed(name, float, default)
        if not -MOST <= value <= MOST:
            raise self.error(f"{name}={value} is no number to compute with")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self.error(f"{name}={value:g} must be more than 0")
        return value

    def boolean(self, name: str, default: bool | None = None) -> bool:
        return self._typed(name, bool, default)

    def text(self, name: str, default: str | None = None) -> str:
        return self._typed(name, str, default)

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if name in self else None

    def optional_size(self, name: str) -> int | None:
        return self.size(name) if name in self else None

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def sequence(self, name: str) -> tuple[object, ...]:
        return tuple(self._typed(name, list, []))

    def numbers(self, name: str) -> tuple[float, ...]:
        found = []
        for value in self.sequence(name):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self.error(f"{name} must be a list of numbers")
            found.append(float(value))
        return tuple(found)

    def integers(self, name: str) -> tuple[int, ...]:
        """An integer or a list of integers, as eos_token_id is."""
        value = self.values.get(name)
        if isinstance(value, int):
            return (value,)
        return tuple(int(number) for number in self.numbers(name))

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.text(name, default)
        if value not in allowed:
            raise self.error(f"{name}={value!r} is not supported; known: {', '.join(allowed)}")
        return value

    def section(self, name: str) -> Fields:
        """A nested object; an absent one is empty."""
        values = self.values.get(name)
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise self.error(f"{name} must be an object, not {values!r}")
        return Fields(values, f"{self.where}, {name}")

    def require(self, name: str, wanted: object, default: object = None) -> None:
        """Refuse a field whose value asks for something that is not built here."""
        value = self.values.get(name)
        value = default if value is None else value
        if value != wanted:
            raise self.error(f"{name}={value!r} is not supported; only {wanted!r} is")

    def error(self, what: str) -> WeightsError:
        return WeightsError(what, where=self.where)

    def _typed(self, name: str, kind: type[Value], default: Value | None) -> Value:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(f"the field {name} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{name} must be of type {kind.__name__}, not {value!r}")
        return value


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN enlarges queries and keys when it stretches the context by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(
    fields: Fields,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    interleaved: bool = False,
    layer_type: str | None = None,
    yarn_is_longrope: bool = False,
) -> RopeConfig:
    """The rotary embedding from `rope_parameters` (new) or `rope_scaling` with `rope_theta` (old).

    `layer_type` picks an entry of rope_parameters where it is keyed by layer type (Gemma 3).
    """
    scaling = fields.section("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    if layer_type is not None:
        scaling = scaling.section(layer_type)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "su" or (kind == "yarn" and yarn_is_longrope):
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise scaling.error(f"rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    partial = scaling.positive(
        "partial_rotary_factor", fields.positive("partial_rotary_factor", 1.0)
    )
    max_positions = fields.size("max_position_embeddings")
    original = fields.optional_size("original_max_position_embeddings")
    if original is None:
        original = scaling.size("original_max_position_embeddings", max_positions)
    if kind in ("linear", "dynamic", "llama3"):
        factor = scaling.positive("factor")
    else:
        factor = scaling.positive("factor", max_positions / original)
    rope = RopeConfig(
        kind=kind,
        dim=int(head_dim * partial),
        theta=scaling.positive("rope_theta", fields.positive("rope_theta", theta)),
        max_positions=max_positions,
        interleaved=interleaved,
        factor=factor,
        original_positions=original,
        attention_factor=_attention_factor(kind, scaling, factor, original),
        beta_fast=scaling.positive("beta_fast", 32.0),
        beta_slow=scaling.positive("beta_slow", 1.0),
        truncate=scaling.boolean("truncate", True),
        low_frequency_factor=scaling.number("low_freq_factor", 1.0),
        high_frequency_factor=scaling.number("high_freq_factor", 4.0),
        short_factors=scaling.numbers("short_factor"),
        long_factors=scaling.numbers("long_factor"),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
    )
    if not 2 <= rope.dim <= head_dim or rope.dim % 2:
        raise scaling.error(f"{rope.dim} of {head_dim} dimensions of a head can't turn in pairs")
    if kind in ("yarn", "longrope") and (rope.theta == 1 or original == 1):
        raise scaling.error(f"a {kind} rotary embedding divides by log(1) with these numbers")
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if kind == "longrope" and len(factors) != rope.dim // 2:
            raise scaling.error(f"{name} has {len(factors)} numbers, {rope.dim // 2} are needed")
    return rope


def _attention_factor(kind: str, scaling: Fields, factor: float, original: int) -> float:
    """What cos and sin are multiplied with."""
    if kind in ("yarn", "longrope") and "attention_factor" in scaling:
        return scaling.number("attention_factor")
    if kind == "yarn":
        mscale, all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
        if mscale and all_dim:
            return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
        return yarn_magnitude(factor)
    if kind == "longrope" and factor > 1 and original > 1:
        return math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0


def read_dtype(fields: Fields) -> torch.dtype:
    """The dtype a checkpoint says it is in; float32 where it says nothing."""
    name = fields.text("dtype", fields.text("torch_dtype", "float32"))
    if name not in DTYPES:
        raise fields.error(f"dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def read_layer_types(fields: Fields, count: int, default: list[str]) -> list[str]:
    """`layer_types` where the file has it, else what the family means by leaving it out."""
    types = [str(name) for name in fields.sequence("layer_types")] or default
    if len(types) != count:
        raise fields.error(f"layer_types has {len(types)} entries for {count} layers")
    return types
