"""Granite 3 and 4, dense and with experts: factors of embedding, attention, residual and logits.

Granite 4's architecture, GraniteMoeHybrid, has attention and Mamba layers. Models whose layers are
all attention are supported. Its shared MLP is in every layer, beside the experts or alone.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.config import ConfigFields, ModelConfig, MoEConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import common
from fulgurite.models.families.common import DOWN_PROJ, GATE_UP_PROJ, HF_LAYER, ROUTER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import (
    GGUF_PERMUTED_ATTENTION,
    build_dense_layer,
    read_dense_config,
)
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import build_moe, topk_then_softmax
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import WeightMapping, slice_first_half, slice_second_half


def read_granite(fields: ConfigFields) -> ModelConfig:
    config = _read_with_factors("granite", fields)
    return replace(config, mlp_bias=fields.get_bool("mlp_bias", False))


def read_granite_moe(fields: ConfigFields) -> ModelConfig:
    return _with_experts(_read_with_factors("granite_moe", fields), fields)


def read_granite_moe_shared(fields: ConfigFields) -> ModelConfig:
    return _with_experts(_read_with_factors("granite_moe_shared", fields), fields, shared=True)


def read_granite_hybrid(fields: ConfigFields) -> ModelConfig:
    config = _read_with_factors("granite_moe_hybrid", fields)
    count = len(config.layers)
    # Absent types are Mamba layers, which `read_layer_types` refuses.
    read_layer_types(fields, count, ["linear_attention"] * count, ("attention", "full_attention"))
    position = fields.get_choice("position_embedding_type", ("rope", "nope"), "nope")
    if position == "nope":
        layers = tuple(replace(layer, rope=None) for layer in config.layers)
        config = replace(config, layers=layers)
    if fields.get_int("num_local_experts", 8):
        return _with_experts(config, fields, shared=True)
    return replace(config, intermediate_size=fields.get_positive_int("shared_intermediate_size"))


def _read_with_factors(name: str, fields: ConfigFields) -> ModelConfig:
    bias = fields.get_bool("attention_bias", False)
    return replace(
        read_dense_config(name, fields),
        qkv_bias=bias,
        o_proj_bias=bias,
        attention_scale=fields.get_positive_float("attention_multiplier", 1.0),
        embedding_scale=fields.get_positive_float("embedding_multiplier", 1.0),
        residual_scale=fields.get_positive_float("residual_multiplier", 1.0),
        logit_scale=1 / fields.get_positive_float("logits_scaling", 1.0),
    )


def _with_experts(config: ModelConfig, fields: ConfigFields, shared: bool = False) -> ModelConfig:
    moe = MoEConfig(
        num_experts=fields.get_positive_int("num_local_experts", 8),
        top_k=fields.get_positive_int("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        shared_intermediate_size=fields.get_int("shared_intermediate_size", 0) if shared else 0,
    )
    layers = tuple(replace(layer, is_moe=True) for layer in config.layers)
    return replace(config, layers=layers, moe=moe)


def build(config: ModelConfig) -> nn.Module:
    return CausalLM(config, [_build_layer(config, index) for index in range(len(config.layers))])


def _build_layer(config: ModelConfig, index: int) -> nn.Module:
    if not config.layers[index].is_moe:
        return build_dense_layer(config, index)
    return PreNormLayer(config, Attention(config, index), build_moe(config, topk_then_softmax))


def _map_shared_mlp(target: str) -> tuple[WeightMapping, ...]:
    source, target = HF_LAYER + "shared_mlp.", f"layers.{{layer}}.{target}."
    return (
        WeightMapping(
            source + "input_linear.weight", target + "gate_proj.weight", slice_first_half
        ),
        WeightMapping(source + "input_linear.weight", target + "up_proj.weight", slice_second_half),
        WeightMapping(source + "output_linear.weight", target + "down_proj.weight"),
    )


_HF_MOE = HF_LAYER + "block_sparse_moe."
_SHARED_WEIGHTS = common.EMBED_NORM_HEAD + common.NORMS + common.ATTENTION
DENSE_WEIGHTS = _SHARED_WEIGHTS + common.MLP
MOE_WEIGHTS = (
    _SHARED_WEIGHTS
    + (
        WeightMapping(_HF_MOE + "router.layer.weight", ROUTER),
        WeightMapping(_HF_MOE + "input_linear.weight", GATE_UP_PROJ),
        WeightMapping(_HF_MOE + "output_linear.weight", DOWN_PROJ),
    )
    + _map_shared_mlp("feed_forward.shared_expert")
)
HYBRID_WEIGHTS = MOE_WEIGHTS + _map_shared_mlp("feed_forward")


def _read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    result = common.read_gguf_fields(fields)
    return result | {
        "attention_multiplier": fields.get_float("attention.scale"),
        "embedding_multiplier": fields.get_float("embedding_scale", 1.0),
        "residual_multiplier": fields.get_float("residual_scale", 1.0),
        "logits_scaling": fields.get_float("logit_scale", 1.0),
        "shared_intermediate_size": fields.get_int("expert_shared_feed_forward_length", 0),
    }


_GGUF_SHARED_WEIGHTS = common.GGUF_EMBED_NORM_HEAD + common.GGUF_NORMS + GGUF_PERMUTED_ATTENTION
GGUF = GGUFMapping(_read_gguf_fields, _GGUF_SHARED_WEIGHTS + common.GGUF_MLP)
GGUF_MOE = GGUFMapping(
    _read_gguf_fields, _GGUF_SHARED_WEIGHTS + common.GGUF_EXPERTS + common.GGUF_SHARED_EXPERT
)

MOE_SHARDING_RULES = common.DENSE_SHARDING | common.EXPERTS_SHARDING

GRANITE = ModelFamily(
    "granite",
    read_granite,
    build,
    DENSE_WEIGHTS,
    gguf=GGUF,
    sharding_rules=common.DENSE_SHARDING,
)
GRANITE_MOE = ModelFamily(
    "granite_moe", read_granite_moe, build, MOE_WEIGHTS, sharding_rules=MOE_SHARDING_RULES
)
GRANITE_MOE_SHARED = ModelFamily(
    "granite_moe_shared",
    read_granite_moe_shared,
    build,
    MOE_WEIGHTS,
    gguf=GGUF_MOE,
    sharding_rules=MOE_SHARDING_RULES,
)
GRANITE_MOE_HYBRID = ModelFamily(
    "granite_moe_hybrid",
    read_granite_hybrid,
    build,
    HYBRID_WEIGHTS,
    sharding_rules=MOE_SHARDING_RULES,
)
