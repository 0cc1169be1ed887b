"""Hunyuan V1, dense and with experts: queries and keys are normalized after RoPE.

RoPE of type "dynamic" with `alpha` has a larger base, whatever the length of a sequence. Every layer
of the MoE model has a shared MLP of the size of an expert. Its router is float32.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.config import ConfigFields, ModelConfig, MoEConfig
from fulgurite.models.families import common
from fulgurite.models.families.common import HF_LAYER, ROUTER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import build as build_dense
from fulgurite.models.families.llama import read_dense_config
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import build_moe, softmax_then_topk
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import WeightMapping


def read_dense(fields: ConfigFields) -> ModelConfig:
    return _read("hunyuan_v1_dense", fields)


def read_moe(fields: ConfigFields) -> ModelConfig:
    for name in ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"):
        _require_one_value(fields, name)
    config = _read("hunyuan_v1_moe", fields)
    size = _first_int(fields, "moe_intermediate_size", config.intermediate_size)
    shared = _first_int(fields, "num_shared_expert", 1)
    moe = MoEConfig(
        num_experts=_first_int(fields, "num_experts", 1),
        top_k=_first_int(fields, "moe_topk", 1),
        intermediate_size=size,
        shared_intermediate_size=size * shared,
        renormalize=True,
    )
    layers = tuple(replace(layer, is_moe=True) for layer in config.layers)
    return replace(config, layers=layers, moe=moe)


def _require_one_value(fields: ConfigFields, name: str) -> None:
    """Published files store a list with one entry for each layer."""
    values = fields.get_ints(name) if name in fields else ()
    if len(set(values)) > 1:
        raise fields.error(f"{name} differs between layers, which is not supported")


def _first_int(fields: ConfigFields, name: str, default: int) -> int:
    if name not in fields:
        return default
    value = next(iter(fields.get_ints(name)), 0)
    if value < 1:
        raise fields.error(f"{name}={value} must be at least 1")
    return value


def _read(name: str, fields: ConfigFields) -> ModelConfig:
    fields.require("use_cla", False, default=False)
    fields.require("moe_layer_num_skipped", 0, default=0)
    fields.require("use_mixed_mlp_moe", name == "hunyuan_v1_moe", name == "hunyuan_v1_moe")
    fields = _resolve_alpha(fields.with_defaults(rms_norm_eps=1e-5))
    bias = fields.get_bool("attention_bias", False)
    return replace(
        read_dense_config(name, fields),
        qk_norm=fields.get_bool("use_qk_norm", True),
        qk_norm_after_rope=True,
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=fields.get_bool("mlp_bias", False),
    )


def _resolve_alpha(fields: ConfigFields) -> ConfigFields:
    """RoPE "dynamic" with `alpha` as an ordinary RoPE with a larger base."""
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    scaling = fields.get_section(name)
    rope_type = scaling.get_str("rope_type", scaling.get_str("type", "default"))
    if rope_type != "dynamic" or not scaling.get_float("alpha", 0.0):
        return fields
    theta = scaling.get_positive_float(
        "rope_theta", fields.get_positive_float("rope_theta", 10_000.0)
    )
    heads = fields.get_positive_int("num_attention_heads")
    size = fields.get_int("head_dim", fields.get_positive_int("hidden_size") // heads, minimum=3)
    theta *= scaling.get_positive_float("alpha") ** (size / (size - 2))
    rope = {"rope_type": "default", "rope_theta": theta}
    return ConfigFields({**fields.values, name: rope}, fields.where)


def build_hunyuan_moe(config: ModelConfig) -> nn.Module:
    layers = [
        PreNormLayer(
            config,
            Attention(config, index),
            build_moe(config, softmax_then_topk, float32_router=True),
        )
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers)


_ATTENTION = (
    common.EMBED_NORM_HEAD
    + common.NORMS
    + common.ATTENTION
    + tuple(
        WeightMapping(
            f"{HF_LAYER}self_attn.{source}.weight", f"layers.{{layer}}.attention.{target}.weight"
        )
        for source, target in (("query_layernorm", "q_norm"), ("key_layernorm", "k_norm"))
    )
)
MOE_WEIGHTS = (
    _ATTENTION
    + tuple(mapping for mapping in common.EXPERTS if mapping.target != ROUTER)
    + (WeightMapping(HF_LAYER + "mlp.gate.wg.weight", ROUTER),)
    + common.map_shared_expert("shared_mlp")
)


def _read_gguf_moe_fields(fields: ConfigFields) -> dict[str, object]:
    """The base of RoPE is stored after `alpha` was applied."""
    result = common.read_gguf_fields(fields)
    size = fields.get_int("expert_feed_forward_length", fields.get_int("feed_forward_length", 0))
    shared = fields.get_int("expert_shared_feed_forward_length", size)
    return result | {
        "moe_topk": fields.get_positive_int("expert_used_count"),
        "moe_intermediate_size": size,
        "num_shared_expert": shared // max(size, 1),
    }


_GGUF_ATTENTION = (
    common.GGUF_EMBED_NORM_HEAD + common.GGUF_NORMS + common.GGUF_ATTENTION + common.GGUF_QK_NORMS
)
GGUF = GGUFMapping(common.read_gguf_fields, _GGUF_ATTENTION + common.GGUF_MLP)
GGUF_MOE = GGUFMapping(
    _read_gguf_moe_fields, _GGUF_ATTENTION + common.GGUF_EXPERTS + common.GGUF_SHARED_EXPERT
)

HUNYUAN = ModelFamily(
    "hunyuan_v1_dense",
    read_dense,
    build_dense,
    _ATTENTION + common.MLP,
    gguf=GGUF,
    sharding_rules=common.DENSE_SHARDING,
)
HUNYUAN_MOE = ModelFamily(
    "hunyuan_v1_moe",
    read_moe,
    build_hunyuan_moe,
    MOE_WEIGHTS,
    gguf=GGUF_MOE,
    sharding_rules=common.DENSE_SHARDING | common.EXPERTS_SHARDING,
)
