"""Qwen2 (QKV bias), Qwen3 (QK norm instead of bias), Qwen2-MoE (gated shared expert), Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.config import ConfigFields, ModelConfig, MoEConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import common
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.layer_types import SLIDING
from fulgurite.models.families.llama import build as build_dense
from fulgurite.models.families.llama import (
    build_dense_layer,
    read_dense_config,
    with_layer_types,
    with_sliding_window,
)
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import build_moe as build_moe_block
from fulgurite.models.moe import softmax_then_topk
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import WeightMapping, as_row


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    config = replace(read_dense_config("qwen2", fields), qkv_bias=True)
    return _apply_layer_types(config, fields)


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    return _apply_layer_types(_read_with_qk_norm("qwen3", fields), fields)


def read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    config = _read_with_qk_norm("qwen3_moe", fields)
    if fields.get_bool("use_sliding_window", False):
        config = with_sliding_window(config, fields.get_optional_positive_int("sliding_window"))
    return _apply_moe_fields(config, fields)


def read_qwen2_moe(fields: ConfigFields) -> ModelConfig:
    config = read_dense_config("qwen2_moe", fields)
    config = replace(config, qkv_bias=fields.get_bool("qkv_bias", True))
    count = len(config.layers)
    windowed = fields.get_bool("use_sliding_window", False)
    last = fields.get_int("max_window_layers", 28) if windowed else 0
    default = [SLIDING if i % 2 == 0 and i < last else "full_attention" for i in range(count)]
    types = read_layer_types(fields, count, default)
    window = fields.get_positive_int("sliding_window", 4096) if SLIDING in types else None
    config = _apply_moe_fields(with_layer_types(config, types, window), fields)
    assert config.moe is not None, "just read"
    shared_size = fields.get_positive_int("shared_expert_intermediate_size")
    moe = replace(config.moe, shared_intermediate_size=shared_size, shared_expert_gate=True)
    return replace(config, moe=moe)


def _apply_moe_fields(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    dense = {int(index) for index in fields.get_floats("mlp_only_layers")}
    step = fields.get_positive_int("decoder_sparse_step", 1)
    layers = tuple(
        replace(layer, is_moe=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(config.layers)
    )
    moe = MoEConfig(
        num_experts=fields.get_positive_int(
            "num_experts", fields.get_positive_int("num_local_experts", 128)
        ),
        top_k=fields.get_positive_int("num_experts_per_tok"),
        intermediate_size=fields.get_positive_int("moe_intermediate_size"),
        renormalize=fields.get_bool("norm_topk_prob", False),
    )
    return replace(config, layers=layers, moe=moe)


def _read_with_qk_norm(name: str, fields: ConfigFields) -> ModelConfig:
    bias = fields.get_bool("attention_bias", False)
    config = read_dense_config(name, fields)
    return replace(config, qk_norm=True, qkv_bias=bias, o_proj_bias=bias)


def _apply_layer_types(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """Set the sliding window on layers from `max_window_layers` on, or as `layer_types` says."""
    count = len(config.layers)
    windowed = fields.get_bool("use_sliding_window", False) and "sliding_window" in fields
    first = fields.get_int("max_window_layers", count) if windowed else count
    default = ["full_attention"] * first + ["sliding_attention"] * (count - first)
    types = read_layer_types(fields, count, default[:count])
    window = fields.get_optional_positive_int("sliding_window")
    return with_layer_types(config, types, window)


def build_moe(config: ModelConfig) -> nn.Module:
    return CausalLM(
        config, [_build_moe_layer(config, index) for index in range(len(config.layers))]
    )


def _build_moe_layer(config: ModelConfig, index: int) -> nn.Module:
    if not config.layers[index].is_moe:
        return build_dense_layer(config, index)
    return PreNormLayer(
        config, Attention(config, index), build_moe_block(config, softmax_then_topk)
    )


DENSE_WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD + common.NORMS + common.ATTENTION + common.QK_NORMS + common.MLP
)
GGUF_WEIGHT_MAPPINGS = (
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_NORMS
    + common.GGUF_ATTENTION
    + common.GGUF_QK_NORMS
    + common.GGUF_MLP
    + common.GGUF_EXPERTS
)


def _read_gguf_moe_fields(fields: ConfigFields) -> dict[str, object]:
    """GGUF files do not store `norm_topk_prob`; llama.cpp always renormalizes."""
    return common.read_gguf_fields(fields) | {"norm_topk_prob": True}


_SHARED_GATE = "layers.{layer}.feed_forward.shared_expert.output_gate.weight"


def _read_gguf_qwen2_moe_fields(fields: ConfigFields) -> dict[str, object]:
    """llama.cpp does not renormalize. Older files do not store the size of the shared expert."""
    result = common.read_gguf_fields(fields)
    shared_size = fields.get_int(
        "expert_shared_feed_forward_length", fields.get_int("feed_forward_length", 0)
    )
    return result | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared_size}


GGUF_QWEN2_MOE = GGUFMapping(
    _read_gguf_qwen2_moe_fields,
    GGUF_WEIGHT_MAPPINGS
    + common.GGUF_SHARED_EXPERT
    + (WeightMapping(common.GGUF_LAYER + "ffn_gate_inp_shexp.weight", _SHARED_GATE, as_row),),
)
GGUF = GGUFMapping(common.read_gguf_fields, GGUF_WEIGHT_MAPPINGS)
GGUF_MOE = GGUFMapping(_read_gguf_moe_fields, GGUF_WEIGHT_MAPPINGS)

SHARDING_RULES = common.DENSE_SHARDING
MOE_SHARDING_RULES = common.DENSE_SHARDING | common.EXPERTS_SHARDING

QWEN2 = ModelFamily(
    "qwen2",
    read_qwen2,
    build_dense,
    DENSE_WEIGHT_MAPPINGS,
    gguf=GGUF,
    sharding_rules=SHARDING_RULES,
)
QWEN3 = ModelFamily(
    "qwen3",
    read_qwen3,
    build_dense,
    DENSE_WEIGHT_MAPPINGS,
    gguf=GGUF,
    sharding_rules=SHARDING_RULES,
)
QWEN2_MOE = ModelFamily(
    "qwen2_moe",
    read_qwen2_moe,
    build_moe,
    DENSE_WEIGHT_MAPPINGS
    + common.EXPERTS
    + common.map_shared_expert("shared_expert")
    + (WeightMapping(common.HF_LAYER + "mlp.shared_expert_gate.weight", _SHARED_GATE),),
    gguf=GGUF_QWEN2_MOE,
    sharding_rules=MOE_SHARDING_RULES,
)
QWEN3_MOE = ModelFamily(
    "qwen3_moe",
    read_qwen3_moe,
    build_moe,
    DENSE_WEIGHT_MAPPINGS + common.EXPERTS,
    gguf=GGUF_MOE,
    sharding_rules=MOE_SHARDING_RULES,
)
