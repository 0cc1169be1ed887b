"""Mixtral: Mistral whose MLPs are mixtures of experts; its routing weights always sum to one."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models import family
from fulgurite.models.config import ExpertsConfig, Fields, ModelConfig
from fulgurite.models.family import LAYER, Family, GGUFTable, Rule
from fulgurite.models.layers import Attention, Decoder, PreNormLayer
from fulgurite.models.llama import PERMUTED_ATTENTION, read_dense_config, with_window
from fulgurite.models.moe import Experts, MixtureOfExperts, Router, gated, softmax_then_top_k


def read_config(fields: Fields) -> ModelConfig:
    config = read_dense_config("mixtral", fields, theta=1_000_000.0)
    config = with_window(config, fields.optional_size("sliding_window"))
    experts = ExpertsConfig(
        count=fields.size("num_local_experts", 8),
        per_token=fields.size("num_experts_per_tok", 2),
        inner=config.inner,
        renormalise=True,
    )
    layers = tuple(replace(layer, experts=True) for layer in config.layers)
    return replace(config, layers=layers, experts=experts)


def build(config: ModelConfig) -> nn.Module:
    return Decoder(config, [_layer(config, index) for index in range(len(config.layers))])


def _layer(config: ModelConfig, index: int) -> nn.Module:
    assert config.experts is not None, "mixtral has experts"
    router = Router(config.hidden, config.experts, softmax_then_top_k)
    experts = Experts(config.hidden, config.experts, gated(config.activation))
    return PreNormLayer(config, Attention(config, index), MixtureOfExperts(router, experts))


_MOE = LAYER + "block_sparse_moe."
_EXPERTS = "layers.{layer}.feed_forward.experts."

WEIGHTS = (
    family.OUTSIDE_LAYERS
    + family.NORMS
    + family.ATTENTION
    + (
        Rule(_MOE + "gate.weight", "layers.{layer}.feed_forward.router.weight"),
        Rule(_MOE + "experts.{expert}.w1.weight", _EXPERTS + "gate_up", put=family.gate_of_expert),
        Rule(_MOE + "experts.{expert}.w3.weight", _EXPERTS + "gate_up", put=family.up_of_expert),
        Rule(_MOE + "experts.{expert}.w2.weight", _EXPERTS + "down", put=family.one_expert),
    )
)
GGUF = GGUFTable(
    family.gguf_fields,
    family.GGUF_OUTSIDE_LAYERS + family.GGUF_NORMS + PERMUTED_ATTENTION + family.GGUF_EXPERTS,
)

PLAN = family.DENSE_PLAN | family.EXPERTS_PLAN

MIXTRAL = Family("mixtral", read_config, build, WEIGHTS, gguf=GGUF, plan=PLAN)
