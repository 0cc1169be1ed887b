"""GLM-4 (9B of 2024), GLM-4-0414, GLM-4.5 and GLM-4.7-Flash, and Solar Open.

Half of each head is rotated. The dense models rotate neighbouring dimensions and store fused MLP
projections. GLM-4-0414 has norms before and after each block. GLM-4.5 has the routing and shared
expert of DeepSeek-V3; Flash has its attention, too. Solar Open is GLM-4.5 with whole heads rotated.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families import common
from fulgurite.models.families.common import GGUF_LAYER, HF_LAYER
from fulgurite.models.families.deepseek import (
    DEEPSEEK_V3,
    read_grouped_moe,
    read_mla_config,
)
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import build as build_dense
from fulgurite.models.families.llama import build_dense_layer, read_dense_config
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import build_moe, grouped_sigmoid
from fulgurite.models.residual_layers import PreNormLayer, SandwichLayer
from fulgurite.models.weight_mapping import WeightMapping, slice_first_half, slice_second_half

ROTARY_FACTOR = 0.5


def read_glm(fields: ConfigFields) -> ModelConfig:
    return _read_dense("glm", fields)


def read_glm4(fields: ConfigFields) -> ModelConfig:
    return _read_dense("glm4", fields)


def _read_dense(name: str, fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(head_dim=128, rms_norm_eps=1.5625e-7)
    config = read_dense_config(name, fields, interleaved=True, partial_rotary_factor=ROTARY_FACTOR)
    return replace(config, qkv_bias=fields.get_bool("attention_bias", True))


def read_glm4_moe(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, norm_topk_prob=True, n_shared_experts=1, first_k_dense_replace=1
    )
    config = read_dense_config("glm4_moe", fields, partial_rotary_factor=ROTARY_FACTOR)
    return with_grouped_moe(
        replace(
            config,
            qkv_bias=fields.get_bool("attention_bias", False),
            qk_norm=fields.get_bool("use_qk_norm", False),
        ),
        fields,
    )


def read_glm4_moe_lite(fields: ConfigFields) -> ModelConfig:
    """GLM-4.7-Flash: attention and experts of DeepSeek-V3."""
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, norm_topk_prob=True, n_shared_experts=1, routed_scaling_factor=1.8
    )
    interleaved = fields.get_bool("rope_interleave", True)
    config = read_mla_config("glm4_moe_lite", fields, grouped=True, interleaved=interleaved)
    return with_mlp_layer_types(config, fields, num_dense=1)


def read_solar_open(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, norm_topk_prob=True, n_shared_experts=1, head_dim=128
    )
    config = read_dense_config("solar_open", fields, theta=1_000_000.0)
    bias = fields.get_bool("attention_bias", False)
    config = with_grouped_moe(replace(config, qkv_bias=bias), fields)
    layers = tuple(replace(layer, is_moe=True) for layer in config.layers)
    return replace(config, layers=layers)


def with_mlp_layer_types(config: ModelConfig, fields: ConfigFields, num_dense: int) -> ModelConfig:
    """Experts where `mlp_layer_types` says "sparse"; by default behind the first dense layers."""
    count = len(config.layers)
    types = [str(kind) for kind in fields.get_list("mlp_layer_types")]
    types = types or ["dense" if index < num_dense else "sparse" for index in range(count)]
    if len(types) != count or set(types) - {"dense", "sparse"}:
        raise fields.error(f"mlp_layer_types must be {count} times dense or sparse")
    layers = (
        replace(layer, is_moe=kind == "sparse")
        for layer, kind in zip(config.layers, types, strict=True)
    )
    return replace(config, layers=tuple(layers))


def with_grouped_moe(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """Experts as in DeepSeek-V3, in every layer behind the first dense ones."""
    first = fields.get_int("first_k_dense_replace", 0)
    layers = tuple(replace(layer, is_moe=i >= first) for i, layer in enumerate(config.layers))
    return replace(config, layers=layers, moe=read_grouped_moe(fields))


def build_sandwich(config: ModelConfig) -> nn.Module:
    layers = [
        SandwichLayer(config, Attention(config, index), GatedMLP.from_config(config))
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers)


def build_grouped_moe(config: ModelConfig) -> nn.Module:
    """Attention as in Llama, experts as in DeepSeek-V3: GLM-4.5, dots.llm1."""
    return CausalLM(
        config, [_build_grouped_moe_layer(config, index) for index in range(len(config.layers))]
    )


def _build_grouped_moe_layer(config: ModelConfig, index: int) -> nn.Module:
    if not config.layers[index].is_moe:
        return build_dense_layer(config, index)
    experts = build_moe(config, grouped_sigmoid, correction_bias=True)
    return PreNormLayer(config, Attention(config, index), experts)


_ATTENTION = common.EMBED_NORM_HEAD + common.ATTENTION
SANDWICH_NORMS = common.map_norms(
    HF_LAYER,
    {
        "input_layernorm": "attention_norm",
        "post_self_attn_layernorm": "attention_out_norm",
        "post_attention_layernorm": "feed_forward_norm",
        "post_mlp_layernorm": "feed_forward_out_norm",
    },
)
GROUPED_MOE_WEIGHTS = (
    _ATTENTION
    + common.NORMS
    + common.QK_NORMS
    + common.MLP
    + common.EXPERTS
    + common.SHARED_EXPERTS
    + common.CORRECTION_BIAS
)
# The layer behind the last one is for multi-token prediction (MTP), which is not supported.
IGNORED_MOE = (r"model\.layers\.{num_layers}\..*",)


def read_gguf_rotary_factor(fields: ConfigFields, result: dict[str, object]) -> float:
    """The rotated part of a head."""
    head_dim = int(str(result["head_dim"]))
    return fields.get_positive_int("rope.dimension_count", head_dim) / head_dim


def _read_gguf_dense_fields(fields: ConfigFields) -> dict[str, object]:
    result = common.read_gguf_fields(fields)
    return result | {"partial_rotary_factor": read_gguf_rotary_factor(fields, result)}


def read_gguf_grouped_moe_fields(fields: ConfigFields) -> dict[str, object]:
    """The experts of GLM-4.5 and dots.llm1, and the rotated part of a head.

    `block_count` includes the layers for multi-token prediction.
    """
    result = common.read_gguf_fields(fields)
    layers = fields.get_positive_int("block_count") - fields.get_int("nextn_predict_layers", 0)
    groups = fields.get_int("expert_group_count", 1)
    return result | {
        "num_hidden_layers": layers,
        "partial_rotary_factor": read_gguf_rotary_factor(fields, result),
        "n_routed_experts": fields.get_int("expert_count"),
        "n_shared_experts": fields.get_int("expert_shared_count", 0),
        "first_k_dense_replace": fields.get_int("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.get_float("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.get_bool("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": fields.get_int("expert_group_used_count", groups),
    }


def _read_gguf_glm4_moe_fields(fields: ConfigFields) -> dict[str, object]:
    return read_gguf_grouped_moe_fields(fields) | {
        "attention_bias": fields.get_bool(common.HAS_QKV_BIAS),
        "use_qk_norm": fields.get_bool(common.HAS_QK_NORM),
    }


_FEED_FORWARD = "layers.{layer}.feed_forward."
GGUF_GLM4 = GGUFMapping(
    _read_gguf_dense_fields,
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_ATTENTION
    + common.map_norms(
        GGUF_LAYER,
        {
            "attn_norm": "attention_norm",
            "post_attention_norm": "attention_out_norm",
            "ffn_norm": "feed_forward_norm",
            "post_ffw_norm": "feed_forward_out_norm",
        },
    )
    + (
        WeightMapping(
            GGUF_LAYER + "ffn_up.weight", _FEED_FORWARD + "gate_proj.weight", slice_first_half
        ),
        WeightMapping(
            GGUF_LAYER + "ffn_up.weight", _FEED_FORWARD + "up_proj.weight", slice_second_half
        ),
        WeightMapping(GGUF_LAYER + "ffn_down.weight", _FEED_FORWARD + "down_proj.weight"),
    ),
)
_GGUF_MOE_WEIGHTS = (
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_ATTENTION
    + common.GGUF_QK_NORMS
    + common.GGUF_MLP
    + common.GGUF_EXPERTS
    + common.GGUF_SHARED_EXPERT
    + common.GGUF_CORRECTION_BIAS
)
GGUF_GLM4_MOE = GGUFMapping(
    _read_gguf_glm4_moe_fields,
    _GGUF_MOE_WEIGHTS + common.GGUF_NORMS_AFTER_ATTENTION,
    ignored=(r"blk\.{num_layers}\..*",),
)
GGUF_GROUPED_MOE_WEIGHTS = _GGUF_MOE_WEIGHTS + common.GGUF_NORMS

MOE_SHARDING_RULES = common.DENSE_SHARDING | common.EXPERTS_SHARDING

GLM = ModelFamily(
    "glm",
    read_glm,
    build_dense,
    _ATTENTION + common.NORMS + common.FUSED_GATE_UP_MLP,
    sharding_rules=common.DENSE_SHARDING,
)
GLM4 = ModelFamily(
    "glm4",
    read_glm4,
    build_sandwich,
    _ATTENTION + SANDWICH_NORMS + common.FUSED_GATE_UP_MLP,
    gguf=GGUF_GLM4,
    sharding_rules=common.DENSE_SHARDING,
)
GLM4_MOE = ModelFamily(
    "glm4_moe",
    read_glm4_moe,
    build_grouped_moe,
    GROUPED_MOE_WEIGHTS,
    IGNORED_MOE,
    GGUF_GLM4_MOE,
    MOE_SHARDING_RULES,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3, name="glm4_moe_lite", read_config=read_glm4_moe_lite, gguf=None
)
SOLAR_OPEN = ModelFamily(
    "solar_open",
    read_solar_open,
    build_grouped_moe,
    GROUPED_MOE_WEIGHTS,
    sharding_rules=MOE_SHARDING_RULES,
)
