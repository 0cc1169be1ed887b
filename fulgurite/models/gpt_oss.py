"""gpt-oss: attention sinks, a window on every other layer, biases, a clamped gate in experts."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models import family
from fulgurite.models.config import ExpertsConfig, Fields, ModelConfig, read_layer_types
from fulgurite.models.family import GGUF_LAYER, LAYER, Family, GGUFTable, Rule
from fulgurite.models.layers import Attention, Decoder, PreNormLayer
from fulgurite.models.llama import read_dense_config
from fulgurite.models.moe import (
    Experts,
    MixtureOfExperts,
    Router,
    clamped_gate,
    top_k_then_softmax,
)

# What a config.json without any rope means.
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(fields: Fields) -> ModelConfig:
    values = {"head_dim": 64, "max_position_embeddings": 131_072, **fields.values}
    if "rope_scaling" not in fields and "rope_parameters" not in fields:
        values["rope_scaling"] = DEFAULT_ROPE
    config = read_dense_config("gpt_oss", Fields(values, fields.where), theta=150_000.0)
    count = len(config.layers)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    types = read_layer_types(fields, count, default)
    window = fields.size("sliding_window", 128)
    layers = tuple(
        replace(layer, experts=True, window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    experts = ExpertsConfig(
        count=fields.size("num_local_experts", fields.size("num_experts", 128)),
        per_token=fields.size("num_experts_per_tok", 4),
        inner=config.inner,
        gate_alpha=fields.number("swiglu_alpha", 1.702),
        gate_limit=fields.number("swiglu_limit", 7.0),
    )
    bias = fields.boolean("attention_bias", True)
    return replace(config, layers=layers, experts=experts, query_bias=bias, output_bias=bias)


def build(config: ModelConfig) -> nn.Module:
    return Decoder(config, [_layer(config, index) for index in range(len(config.layers))])


def _layer(config: ModelConfig, index: int) -> nn.Module:
    assert config.experts is not None, "gpt_oss has experts"
    router = Router(config.hidden, config.experts, top_k_then_softmax, bias=True)
    gate = clamped_gate(config.experts.gate_alpha, config.experts.gate_limit)
    experts = Experts(config.hidden, config.experts, gate, bias=True)
    attention = Attention(config, index, sinks=True)
    return PreNormLayer(config, attention, MixtureOfExperts(router, experts))


_MLP, _OURS = LAYER + "mlp.", "layers.{layer}.feed_forward."

WEIGHTS = (
    family.OUTSIDE_LAYERS
    + family.NORMS
    + family.ATTENTION
    + (
        Rule(LAYER + "self_attn.sinks", "layers.{layer}.attention.sinks"),
        Rule(_MLP + "router.weight", _OURS + "router.weight"),
        Rule(_MLP + "router.bias", _OURS + "router.bias"),
        Rule(
            _MLP + "experts.gate_up_proj",
            _OURS + "experts.gate_up",
            family.transposed_gate_before_up,
        ),
        Rule(
            _MLP + "experts.gate_up_proj_bias",
            _OURS + "experts.gate_up_bias",
            family.gate_before_up,
        ),
        Rule(_MLP + "experts.down_proj", _OURS + "experts.down", family.transposed),
        Rule(_MLP + "experts.down_proj_bias", _OURS + "experts.down_bias"),
    )
)


def _gguf_fields(fields: Fields) -> dict[str, object]:
    result = family.gguf_fields(fields)
    scaling = result.get("rope_scaling")
    if isinstance(scaling, dict):
        scaling["truncate"] = False
    inner = fields.integer("expert_feed_forward_length", fields.integer("feed_forward_length", 0))
    return result | {
        "intermediate_size": inner,
        "sliding_window": fields.integer("attention.sliding_window"),
    }


GGUF = GGUFTable(
    _gguf_fields,
    family.GGUF_OUTSIDE_LAYERS
    + (
        Rule(GGUF_LAYER + "attn_norm.weight", "layers.{layer}.attention_norm.weight"),
        Rule(GGUF_LAYER + "post_attention_norm.weight", "layers.{layer}.feed_forward_norm.weight"),
    )
    + family.GGUF_ATTENTION
    + family.GGUF_EXPERTS
    + (
        Rule(GGUF_LAYER + "attn_sinks.weight", "layers.{layer}.attention.sinks"),
        Rule(GGUF_LAYER + "ffn_gate_inp.bias", _OURS + "router.bias"),
        Rule(
            GGUF_LAYER + "ffn_gate_exps.bias",
            _OURS + "experts.gate_up_bias",
            put=family.gate_of_experts,
        ),
        Rule(
            GGUF_LAYER + "ffn_up_exps.bias",
            _OURS + "experts.gate_up_bias",
            put=family.up_of_experts,
        ),
        Rule(GGUF_LAYER + "ffn_down_exps.bias", _OURS + "experts.down_bias"),
    ),
)

PLAN = family.DENSE_PLAN | family.EXPERTS_PLAN | {"layers.*.attention.sinks": "query"}

GPT_OSS = Family("gpt_oss", read_config, build, WEIGHTS, gguf=GGUF, plan=PLAN)
