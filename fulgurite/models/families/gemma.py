"""Gemma 2 and Gemma 3 (text): sandwich norms whose weights are stored minus 1.

Gemma 2 has a sliding window on every other layer, and soft caps on attention scores and logits.
Gemma 3 has QK norms instead of soft caps. Most of its layers have a sliding window and a local
RoPE; every sixth layer has full attention and a global RoPE.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.models.config import (
    ACTIVATIONS,
    ConfigFields,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    read_layer_types,
    read_rope,
)
from fulgurite.models.families import common
from fulgurite.models.families.common import GGUF_LAYER, HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import read_dense_config
from fulgurite.models.kv_cache import KVCache
from fulgurite.models.layers import Attention, CausalLM, GatedMLP, RMSNorm
from fulgurite.models.rope import RotaryCosSin
from fulgurite.models.weight_mapping import WeightMapping, subtract_one

NORM_OFFSET = 1.0
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
DEFAULT_SLIDING_WINDOW_PATTERN = 6


def read_gemma2(fields: ConfigFields) -> ModelConfig:
    fields.require("use_bidirectional_attention", False, default=False)
    config = read_dense_config("gemma2", fields)
    count = len(config.layers)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    types = read_layer_types(fields, count, default)
    window = fields.get_positive_int("sliding_window", 4096)
    layers = tuple(
        replace(layer, sliding_window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    capped = _apply_gemma_fields(replace(config, layers=layers), fields)
    return replace(capped, attention_softcap=fields.get_optional_float("attn_logit_softcapping"))


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    fields.require("use_bidirectional_attention", False, default=False)
    fields.require("attn_logit_softcapping", None)
    # Published files may omit fields with these default values.
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    defaults |= {"max_position_embeddings": 131_072, "vocab_size": 262_208}
    fields = ConfigFields({**defaults, **fields.values}, fields.where)
    fields_without_rope = ConfigFields(
        {key: value for key, value in fields.values.items() if not key.startswith("rope_")},
        fields.where,
    )
    config = read_dense_config("gemma3", fields_without_rope)
    count = len(config.layers)
    pattern = fields.get_positive_int("sliding_window_pattern", DEFAULT_SLIDING_WINDOW_PATTERN)
    default = [
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
        for index in range(count)
    ]
    types = read_layer_types(fields, count, default)
    ropes = _read_ropes(fields, config.head_dim)
    window = fields.get_positive_int("sliding_window", 4096)
    layers = tuple(
        LayerConfig(ropes[kind], window if kind == "sliding_attention" else None) for kind in types
    )
    return replace(_apply_gemma_fields(config, fields), layers=layers, qk_norm=True)


def _apply_gemma_fields(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.get_bool("attention_bias", False)
    return replace(
        config,
        activation=fields.get_choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        tie_word_embeddings=fields.get_bool("tie_word_embeddings", True),
        attention_scale=fields.get_positive_float("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=fields.get_optional_float("final_logit_softcapping"),
        embedding_scale=config.hidden_size**0.5,
        qkv_bias=bias,
        o_proj_bias=bias,
    )


def _read_ropes(fields: ConfigFields, head_dim: int) -> dict[str, RopeConfig]:
    """One rotary embedding per layer type. Older config.json fields scale only the global one."""
    if "rope_parameters" in fields:
        kinds = {"full_attention": GLOBAL_THETA, "sliding_attention": LOCAL_THETA}
        return {
            kind: read_rope(fields, head_dim, theta=theta, layer_type=kind)
            for kind, theta in kinds.items()
        }
    local_values = {
        k: v for k, v in fields.values.items() if k not in ("rope_theta", "rope_scaling")
    }
    local_theta = fields.get_float("rope_local_base_freq", LOCAL_THETA)
    return {
        "full_attention": read_rope(fields, head_dim, theta=GLOBAL_THETA),
        "sliding_attention": read_rope(
            ConfigFields(local_values, fields.where), head_dim, theta=local_theta
        ),
    }


class SandwichLayer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x)))."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention = Attention(config, index, norm_offset=NORM_OFFSET)
        self.feed_forward = GatedMLP.from_config(config)
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, NORM_OFFSET)
        self.attention_out_norm = RMSNorm(config.hidden_size, config.norm_eps, NORM_OFFSET)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps, NORM_OFFSET)
        self.feed_forward_out_norm = RMSNorm(config.hidden_size, config.norm_eps, NORM_OFFSET)

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, cos_sin: RotaryCosSin | None, cache: KVCache
    ) -> Tensor:
        attention_XD = self.attention(self.attention_norm(x_XD), positions_X, cos_sin, cache)
        x_XD = elementwise.add(x_XD, self.attention_out_norm(attention_XD))
        mlp_XD = self.feed_forward(self.feed_forward_norm(x_XD))
        return elementwise.add(x_XD, self.feed_forward_out_norm(mlp_XD))


def build(config: ModelConfig) -> nn.Module:
    layers = [SandwichLayer(config, index) for index in range(len(config.layers))]
    return CausalLM(config, layers, norm_offset=NORM_OFFSET)


def _map_norms(layer: str, names: tuple[str, str, str, str]) -> tuple[WeightMapping, ...]:
    norms = ("attention_norm", "attention_out_norm", "feed_forward_norm", "feed_forward_out_norm")
    return tuple(
        WeightMapping(f"{layer}{name}.weight", f"layers.{{layer}}.{norm}.weight")
        for name, norm in zip(names, norms, strict=True)
    )


WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD
    + common.ATTENTION
    + common.QK_NORMS
    + common.MLP
    + _map_norms(
        HF_LAYER,
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    )
)
_GGUF_TENSORS = (
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_ATTENTION
    + common.GGUF_QK_NORMS
    + common.GGUF_MLP
    + _map_norms(GGUF_LAYER, ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"))
)


def _read_gguf3_fields(fields: ConfigFields) -> dict[str, object]:
    """GGUF files store no query scale. It is the head size, or hidden_size / num_heads for the 27B
    model.
    """
    result = common.read_gguf_fields(fields)
    hidden_size = fields.get_positive_int("embedding_length")
    num_heads = fields.get_positive_int("attention.head_count")
    is_27b = fields.get_int("block_count") == 62
    return result | {
        "sliding_window": fields.get_int("attention.sliding_window"),
        "query_pre_attn_scalar": hidden_size // num_heads if is_27b else result["head_dim"],
    }


def _read_gguf2_fields(fields: ConfigFields) -> dict[str, object]:
    """As for Gemma 3, but the 27B model has 46 layers, and there are soft caps."""
    result = common.read_gguf_fields(fields)
    hidden_size = fields.get_positive_int("embedding_length")
    num_heads = fields.get_positive_int("attention.head_count")
    is_27b = fields.get_int("block_count") == 46
    return result | {
        "sliding_window": fields.get_int("attention.sliding_window"),
        "query_pre_attn_scalar": hidden_size // num_heads if is_27b else result["head_dim"],
        "attn_logit_softcapping": fields.get_optional_float("attn_logit_softcapping"),
        "final_logit_softcapping": fields.get_optional_float("final_logit_softcapping"),
    }


GGUF_WEIGHT_MAPPINGS = tuple(
    WeightMapping(mapping.source, mapping.target, subtract_one)
    if "norm" in mapping.target
    else mapping
    for mapping in _GGUF_TENSORS
)
IGNORED = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")

GGUF2 = GGUFMapping(_read_gguf2_fields, GGUF_WEIGHT_MAPPINGS)
GGUF3 = GGUFMapping(_read_gguf3_fields, GGUF_WEIGHT_MAPPINGS)
SHARDING_RULES = common.DENSE_SHARDING

GEMMA2 = ModelFamily(
    "gemma2", read_gemma2, build, WEIGHT_MAPPINGS, gguf=GGUF2, sharding_rules=SHARDING_RULES
)
GEMMA3 = ModelFamily("gemma3", read_gemma3, build, WEIGHT_MAPPINGS, IGNORED, GGUF3, SHARDING_RULES)
