"""ERNIE 4.5, dense and with experts: neighbouring dimensions are rotated.

The router's scores are a softmax. A correction bias affects the selection only, and weights are
renormalized. Routers are float32. Layers for multi-token prediction (MTP) are ignored.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.config import ConfigFields, ModelConfig, MoEConfig
from fulgurite.models.families import common
from fulgurite.models.families.common import GGUF_LAYER, HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import build as build_dense
from fulgurite.models.families.llama import build_dense_layer, read_dense_config
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import build_moe, corrected_softmax
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import WeightMapping, flatten

THETA = 500_000.0


def read_ernie(fields: ConfigFields) -> ModelConfig:
    return _read_dense("ernie4_5", fields.with_defaults(head_dim=128))


def read_ernie_moe(fields: ConfigFields) -> ModelConfig:
    fields.require("moe_norm_min", 1e-12, default=1e-12)
    config = _read_dense("ernie4_5_moe", fields)
    count = len(config.layers)
    first, last = fields.get_int("moe_layer_start_index", 1), count - 1
    if fields.values.get("moe_layer_end_index", -1) != -1:
        last = fields.get_int("moe_layer_end_index")
    interval = fields.get_positive_int("moe_layer_interval", 1)
    layers = tuple(
        replace(layer, is_moe=first <= index <= last and (index + 1) % interval == 0)
        for index, layer in enumerate(config.layers)
    )
    size = fields.get_positive_int("moe_intermediate_size")
    moe = MoEConfig(
        num_experts=fields.get_positive_int("moe_num_experts", 64),
        top_k=fields.get_positive_int("moe_k", 6),
        intermediate_size=size,
        shared_intermediate_size=size * fields.get_int("moe_num_shared_experts", 2),
    )
    return replace(config, layers=layers, moe=moe)


def _read_dense(name: str, fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(rms_norm_eps=1e-5, tie_word_embeddings=True)
    bias = fields.get_bool("use_bias", False)
    config = read_dense_config(name, fields, theta=THETA, interleaved=True)
    return replace(config, qkv_bias=bias, o_proj_bias=bias, mlp_bias=bias)


def build_ernie_moe(config: ModelConfig) -> nn.Module:
    return CausalLM(config, [_build_layer(config, index) for index in range(len(config.layers))])


def _build_layer(config: ModelConfig, index: int) -> nn.Module:
    if not config.layers[index].is_moe:
        return build_dense_layer(config, index)
    experts = build_moe(config, corrected_softmax, correction_bias=True, float32_router=True)
    return PreNormLayer(config, Attention(config, index), experts)


_CORRECTION_BIAS = "layers.{layer}.feed_forward.router.correction_bias"
DENSE_WEIGHTS = common.EMBED_NORM_HEAD + common.NORMS + common.ATTENTION + common.MLP
MOE_WEIGHTS = (
    DENSE_WEIGHTS
    + common.EXPERTS
    + common.SHARED_EXPERTS
    + (
        WeightMapping(
            HF_LAYER + "mlp.moe_statics.e_score_correction_bias", _CORRECTION_BIAS, flatten
        ),
    )
)
IGNORED_MOE = (r"model\.mtp_.*", r"mtp.*")


def _read_gguf_moe_fields(fields: ConfigFields) -> dict[str, object]:
    result = common.read_gguf_fields(fields)
    return result | {
        "moe_num_experts": fields.get_positive_int("expert_count"),
        "moe_k": fields.get_positive_int("expert_used_count"),
        "moe_num_shared_experts": fields.get_int("expert_shared_count", 0),
        "moe_layer_start_index": fields.get_int("leading_dense_block_count", 0),
        "moe_layer_interval": fields.get_positive_int("interleave_moe_layer_step", 1),
    }


_GGUF_DENSE = (
    common.GGUF_EMBED_NORM_HEAD + common.GGUF_NORMS + common.GGUF_ATTENTION + common.GGUF_MLP
)
GGUF = GGUFMapping(common.read_gguf_fields, _GGUF_DENSE)
GGUF_MOE = GGUFMapping(
    _read_gguf_moe_fields,
    _GGUF_DENSE
    + common.GGUF_EXPERTS
    + common.GGUF_SHARED_EXPERT
    + (WeightMapping(GGUF_LAYER + "exp_probs_b.bias", _CORRECTION_BIAS, flatten),),
)

ERNIE = ModelFamily(
    "ernie4_5",
    read_ernie,
    build_dense,
    DENSE_WEIGHTS,
    gguf=GGUF,
    sharding_rules=common.DENSE_SHARDING,
)
ERNIE_MOE = ModelFamily(
    "ernie4_5_moe",
    read_ernie_moe,
    build_ernie_moe,
    MOE_WEIGHTS,
    IGNORED_MOE,
    GGUF_MOE,
    common.DENSE_SHARDING | common.EXPERTS_SHARDING,
)
