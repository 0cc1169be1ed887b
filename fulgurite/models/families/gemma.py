"""Gemma 1, 2 and 3 (text): norm weights are stored minus 1; Gemma 2 and 3 have sandwich norms.

Gemma 2 has a sliding window on every other layer, and soft caps on attention scores and logits.
Gemma 3 has QK norms instead of soft caps. Most of its layers have a sliding window and a local
RoPE; every sixth layer has full attention and a global RoPE.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import ConfigFields, LayerConfig, ModelConfig
from fulgurite.models.config_readers import read_activation, read_layer_types
from fulgurite.models.families import common
from fulgurite.models.families.common import GGUF_LAYER, HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.layer_types import read_ropes_by_layer_type
from fulgurite.models.families.llama import read_dense_config
from fulgurite.models.layers import CausalLM
from fulgurite.models.residual_layers import PreNormLayer, SandwichLayer
from fulgurite.models.weight_mapping import WeightMapping, subtract_one

NORM_OFFSET = 1.0
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
DEFAULT_SLIDING_WINDOW_PATTERN = 6
ATTENTION_SOFTCAP, LOGIT_SOFTCAP = 50.0, 30.0  # of Gemma 2


def read_gemma(fields: ConfigFields) -> ModelConfig:
    fields.require("use_bidirectional_attention", False, default=False)
    fields = fields.with_defaults(
        # Early files name the exact GELU; the models were trained with the approximation.
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        head_dim=256,
    )
    config = read_dense_config("gemma", fields)
    activation = read_activation(fields, "gelu_pytorch_tanh", "hidden_activation")
    bias = fields.get_bool("attention_bias", False)
    return replace(
        config,
        activation=activation,
        embedding_scale=config.hidden_size**0.5,
        qkv_bias=bias,
        o_proj_bias=bias,
    )


def read_gemma2(fields: ConfigFields) -> ModelConfig:
    fields.require("use_bidirectional_attention", False, default=False)
    config = read_dense_config("gemma2", fields)
    count = len(config.layers)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    types = read_layer_types(fields, count, default)
    window = fields.get_positive_int("sliding_window", 4096)
    layers = tuple(
        replace(layer, sliding_window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    return replace(
        _apply_gemma_fields(replace(config, layers=layers), fields),
        attention_softcap=fields.get_cap("attn_logit_softcapping", ATTENTION_SOFTCAP),
        logit_softcap=fields.get_cap("final_logit_softcapping", LOGIT_SOFTCAP),
    )


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    fields.require("use_bidirectional_attention", False, default=False)
    fields.require("attn_logit_softcapping", None)
    # Published files may omit fields with these default values.
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    defaults |= {"max_position_embeddings": 131_072, "vocab_size": 262_208}
    fields = ConfigFields({**defaults, **fields.values}, fields.where)
    fields_without_rope = ConfigFields(
        {key: value for key, value in fields.values.items() if not key.startswith("rope_")},
        fields.where,
    )
    config = read_dense_config("gemma3", fields_without_rope)
    count = len(config.layers)
    pattern = fields.get_positive_int("sliding_window_pattern", DEFAULT_SLIDING_WINDOW_PATTERN)
    default = [
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
        for index in range(count)
    ]
    types = read_layer_types(fields, count, default)
    local_theta = fields.get_float("rope_local_base_freq", LOCAL_THETA)
    ropes = read_ropes_by_layer_type(fields, config.head_dim, GLOBAL_THETA, local_theta)
    window = fields.get_positive_int("sliding_window", 4096)
    layers = tuple(
        LayerConfig(ropes[kind], window if kind == "sliding_attention" else None) for kind in types
    )
    return replace(_apply_gemma_fields(config, fields), layers=layers, qk_norm=True)


def _apply_gemma_fields(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.get_bool("attention_bias", False)
    return replace(
        config,
        activation=read_activation(fields, "gelu_pytorch_tanh", "hidden_activation"),
        tie_word_embeddings=fields.get_bool("tie_word_embeddings", True),
        attention_scale=fields.get_positive_float("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=fields.get_optional_float("final_logit_softcapping"),
        embedding_scale=config.hidden_size**0.5,
        qkv_bias=bias,
        o_proj_bias=bias,
    )


def build_pre_norm(config: ModelConfig) -> nn.Module:
    layers = [
        PreNormLayer(
            config, Attention(config, index), GatedMLP.from_config(config), norm_offset=NORM_OFFSET
        )
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers, norm_offset=NORM_OFFSET)


def build(config: ModelConfig) -> nn.Module:
    layers = [
        SandwichLayer(
            config,
            Attention(config, index, norm_offset=NORM_OFFSET),
            GatedMLP.from_config(config),
            norm_offset=NORM_OFFSET,
        )
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers, norm_offset=NORM_OFFSET)


def _map_norms(layer: str, names: tuple[str, str, str, str]) -> tuple[WeightMapping, ...]:
    norms = ("attention_norm", "attention_out_norm", "feed_forward_norm", "feed_forward_out_norm")
    return tuple(
        WeightMapping(f"{layer}{name}.weight", f"layers.{{layer}}.{norm}.weight")
        for name, norm in zip(names, norms, strict=True)
    )


WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD
    + common.ATTENTION
    + common.QK_NORMS
    + common.MLP
    + _map_norms(
        HF_LAYER,
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    )
)
_GGUF_TENSORS = (
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_ATTENTION
    + common.GGUF_QK_NORMS
    + common.GGUF_MLP
    + _map_norms(GGUF_LAYER, ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"))
)


def _read_gguf3_fields(fields: ConfigFields) -> dict[str, object]:
    """GGUF files store no query scale. It is the head size, or hidden_size / num_heads for the 27B
    model.
    """
    result = common.read_gguf_fields(fields)
    hidden_size = fields.get_positive_int("embedding_length")
    num_heads = fields.get_positive_int("attention.head_count")
    is_27b = fields.get_int("block_count") == 62
    return result | {
        "sliding_window": fields.get_int("attention.sliding_window"),
        "query_pre_attn_scalar": hidden_size // num_heads if is_27b else result["head_dim"],
    }


def _read_gguf2_fields(fields: ConfigFields) -> dict[str, object]:
    """As for Gemma 3, but the 27B model has 46 layers, and there are soft caps."""
    result = common.read_gguf_fields(fields)
    hidden_size = fields.get_positive_int("embedding_length")
    num_heads = fields.get_positive_int("attention.head_count")
    is_27b = fields.get_int("block_count") == 46
    return result | {
        "sliding_window": fields.get_int("attention.sliding_window"),
        "query_pre_attn_scalar": hidden_size // num_heads if is_27b else result["head_dim"],
        "attn_logit_softcapping": fields.get_optional_float("attn_logit_softcapping"),
        "final_logit_softcapping": fields.get_optional_float("final_logit_softcapping"),
    }


def _without_offset(mappings: tuple[WeightMapping, ...]) -> tuple[WeightMapping, ...]:
    return tuple(
        WeightMapping(mapping.source, mapping.target, subtract_one)
        if "norm" in mapping.target
        else mapping
        for mapping in mappings
    )


GGUF_WEIGHT_MAPPINGS = _without_offset(_GGUF_TENSORS)
GGUF1 = GGUFMapping(
    common.read_gguf_fields,
    _without_offset(
        common.GGUF_EMBED_NORM_HEAD + common.GGUF_NORMS + common.GGUF_ATTENTION + common.GGUF_MLP
    ),
)
IGNORED = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")

GGUF2 = GGUFMapping(_read_gguf2_fields, GGUF_WEIGHT_MAPPINGS)
GGUF3 = GGUFMapping(_read_gguf3_fields, GGUF_WEIGHT_MAPPINGS)
SHARDING_RULES = common.DENSE_SHARDING

GEMMA = ModelFamily(
    "gemma",
    read_gemma,
    build_pre_norm,
    common.EMBED_NORM_HEAD + common.NORMS + common.ATTENTION + common.MLP,
    gguf=GGUF1,
    sharding_rules=SHARDING_RULES,
)
GEMMA2 = ModelFamily(
    "gemma2", read_gemma2, build, WEIGHT_MAPPINGS, gguf=GGUF2, sharding_rules=SHARDING_RULES
)
GEMMA3 = ModelFamily("gemma3", read_gemma3, build, WEIGHT_MAPPINGS, IGNORED, GGUF3, SHARDING_RULES)
