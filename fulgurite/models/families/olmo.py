"""OLMoE, OLMo 2 and OLMo 3: queries and keys are normalized over all heads of a token at once.

OLMoE has experts in every layer. OLMo 2 normalizes the output of each block instead of its input.
OLMo 3 adds sliding windows on three of four layers, and RoPE scaling on the others.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import ConfigFields, ModelConfig, MoEConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import common
from fulgurite.models.families.common import GGUF_LAYER, HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.layer_types import FULL, SLIDING, read_ropes_by_layer_type
from fulgurite.models.families.llama import read_dense_config, with_layer_types
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import build_moe, softmax_then_topk
from fulgurite.models.residual_layers import PostNormLayer, PreNormLayer

OLMO3_THETA = 500_000.0
FULL_ATTENTION_INTERVAL = 4  # OLMo 3: every fourth layer has full attention


def read_olmoe(fields: ConfigFields) -> ModelConfig:
    config = _read_with_projection_norm("olmoe", fields)
    if config.num_heads * config.head_dim != config.hidden_size:  # the size of the published q_norm
        raise fields.error(
            f"{config.num_heads} heads of head_dim={config.head_dim} must have "
            f"hidden_size={config.hidden_size} columns"
        )
    moe = MoEConfig(
        num_experts=fields.get_positive_int("num_experts", 64),
        top_k=fields.get_positive_int("num_experts_per_tok", 8),
        intermediate_size=config.intermediate_size,
        renormalize=fields.get_bool("norm_topk_prob", False),
    )
    return replace(
        config,
        layers=tuple(replace(layer, is_moe=True) for layer in config.layers),
        qkv_clip=fields.get_optional_float("clip_qkv"),
        moe=moe,
    )


def read_olmo2(fields: ConfigFields) -> ModelConfig:
    return _read_with_projection_norm("olmo2", fields)


def read_olmo3(fields: ConfigFields) -> ModelConfig:
    without_rope = {k: v for k, v in fields.values.items() if not k.startswith("rope_")}
    config = _read_with_projection_norm("olmo3", ConfigFields(without_rope, fields.where))
    count = len(config.layers)
    default = [
        FULL if (index + 1) % FULL_ATTENTION_INTERVAL == 0 else SLIDING for index in range(count)
    ]
    types = read_layer_types(fields, count, default)
    ropes = read_ropes_by_layer_type(fields, config.head_dim, OLMO3_THETA, None)
    window = fields.get_positive_int("sliding_window", 4096)
    layers = with_layer_types(config, types, window).layers
    return replace(
        config,
        layers=tuple(
            replace(layer, rope=ropes[kind]) for layer, kind in zip(layers, types, strict=True)
        ),
    )


def _read_with_projection_norm(name: str, fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    bias = fields.get_bool("attention_bias", False)
    config = read_dense_config(name, fields)
    return replace(
        config, qk_norm=True, qk_norm_scope="projection", qkv_bias=bias, o_proj_bias=bias
    )


def build_olmoe(config: ModelConfig) -> nn.Module:
    layers = [
        PreNormLayer(config, Attention(config, index), build_moe(config, softmax_then_topk))
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers)


def build_post_norm(config: ModelConfig) -> nn.Module:
    """Every layer adds the norm of a block's output: OLMo 2 and 3, EXAONE 4."""
    layers = [
        PostNormLayer(config, Attention(config, index), GatedMLP.from_config(config))
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers)


POST_NORMS = common.map_norms(
    HF_LAYER,
    {
        "post_attention_layernorm": "attention_out_norm",
        "post_feedforward_layernorm": "feed_forward_out_norm",
    },
)
GGUF_POST_NORMS = common.map_norms(
    GGUF_LAYER,
    {"post_attention_norm": "attention_out_norm", "post_ffw_norm": "feed_forward_out_norm"},
)
_ATTENTION = common.EMBED_NORM_HEAD + common.ATTENTION + common.QK_NORMS
_GGUF_ATTENTION = common.GGUF_EMBED_NORM_HEAD + common.GGUF_ATTENTION + common.GGUF_QK_NORMS
POST_NORM_WEIGHTS = _ATTENTION + POST_NORMS + common.MLP
GGUF_POST_NORM_WEIGHTS = _GGUF_ATTENTION + GGUF_POST_NORMS + common.GGUF_MLP


def _read_gguf_olmo_fields(fields: ConfigFields) -> dict[str, object]:
    """OLMo 2 and 3 have one GGUF architecture. Only OLMo 3 has a window, on three of four layers."""
    result = common.read_gguf_fields(fields)
    window = fields.get_optional_positive_int("attention.sliding_window")
    count = fields.get_positive_int("block_count")
    return result | {
        "sliding_window": window,
        "layer_types": None if window else [FULL] * count,
    }


GGUF_OLMOE = GGUFMapping(
    common.read_gguf_fields, _GGUF_ATTENTION + common.GGUF_NORMS + common.GGUF_EXPERTS
)
GGUF_OLMO = GGUFMapping(_read_gguf_olmo_fields, GGUF_POST_NORM_WEIGHTS)

SHARDING_RULES = common.DENSE_SHARDING | common.PROJECTION_NORM_SHARDING

OLMOE = ModelFamily(
    "olmoe",
    read_olmoe,
    build_olmoe,
    _ATTENTION + common.NORMS + common.EXPERTS,
    gguf=GGUF_OLMOE,
    sharding_rules=SHARDING_RULES | common.EXPERTS_SHARDING,
)
OLMO2 = ModelFamily(
    "olmo2", read_olmo2, build_post_norm, POST_NORM_WEIGHTS, sharding_rules=SHARDING_RULES
)
OLMO3 = ModelFamily(
    "olmo3",
    read_olmo3,
    build_post_norm,
    POST_NORM_WEIGHTS,
    gguf=GGUF_OLMO,
    sharding_rules=SHARDING_RULES,
)
