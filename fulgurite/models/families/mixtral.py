"""Mixtral: Mistral with MoE layers. Routing weights are renormalized to sum to one."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.config import ConfigFields, ModelConfig, MoEConfig
from fulgurite.models.families import common
from fulgurite.models.families.common import HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import (
    GGUF_PERMUTED_ATTENTION,
    read_dense_config,
    with_sliding_window,
)
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import build_moe, softmax_then_topk
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import (
    WeightMapping,
    view_expert,
    view_expert_gate,
    view_expert_up,
)


def read_config(fields: ConfigFields) -> ModelConfig:
    config = read_dense_config("mixtral", fields, theta=1_000_000.0)
    config = with_sliding_window(config, fields.get_optional_positive_int("sliding_window"))
    moe = MoEConfig(
        num_experts=fields.get_positive_int("num_local_experts", 8),
        top_k=fields.get_positive_int("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        renormalize=True,
    )
    layers = tuple(replace(layer, is_moe=True) for layer in config.layers)
    return replace(config, layers=layers, moe=moe)


def build(config: ModelConfig) -> nn.Module:
    return CausalLM(config, [_build_layer(config, index) for index in range(len(config.layers))])


def _build_layer(config: ModelConfig, index: int) -> nn.Module:
    return PreNormLayer(config, Attention(config, index), build_moe(config, softmax_then_topk))


_HF_MOE = HF_LAYER + "block_sparse_moe."
_EXPERTS = "layers.{layer}.feed_forward.experts."

EXPERTS = (
    WeightMapping(_HF_MOE + "gate.weight", "layers.{layer}.feed_forward.router.weight"),
    WeightMapping(
        _HF_MOE + "experts.{expert}.w1.weight",
        _EXPERTS + "gate_up_proj",
        target_view=view_expert_gate,
    ),
    WeightMapping(
        _HF_MOE + "experts.{expert}.w3.weight",
        _EXPERTS + "gate_up_proj",
        target_view=view_expert_up,
    ),
    WeightMapping(
        _HF_MOE + "experts.{expert}.w2.weight", _EXPERTS + "down_proj", target_view=view_expert
    ),
)
WEIGHT_MAPPINGS = common.EMBED_NORM_HEAD + common.NORMS + common.ATTENTION + EXPERTS
GGUF = GGUFMapping(
    common.read_gguf_fields,
    common.GGUF_EMBED_NORM_HEAD + common.GGUF_NORMS + GGUF_PERMUTED_ATTENTION + common.GGUF_EXPERTS,
)

SHARDING_RULES = common.DENSE_SHARDING | common.EXPERTS_SHARDING

MIXTRAL = ModelFamily(
    "mixtral", read_config, build, WEIGHT_MAPPINGS, gguf=GGUF, sharding_rules=SHARDING_RULES
)
