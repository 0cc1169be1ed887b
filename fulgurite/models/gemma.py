"""Gemma 2 and Gemma 3 (text): norms around both halves of a layer, norm weights that count from 1.

Gemma 2 puts a window on every other layer and soft caps on attention scores and logits. Gemma 3 has
no caps but norms on query and key; most of its layers see a window and turn by a local RoPE, every
sixth sees everything and turns by a global one.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops
from fulgurite.models import family
from fulgurite.models.cache import Cache
from fulgurite.models.config import (
    ACTIVATIONS,
    Fields,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    read_layer_types,
    read_rope,
)
from fulgurite.models.family import GGUF_LAYER, LAYER, Family, GGUFTable, Rule
from fulgurite.models.layers import Attention, Decoder, GatedMLP, RMSNorm
from fulgurite.models.llama import read_dense_config
from fulgurite.models.rope import Rotation

NORM_OFFSET = 1.0
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
DEFAULT_PATTERN = 6


def read_gemma2(fields: Fields) -> ModelConfig:
    fields.require("use_bidirectional_attention", False, default=False)
    config = read_dense_config("gemma2", fields)
    count = len(config.layers)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    types = read_layer_types(fields, count, default)
    window = fields.size("sliding_window", 4096)
    layers = tuple(
        replace(layer, window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    capped = _with_gemma_fields(replace(config, layers=layers), fields)
    return replace(capped, attention_softcap=fields.optional_number("attn_logit_softcapping"))


def read_gemma3(fields: Fields) -> ModelConfig:
    fields.require("use_bidirectional_attention", False, default=False)
    fields.require("attn_logit_softcapping", None)
    # Files on the hub may leave out what they don't change; these are what leaving it out means.
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    defaults |= {"max_position_embeddings": 131_072, "vocab_size": 262_208}
    fields = Fields({**defaults, **fields.values}, fields.where)
    plain = Fields(
        {key: value for key, value in fields.values.items() if not key.startswith("rope_")},
        fields.where,
    )
    config = read_dense_config("gemma3", plain)
    count = len(config.layers)
    pattern = fields.size("sliding_window_pattern", DEFAULT_PATTERN)
    default = [
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
        for index in range(count)
    ]
    types = read_layer_types(fields, count, default)
    ropes = _read_ropes(fields, config.head_dim)
    window = fields.size("sliding_window", 4096)
    layers = tuple(
        LayerConfig(ropes[kind], window if kind == "sliding_attention" else None) for kind in types
    )
    return replace(_with_gemma_fields(config, fields), layers=layers, qk_norm=True)


def _with_gemma_fields(config: ModelConfig, fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return replace(
        config,
        activation=fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        tied=fields.boolean("tie_word_embeddings", True),
        attention_scale=fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        embedding_scale=config.hidden**0.5,
        query_bias=bias,
        output_bias=bias,
    )


def _read_ropes(fields: Fields, head_dim: int) -> dict[str, RopeConfig]:
    """One rotary embedding a layer type; the old spelling scales only the global one."""
    if "rope_parameters" in fields:
        kinds = {"full_attention": GLOBAL_THETA, "sliding_attention": LOCAL_THETA}
        return {
            kind: read_rope(fields, head_dim, theta=theta, layer_type=kind)
            for kind, theta in kinds.items()
        }
    local_values = {
        k: v for k, v in fields.values.items() if k not in ("rope_theta", "rope_scaling")
    }
    local_theta = fields.number("rope_local_base_freq", LOCAL_THETA)
    return {
        "full_attention": read_rope(fields, head_dim, theta=GLOBAL_THETA),
        "sliding_attention": read_rope(
            Fields(local_values, fields.where), head_dim, theta=local_theta
        ),
    }


class SandwichLayer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x)))."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention = Attention(config, index, norm_offset=NORM_OFFSET)
        self.feed_forward = GatedMLP(config.hidden, config.inner, config.activation)
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps, NORM_OFFSET)
        self.attention_out_norm = RMSNorm(config.hidden, config.norm_eps, NORM_OFFSET)
        self.feed_forward_norm = RMSNorm(config.hidden, config.norm_eps, NORM_OFFSET)
        self.feed_forward_out_norm = RMSNorm(config.hidden, config.norm_eps, NORM_OFFSET)

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, rotation: Rotation | None, cache: Cache
    ) -> Tensor:
        attended_XD = self.attention(self.attention_norm(x_XD), positions_X, rotation, cache)
        x_XD = ops.add(x_XD, self.attention_out_norm(attended_XD))
        fed_XD = self.feed_forward(self.feed_forward_norm(x_XD))
        return ops.add(x_XD, self.feed_forward_out_norm(fed_XD))


def build(config: ModelConfig) -> nn.Module:
    layers = [SandwichLayer(config, index) for index in range(len(config.layers))]
    return Decoder(config, layers, norm_offset=NORM_OFFSET)


def _norms(layer: str, names: tuple[str, str, str, str]) -> tuple[Rule, ...]:
    ours = ("attention_norm", "attention_out_norm", "feed_forward_norm", "feed_forward_out_norm")
    return tuple(
        Rule(f"{layer}{name}.weight", f"layers.{{layer}}.{norm}.weight")
        for name, norm in zip(names, ours, strict=True)
    )


WEIGHTS = (
    family.OUTSIDE_LAYERS
    + family.ATTENTION
    + family.HEAD_NORMS
    + family.MLP
    + _norms(
        LAYER,
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    )
)
GGUF_WEIGHTS = (
    family.GGUF_OUTSIDE_LAYERS
    + family.GGUF_ATTENTION
    + family.GGUF_HEAD_NORMS
    + family.GGUF_MLP
    + _norms(GGUF_LAYER, ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"))
)


def _gguf_fields(fields: Fields) -> dict[str, object]:
    """GGUF keeps no query scale: it is the head size, but for the 27B model hidden / heads."""
    result = family.gguf_fields(fields)
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    is_27b = fields.integer("block_count") == 62
    return result | {
        "sliding_window": fields.integer("attention.sliding_window"),
        "query_pre_attn_scalar": hidden // heads if is_27b else result["head_dim"],
    }


def _gguf2_fields(fields: Fields) -> dict[str, object]:
    """Like Gemma 3's, but the odd model is the one of 46 layers, and there are caps."""
    result = family.gguf_fields(fields)
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    is_27b = fields.integer("block_count") == 46
    return result | {
        "sliding_window": fields.integer("attention.sliding_window"),
        "query_pre_attn_scalar": hidden // heads if is_27b else result["head_dim"],
        "attn_logit_softcapping": fields.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


GGUF_RULES = tuple(
    Rule(rule.source, rule.target, family.minus_one) if "norm" in rule.target else rule
    for rule in GGUF_WEIGHTS
)
IGNORED = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")

GGUF2 = GGUFTable(_gguf2_fields, GGUF_RULES)
GGUF3 = GGUFTable(_gguf_fields, GGUF_RULES)
PLAN = family.DENSE_PLAN

GEMMA2 = Family("gemma2", read_gemma2, build, WEIGHTS, gguf=GGUF2, plan=PLAN)
GEMMA3 = Family("gemma3", read_gemma3, build, WEIGHTS, IGNORED, GGUF3, PLAN)
