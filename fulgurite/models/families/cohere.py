"""Command R and Command R7B/A (Cohere, Cohere2): LayerNorm, parallel blocks, scaled logits.

Attention and MLP read the same normalized input. Neighbouring dimensions are rotated. Cohere2 has
a sliding window on three of four layers; the others have full attention without RoPE.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import LAYER_NORM_WITHOUT_BIAS, ConfigFields, ModelConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import common
from fulgurite.models.families.common import GGUF_LAYER, HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.layer_types import FULL, SLIDING
from fulgurite.models.families.llama import read_dense_config, with_layer_types
from fulgurite.models.layers import CausalLM
from fulgurite.models.residual_layers import ParallelLayer
from fulgurite.models.weight_mapping import WeightMapping

DEFAULT_SLIDING_WINDOW_PATTERN = 4


def read_cohere(fields: ConfigFields) -> ModelConfig:
    config = _read("cohere", fields, theta=500_000.0)
    return replace(config, qk_norm=fields.get_bool("use_qk_norm", False))


def read_cohere2(fields: ConfigFields) -> ModelConfig:
    config = _read("cohere2", fields, theta=10_000.0)
    count = len(config.layers)
    pattern = fields.get_positive_int("sliding_window_pattern", DEFAULT_SLIDING_WINDOW_PATTERN)
    default = [SLIDING if (index + 1) % pattern else FULL for index in range(count)]
    types = read_layer_types(fields, count, default)
    config = with_layer_types(config, types, fields.get_positive_int("sliding_window", 4096))
    layers = tuple(
        layer if kind == SLIDING else replace(layer, rope=None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    return replace(config, layers=layers)


def _read(name: str, fields: ConfigFields, theta: float) -> ModelConfig:
    fields = fields.with_values(rms_norm_eps=fields.get_float("layer_norm_eps", 1e-5))
    fields = fields.with_defaults(tie_word_embeddings=True)
    bias = fields.get_bool("attention_bias", False)
    return replace(
        read_dense_config(name, fields, theta=theta, interleaved=True),
        norm_type=LAYER_NORM_WITHOUT_BIAS,
        qkv_bias=bias,
        o_proj_bias=bias,
        logit_scale=fields.get_float("logit_scale", 0.0625),
    )


def build(config: ModelConfig) -> nn.Module:
    layers = [
        ParallelLayer(config, Attention(config, index), GatedMLP.from_config(config))
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers)


_NORM = "layers.{layer}.attention_norm.weight"
WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD
    + common.ATTENTION
    + common.QK_NORMS
    + common.MLP
    + (WeightMapping(HF_LAYER + "input_layernorm.weight", _NORM),)
)


def _read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    return common.read_gguf_fields(fields) | {
        "logit_scale": fields.get_float("logit_scale"),
        "use_qk_norm": fields.get_bool(common.HAS_QK_NORM),
        "sliding_window": fields.get_optional_positive_int("attention.sliding_window"),
    }


GGUF = GGUFMapping(
    _read_gguf_fields,
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_ATTENTION
    + common.GGUF_QK_NORMS
    + common.GGUF_MLP
    + (WeightMapping(GGUF_LAYER + "attn_norm.weight", _NORM),),
)

# Each head has its own norm weights.
SHARDING_RULES = common.DENSE_SHARDING | common.PROJECTION_NORM_SHARDING

COHERE = ModelFamily(
    "cohere", read_cohere, build, WEIGHT_MAPPINGS, gguf=GGUF, sharding_rules=SHARDING_RULES
)
COHERE2 = ModelFamily(
    "cohere2", read_cohere2, build, WEIGHT_MAPPINGS, gguf=GGUF, sharding_rules=SHARDING_RULES
)
