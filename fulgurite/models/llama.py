"""Llama 2 and 3, SmolLM2 and Mistral: grouped-query attention, half-layout RoPE, gated MLP.

Mistral adds a sliding window on every layer; Llama 3.1 a rope scaling of its own. Llama 3's GGUF
files keep that scaling as a tensor of factors, `rope_freqs.weight`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models import family
from fulgurite.models.config import (
    ACTIVATIONS,
    Fields,
    LayerConfig,
    ModelConfig,
    read_dtype,
    read_rope,
)
from fulgurite.models.family import Family, GGUFTable, Rule
from fulgurite.models.layers import Attention, Decoder, GatedMLP, PreNormLayer


def read_dense_config(
    name: str, fields: Fields, theta: float = 10_000.0, rotary: int | None = None
) -> ModelConfig:
    """The fields that Llama-like families share; they change what differs with `replace`.

    `rotary`: how much of a head turns, where it is not what `partial_rotary_factor` says.
    """
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    head_dim = fields.size("head_dim", hidden // heads)
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(f"{heads} query heads can't share {kv_heads} key heads evenly")
    rope = read_rope(fields, rotary or head_dim, theta=theta)
    return ModelConfig(
        family=name,
        vocabulary=fields.size("vocab_size"),
        hidden=hidden,
        inner=fields.integer("intermediate_size", 0),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=(LayerConfig(rope),) * fields.integer("num_hidden_layers"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.size("max_position_embeddings"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        tied=fields.boolean("tie_word_embeddings", False),
        dtype=read_dtype(fields),
        bos_token_id=next(iter(fields.integers("bos_token_id")), None),
        eos_token_ids=fields.integers("eos_token_id"),
    )


def with_window(config: ModelConfig, window: int | None) -> ModelConfig:
    """The same sliding window on every layer."""
    return replace(config, layers=tuple(replace(layer, window=window) for layer in config.layers))


def read_llama(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return replace(
        read_dense_config("llama", fields),
        query_bias=bias,
        output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def read_mistral(fields: Fields) -> ModelConfig:
    config = read_dense_config("mistral", fields)
    return with_window(config, fields.optional_size("sliding_window"))


def build(config: ModelConfig) -> nn.Module:
    return Decoder(config, [dense_layer(config, index) for index in range(len(config.layers))])


def dense_layer(config: ModelConfig, index: int) -> nn.Module:
    mlp = GatedMLP(config.hidden, config.inner, config.activation, config.mlp_bias)
    return PreNormLayer(config, Attention(config, index), mlp)


WEIGHTS = family.OUTSIDE_LAYERS + family.NORMS + family.ATTENTION + family.MLP
IGNORED = (r".*\.rotary_emb\.inv_freq",)

PERMUTED_ATTENTION = tuple(
    Rule(rule.source, rule.target, family.half_from_interleaved)
    if "attn_q." in rule.source or "attn_k." in rule.source
    else rule
    for rule in family.GGUF_ATTENTION
)


def gguf_fields(fields: Fields) -> dict[str, object]:
    """Llama 3's scaling is kept as divisors: LongRoPE with the same factors at any length."""
    result = family.gguf_fields(fields)
    if "rope_freqs" in fields:
        factors = list(fields.sequence("rope_freqs"))
        result["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    return result


GGUF = GGUFTable(
    read_fields=gguf_fields,
    weights=family.GGUF_OUTSIDE_LAYERS + family.GGUF_NORMS + PERMUTED_ATTENTION + family.GGUF_MLP,
)

PLAN = family.DENSE_PLAN

LLAMA = Family("llama", read_llama, build, WEIGHTS, IGNORED, GGUF, PLAN)
MISTRAL = Family("mistral", read_mistral, build, WEIGHTS, IGNORED, plan=PLAN)
