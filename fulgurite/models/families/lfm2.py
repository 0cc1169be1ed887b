"""LFM2: most layers are gated short convolutions, the others grouped-query attention with QK norm."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import ConfigFields, LinearAttentionConfig, ModelConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import common
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.llama import read_dense_config
from fulgurite.models.layers import CausalLM
from fulgurite.models.linear_attention import ShortConv
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import WeightMapping, transpose_conv

LAYER_TYPES = ("conv", "full_attention")


def read_config(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_values(rms_norm_eps=fields.get_float("norm_eps", 1e-5))
    fields = fields.with_defaults(
        tie_word_embeddings=fields.get_bool("tie_embedding", True),
        rope_theta=1_000_000.0,
    )
    config = replace(
        read_dense_config("lfm2", fields),
        intermediate_size=_read_intermediate_size(fields),
        qk_norm=True,
        linear_attention=LinearAttentionConfig(
            conv_taps=fields.get_positive_int("conv_L_cache", 3),
            conv_bias=fields.get_bool("conv_bias", False),
        ),
    )
    count = len(config.layers)
    attention = fields.get_ints("full_attn_idxs") or range(count)
    default = [LAYER_TYPES[index in attention] for index in range(count)]
    types = read_layer_types(fields, count, default, LAYER_TYPES)
    layers = tuple(
        replace(layer, rope=None, is_linear_attention=True) if kind == "conv" else layer
        for layer, kind in zip(config.layers, types, strict=True)
    )
    return replace(config, layers=layers)


def _read_intermediate_size(fields: ConfigFields) -> int:
    size = fields.get_positive_int("block_ff_dim", fields.get_positive_int("intermediate_size"))
    if not fields.get_bool("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" not in fields and "block_ffn_dim_multiplier" in fields.values:
        return size  # null in the file
    size = int(fields.get_positive_float("block_ffn_dim_multiplier", 1.0) * size)
    multiple = fields.get_positive_int("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def build(config: ModelConfig) -> nn.Module:
    return CausalLM(config, [_build_layer(config, index) for index in range(len(config.layers))])


def _build_layer(config: ModelConfig, index: int) -> nn.Module:
    is_conv = config.layers[index].is_linear_attention
    mixer = ShortConv(config, index) if is_conv else Attention(config, index)
    return PreNormLayer(config, mixer, GatedMLP.from_config(config))


def _map(source: str, target: str, *kinds: str) -> tuple[WeightMapping, ...]:
    return tuple(
        WeightMapping(f"{common.HF_LAYER}{source}.{kind}", f"layers.{{layer}}.{target}.{kind}")
        for kind in kinds
    )


WEIGHT_MAPPINGS = (
    WeightMapping("model.embed_tokens.weight", "embed_tokens.weight"),
    WeightMapping("model.embedding_norm.weight", "norm.weight"),
    WeightMapping("lm_head.weight", "lm_head.weight"),
    *_map("operator_norm", "attention_norm", "weight"),
    *_map("ffn_norm", "feed_forward_norm", "weight"),
    *_map("self_attn.q_proj", "attention.q_proj", "weight"),
    *_map("self_attn.k_proj", "attention.k_proj", "weight"),
    *_map("self_attn.v_proj", "attention.v_proj", "weight"),
    *_map("self_attn.out_proj", "attention.o_proj", "weight"),
    *_map("self_attn.q_layernorm", "attention.q_norm", "weight"),
    *_map("self_attn.k_layernorm", "attention.k_norm", "weight"),
    *_map("conv.in_proj", "attention.in_proj", "weight", "bias"),
    *_map("conv.out_proj", "attention.out_proj", "weight", "bias"),
    *_map("conv.conv", "attention.conv", "bias"),
    WeightMapping(
        common.HF_LAYER + "conv.conv.weight", "layers.{layer}.attention.conv.weight", transpose_conv
    ),
    *_map("feed_forward.w1", "feed_forward.gate_proj", "weight"),
    *_map("feed_forward.w3", "feed_forward.up_proj", "weight"),
    *_map("feed_forward.w2", "feed_forward.down_proj", "weight"),
)
SHARDING_RULES = common.DENSE_SHARDING | {"layers.*.attention.out_proj": "output"}

LFM2 = ModelFamily("lfm2", read_config, build, WEIGHT_MAPPINGS, sharding_rules=SHARDING_RULES)
