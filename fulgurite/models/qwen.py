"""Qwen2 (bias on query, key, value), Qwen3 (a norm on each head instead) and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models import family
from fulgurite.models.config import ExpertsConfig, Fields, ModelConfig, read_layer_types
from fulgurite.models.family import Family, GGUFTable
from fulgurite.models.layers import Attention, Decoder, PreNormLayer
from fulgurite.models.llama import build as build_dense
from fulgurite.models.llama import dense_layer, read_dense_config, with_window
from fulgurite.models.moe import Experts, MixtureOfExperts, Router, gated, softmax_then_top_k


def read_qwen2(fields: Fields) -> ModelConfig:
    config = replace(read_dense_config("qwen2", fields), query_bias=True)
    return _with_layer_types(config, fields)


def read_qwen3(fields: Fields) -> ModelConfig:
    return _with_layer_types(_read_with_head_norms("qwen3", fields), fields)


def read_qwen3_moe(fields: Fields) -> ModelConfig:
    config = _read_with_head_norms("qwen3_moe", fields)
    if fields.boolean("use_sliding_window", False):
        config = with_window(config, fields.optional_size("sliding_window"))
    dense = {int(index) for index in fields.numbers("mlp_only_layers")}
    step = fields.size("decoder_sparse_step", 1)
    layers = tuple(
        replace(layer, experts=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(config.layers)
    )
    experts = ExpertsConfig(
        count=fields.size("num_experts", fields.size("num_local_experts", 128)),
        per_token=fields.size("num_experts_per_tok"),
        inner=fields.size("moe_intermediate_size"),
        renormalise=fields.boolean("norm_topk_prob", False),
    )
    return replace(config, layers=layers, experts=experts)


def _read_with_head_norms(name: str, fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    config = read_dense_config(name, fields)
    return replace(config, qk_norm=True, query_bias=bias, output_bias=bias)


def _with_layer_types(config: ModelConfig, fields: Fields) -> ModelConfig:
    """A window on the layers from `max_window_layers` on, or where layer_types says so."""
    count = len(config.layers)
    windowed = fields.boolean("use_sliding_window", False) and "sliding_window" in fields
    first = fields.integer("max_window_layers", count) if windowed else count
    default = ["full_attention"] * first + ["sliding_attention"] * (count - first)
    types = read_layer_types(fields, count, default[:count])
    window = fields.optional_size("sliding_window")
    layers = tuple(
        replace(layer, window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    return replace(config, layers=layers)


def build_moe(config: ModelConfig) -> nn.Module:
    return Decoder(config, [_moe_layer(config, index) for index in range(len(config.layers))])


def _moe_layer(config: ModelConfig, index: int) -> nn.Module:
    if not config.layers[index].experts:
        return dense_layer(config, index)
    assert config.experts is not None, "qwen3_moe has experts"
    router = Router(config.hidden, config.experts, softmax_then_top_k)
    experts = Experts(config.hidden, config.experts, gated(config.activation))
    return PreNormLayer(config, Attention(config, index), MixtureOfExperts(router, experts))


DENSE_WEIGHTS = (
    family.OUTSIDE_LAYERS + family.NORMS + family.ATTENTION + family.HEAD_NORMS + family.MLP
)
GGUF_WEIGHTS = (
    family.GGUF_OUTSIDE_LAYERS
    + family.GGUF_NORMS
    + family.GGUF_ATTENTION
    + family.GGUF_HEAD_NORMS
    + family.GGUF_MLP
    + family.GGUF_EXPERTS
)


def _moe_fields(fields: Fields) -> dict[str, object]:
    """GGUF says nothing about renormalising; what runs these files always does it."""
    return family.gguf_fields(fields) | {"norm_topk_prob": True}


GGUF = GGUFTable(family.gguf_fields, GGUF_WEIGHTS)
GGUF_MOE = GGUFTable(_moe_fields, GGUF_WEIGHTS)

PLAN = family.DENSE_PLAN
PLAN_MOE = family.DENSE_PLAN | family.EXPERTS_PLAN

QWEN2 = Family("qwen2", read_qwen2, build_dense, DENSE_WEIGHTS, gguf=GGUF, plan=PLAN)
QWEN3 = Family("qwen3", read_qwen3, build_dense, DENSE_WEIGHTS, gguf=GGUF, plan=PLAN)
QWEN3_MOE = Family(
    "qwen3_moe",
    read_qwen3_moe,
    build_moe,
    DENSE_WEIGHTS + family.EACH_EXPERT,
    gguf=GGUF_MOE,
    plan=PLAN_MOE,
)
