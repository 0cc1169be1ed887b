"""gpt-oss: attention sinks, a sliding window on every other layer, biases, clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.config import ConfigFields, ModelConfig, MoEConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import common
from fulgurite.models.families.common import GGUF_LAYER, HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import read_dense_config
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import (
    Experts,
    MoE,
    Router,
    clamped_swiglu,
    topk_then_softmax,
)
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import (
    WeightMapping,
    deinterleave_gate_up,
    transpose,
    transpose_deinterleave_gate_up,
    view_all_gates,
    view_all_ups,
)

# The rotary embedding of a config.json that names none.
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(head_dim=64, max_position_embeddings=131_072, rms_norm_eps=1e-5)
    values = dict(fields.values)
    if "rope_scaling" not in fields and "rope_parameters" not in fields:
        values["rope_scaling"] = DEFAULT_ROPE
    config = read_dense_config("gpt_oss", ConfigFields(values, fields.where), theta=150_000.0)
    count = len(config.layers)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    types = read_layer_types(fields, count, default)
    window = fields.get_positive_int("sliding_window", 128)
    layers = tuple(
        replace(layer, is_moe=True, sliding_window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    moe = MoEConfig(
        num_experts=fields.get_positive_int(
            "num_local_experts", fields.get_positive_int("num_experts", 128)
        ),
        top_k=fields.get_positive_int("num_experts_per_tok", 4),
        intermediate_size=config.intermediate_size,
        swiglu_alpha=fields.get_float("swiglu_alpha", 1.702),
        swiglu_limit=fields.get_float("swiglu_limit", 7.0),
    )
    bias = fields.get_bool("attention_bias", True)
    return replace(config, layers=layers, moe=moe, qkv_bias=bias, o_proj_bias=bias)


def build(config: ModelConfig) -> nn.Module:
    return CausalLM(config, [_build_layer(config, index) for index in range(len(config.layers))])


def _build_layer(config: ModelConfig, index: int) -> nn.Module:
    assert config.moe is not None, "gpt-oss has experts"
    router = Router(config.hidden_size, config.moe, topk_then_softmax, bias=True)
    activation = clamped_swiglu(config.moe.swiglu_alpha, config.moe.swiglu_limit)
    experts = Experts(config.hidden_size, config.moe, activation, bias=True)
    attention = Attention(config, index, sinks=True)
    return PreNormLayer(config, attention, MoE(router, experts))


_HF_MLP, _FEED_FORWARD = HF_LAYER + "mlp.", "layers.{layer}.feed_forward."

WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD
    + common.NORMS
    + common.ATTENTION
    + (
        WeightMapping(HF_LAYER + "self_attn.sinks", "layers.{layer}.attention.sinks"),
        WeightMapping(_HF_MLP + "router.weight", _FEED_FORWARD + "router.weight"),
        WeightMapping(_HF_MLP + "router.bias", _FEED_FORWARD + "router.bias"),
        WeightMapping(
            _HF_MLP + "experts.gate_up_proj",
            _FEED_FORWARD + "experts.gate_up_proj",
            transpose_deinterleave_gate_up,
        ),
        WeightMapping(
            _HF_MLP + "experts.gate_up_proj_bias",
            _FEED_FORWARD + "experts.gate_up_proj_bias",
            deinterleave_gate_up,
        ),
        WeightMapping(
            _HF_MLP + "experts.down_proj", _FEED_FORWARD + "experts.down_proj", transpose
        ),
        WeightMapping(_HF_MLP + "experts.down_proj_bias", _FEED_FORWARD + "experts.down_proj_bias"),
    )
)


def _read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    result = common.read_gguf_fields(fields)
    scaling = result.get("rope_scaling")
    if isinstance(scaling, dict):
        scaling["truncate"] = False
    intermediate_size = fields.get_int(
        "expert_feed_forward_length", fields.get_int("feed_forward_length", 0)
    )
    return result | {
        "intermediate_size": intermediate_size,
        "sliding_window": fields.get_int("attention.sliding_window"),
    }


GGUF = GGUFMapping(
    _read_gguf_fields,
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_NORMS_AFTER_ATTENTION
    + common.GGUF_ATTENTION
    + common.GGUF_EXPERTS
    + (
        WeightMapping(GGUF_LAYER + "attn_sinks.weight", "layers.{layer}.attention.sinks"),
        WeightMapping(GGUF_LAYER + "ffn_gate_inp.bias", _FEED_FORWARD + "router.bias"),
        WeightMapping(
            GGUF_LAYER + "ffn_gate_exps.bias",
            _FEED_FORWARD + "experts.gate_up_proj_bias",
            target_view=view_all_gates,
        ),
        WeightMapping(
            GGUF_LAYER + "ffn_up_exps.bias",
            _FEED_FORWARD + "experts.gate_up_proj_bias",
            target_view=view_all_ups,
        ),
        WeightMapping(GGUF_LAYER + "ffn_down_exps.bias", _FEED_FORWARD + "experts.down_proj_bias"),
    ),
)

SHARDING_RULES = (
    common.DENSE_SHARDING | common.EXPERTS_SHARDING | {"layers.*.attention.sinks": "query"}
)

GPT_OSS = ModelFamily(
    "gpt_oss", read_config, build, WEIGHT_MAPPINGS, gguf=GGUF, sharding_rules=SHARDING_RULES
)
