"""MiniMax-M2: partial RoPE, QK norm over all heads, sigmoid routing with a correction bias."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.config import ConfigFields, ModelConfig, MoEConfig
from fulgurite.models.families import common, mixtral
from fulgurite.models.families.common import HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.glm import read_gguf_rotary_factor
from fulgurite.models.families.llama import read_dense_config
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import build_moe, grouped_sigmoid
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import WeightMapping


def read_config(fields: ConfigFields) -> ModelConfig:
    fields.require("scoring_func", "sigmoid", default="sigmoid")
    fields.require("qk_norm_type", "per_layer", default="per_layer")
    fields.require("use_routing_bias", True, default=True)
    fields.require("shared_intermediate_size", 0, default=0)
    for name in ("layernorm_full_attention_beta", "layernorm_mlp_beta"):
        fields.require(name, 1, default=1)
    if set(fields.get_floats("attn_type_list")) - {1.0}:  # 0: linear attention
        raise fields.error("attn_type_list: only full attention (1) is supported")
    fields = fields.with_defaults(head_dim=128)
    factor = 1.0
    if "rotary_dim" in fields:  # published files store it instead of partial_rotary_factor
        factor = fields.get_positive_int("rotary_dim") / fields.get_positive_int("head_dim")
    config = read_dense_config(
        "minimax_m2", fields, theta=5_000_000.0, partial_rotary_factor=factor
    )
    moe = MoEConfig(
        num_experts=fields.get_positive_int("num_local_experts", 256),
        top_k=fields.get_positive_int("num_experts_per_tok", 8),
        intermediate_size=config.intermediate_size,
        renormalize=True,
    )
    use_qk_norm = fields.get_bool("use_qk_norm", True)
    layers = tuple(replace(layer, is_moe=True) for layer in config.layers)
    return replace(config, layers=layers, moe=moe, qk_norm=use_qk_norm, qk_norm_scope="projection")


def build(config: ModelConfig) -> nn.Module:
    layers = [
        PreNormLayer(
            config,
            Attention(config, index),
            build_moe(config, grouped_sigmoid, correction_bias=True, float32_router=True),
        )
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers)


WEIGHT_MAPPINGS = (
    mixtral.WEIGHT_MAPPINGS
    + common.QK_NORMS
    + (
        WeightMapping(
            HF_LAYER + "block_sparse_moe.e_score_correction_bias",
            "layers.{layer}.feed_forward.router.correction_bias",
        ),
    )
)
# Layers behind the last one are for multi-token prediction (MTP), which is not supported.
IGNORED = (r"model\.layers\.{num_layers}\..*",)


def _read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    result = common.read_gguf_fields(fields)
    size = fields.get_int("expert_feed_forward_length", fields.get_int("feed_forward_length", 0))
    return result | {
        "intermediate_size": size,
        "partial_rotary_factor": read_gguf_rotary_factor(fields, result),
    }


GGUF = GGUFMapping(
    _read_gguf_fields,
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_NORMS
    + common.GGUF_ATTENTION
    + common.GGUF_QK_NORMS
    + common.GGUF_EXPERTS
    + common.GGUF_CORRECTION_BIAS,
)

MINIMAX_M2 = ModelFamily(
    "minimax_m2",
    read_config,
    build,
    WEIGHT_MAPPINGS,
    IGNORED,
    GGUF,
    common.DENSE_SHARDING | common.EXPERTS_SHARDING | common.PROJECTION_NORM_SHARDING,
)
