"""Llama 2 and 3, SmolLM2, Falcon 3: grouped-query attention, half-layout RoPE, gated MLP.

Llama 3.1 adds its own RoPE scaling, which GGUF files
store as a tensor of factors, `rope_freqs.weight`. Other families start from `read_dense_config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import ConfigFields, LayerConfig, ModelConfig
from fulgurite.models.config_readers import read_activation, read_dtype, read_rope
from fulgurite.models.families import common
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.layer_types import SLIDING
from fulgurite.models.layers import CausalLM
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import WeightMapping, unpermute_rope


def read_dense_config(
    name: str,
    fields: ConfigFields,
    theta: float = 10_000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    partial_rotary_factor: float = 1.0,
) -> ModelConfig:
    """The config of a Llama-like model. Families change what differs with `replace`.

    rotary_dim      the rotated dimensions of a head, if `partial_rotary_factor` does not give them
    theta, interleaved, partial_rotary_factor      RoPE of the family, as in `read_rope`
    """
    num_heads = fields.get_positive_int("num_attention_heads")
    hidden_size = fields.get_positive_int("hidden_size")
    head_dim = fields.get_positive_int("head_dim", hidden_size // num_heads)
    num_kv_heads = fields.get_positive_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads={num_heads} must be a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    rope = read_rope(
        fields,
        rotary_dim or head_dim,
        theta=theta,
        interleaved=interleaved,
        partial_rotary_factor=partial_rotary_factor,
    )
    return ModelConfig(
        family=name,
        vocab_size=fields.get_positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.get_int("intermediate_size", 0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerConfig(rope),) * fields.get_positive_int("num_hidden_layers"),
        norm_eps=fields.get_float("rms_norm_eps", 1e-6),
        max_positions=fields.get_positive_int("max_position_embeddings"),
        activation=read_activation(fields, "silu"),
        tie_word_embeddings=fields.get_bool("tie_word_embeddings", False),
        dtype=read_dtype(fields),
        bos_token_id=next(iter(fields.get_ints("bos_token_id")), None),
        eos_token_ids=fields.get_ints("eos_token_id"),
    )


def with_layer_types(config: ModelConfig, types: Sequence[str], window: int | None) -> ModelConfig:
    """Set the sliding window on the layers whose type is "sliding_attention"."""
    layers = (
        replace(layer, sliding_window=window if kind == SLIDING else None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    return replace(config, layers=tuple(layers))


def with_sliding_window(config: ModelConfig, window: int | None) -> ModelConfig:
    """Set the same sliding window on every layer."""
    return replace(
        config, layers=tuple(replace(layer, sliding_window=window) for layer in config.layers)
    )


def read_llama(fields: ConfigFields) -> ModelConfig:
    bias = fields.get_bool("attention_bias", False)
    return replace(
        read_dense_config("llama", fields),
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=fields.get_bool("mlp_bias", False),
    )


def build(config: ModelConfig) -> nn.Module:
    return CausalLM(
        config, [build_dense_layer(config, index) for index in range(len(config.layers))]
    )


def build_dense_layer(config: ModelConfig, index: int) -> nn.Module:
    return PreNormLayer(config, Attention(config, index), GatedMLP.from_config(config))


WEIGHT_MAPPINGS = common.EMBED_NORM_HEAD + common.NORMS + common.ATTENTION + common.MLP
IGNORED = (r".*\.rotary_emb\.inv_freq",)

GGUF_PERMUTED_ATTENTION = tuple(
    WeightMapping(mapping.source, mapping.target, unpermute_rope)
    if "attn_q." in mapping.source or "attn_k." in mapping.source
    else mapping
    for mapping in common.GGUF_ATTENTION
)


def read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    """GGUF metadata as config.json fields.

    Files store Llama 3's RoPE scaling as divisors. That is LongRoPE with the same short and long
    factors.
    """
    result = common.read_gguf_fields(fields)
    if "rope_freqs" in fields:
        factors = list(fields.get_list("rope_freqs"))
        result["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    return result


GGUF = GGUFMapping(
    read_config_fields=read_gguf_fields,
    weights=common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_NORMS
    + GGUF_PERMUTED_ATTENTION
    + common.GGUF_MLP,
)

SHARDING_RULES = common.DENSE_SHARDING

LLAMA = ModelFamily("llama", read_llama, build, WEIGHT_MAPPINGS, IGNORED, GGUF, SHARDING_RULES)
