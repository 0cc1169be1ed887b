"""StarCoder2: LayerNorm, biases, an MLP without a gate, a sliding window on every layer."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.blocks import MLP
from fulgurite.models.config import LAYER_NORM, ConfigFields, ModelConfig
from fulgurite.models.config_readers import read_activation
from fulgurite.models.families import common
from fulgurite.models.families.common import HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import read_dense_config, with_sliding_window
from fulgurite.models.layers import CausalLM
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import WeightMapping


def read_config(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_values(rms_norm_eps=fields.get_float("norm_epsilon", 1e-5))
    fields = fields.with_defaults(
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )
    bias = fields.get_bool("use_bias", True)
    config = replace(
        read_dense_config("starcoder2", fields),
        activation=read_activation(fields, "gelu_pytorch_tanh"),
        norm_type=LAYER_NORM,
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=bias,
    )
    return with_sliding_window(config, fields.get_optional_positive_int("sliding_window"))


def build(config: ModelConfig) -> nn.Module:
    layers = [
        PreNormLayer(config, Attention(config, index), MLP.from_config(config))
        for index in range(len(config.layers))
    ]
    return CausalLM(config, layers)


WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD
    + common.NORMS
    + common.NORM_BIASES
    + common.ATTENTION
    + tuple(
        WeightMapping(
            f"{HF_LAYER}mlp.{source}.{kind}", f"layers.{{layer}}.feed_forward.{target}.{kind}"
        )
        for source, target in (("c_fc", "up_proj"), ("c_proj", "down_proj"))
        for kind in ("weight", "bias")
    )
)


def _read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    window = fields.get_optional_positive_int("attention.sliding_window")
    return common.read_gguf_fields(fields) | {
        "sliding_window": window,
        "use_bias": fields.get_bool(common.HAS_QKV_BIAS),
        "hidden_act": "gelu_pytorch_tanh",
    }


GGUF = GGUFMapping(
    _read_gguf_fields,
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_NORMS
    + common.GGUF_NORM_BIASES
    + common.GGUF_ATTENTION
    + common.GGUF_MLP,
)

STARCODER2 = ModelFamily(
    "starcoder2",
    read_config,
    build,
    WEIGHT_MAPPINGS,
    gguf=GGUF,
    sharding_rules=common.DENSE_SHARDING,
)
