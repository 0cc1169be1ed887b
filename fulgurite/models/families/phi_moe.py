"""Phi-3.5-MoE: sparsemixer routing, LayerNorm, biases, LongRoPE with two attention factors."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.config import LAYER_NORM, ConfigFields, ModelConfig, MoEConfig, RopeConfig
from fulgurite.models.families import common, mixtral
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.llama import read_dense_config, with_sliding_window
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import build_moe, sparsemixer
from fulgurite.models.residual_layers import PreNormLayer


def read_config(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    fields.require("num_experts_per_tok", 2, default=2)  # sparsemixer is defined for two
    config = read_dense_config("phi_moe", fields, theta=1_000_000.0)
    bias = fields.get_bool("attention_bias", False)
    moe = MoEConfig(
        num_experts=fields.get_positive_int("num_local_experts", 16),
        top_k=2,
        intermediate_size=config.intermediate_size,
        jitter_eps=fields.get_float("router_jitter_noise", 0.01),
    )
    layers = tuple(
        replace(layer, is_moe=True, rope=_with_attention_factors(layer.rope, fields))
        for layer in config.layers
    )
    config = replace(
        config,
        layers=layers,
        moe=moe,
        norm_type=LAYER_NORM,
        qkv_bias=bias,
        o_proj_bias=bias,
        lm_head_bias=fields.get_bool("lm_head_bias", False),
    )
    return with_sliding_window(config, fields.get_optional_positive_int("sliding_window"))


def _with_attention_factors(rope: RopeConfig | None, fields: ConfigFields) -> RopeConfig | None:
    """`short_mscale` and `long_mscale` scale cos and sin, instead of LongRoPE's own factor."""
    if rope is None or rope.rope_type != "longrope":
        return rope
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    scaling = fields.get_section(name)
    short, long = scaling.get_float("short_mscale"), scaling.get_float("long_mscale")
    return replace(
        rope, attention_factor=short, long_attention_factor=None if long == short else long
    )


def build(config: ModelConfig) -> nn.Module:
    layers = [
        PreNormLayer(config, Attention(config, index), build_moe(config, sparsemixer))
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers)


WEIGHT_MAPPINGS = mixtral.WEIGHT_MAPPINGS + common.NORM_BIASES + common.LM_HEAD_BIAS
SHARDING_RULES = common.DENSE_SHARDING | common.EXPERTS_SHARDING

PHI_MOE = ModelFamily("phi_moe", read_config, build, WEIGHT_MAPPINGS, sharding_rules=SHARDING_RULES)
