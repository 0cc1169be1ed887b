"""Qwen3-Next and Qwen3.5: three of four layers are gated DeltaNets, the others gated attention.

Both have an MLP, or a mixture of experts with a gated shared expert. Norms are zero-centered (offset
1), and attention rotates a quarter of each head. Checkpoints of Qwen3-Next store the projections of a
DeltaNet by key head: the rows of one key head's query, key, values and output gates, then those of
the next. Those of Qwen3.5 store four projections. Qwen3.5 has M-RoPE; its vision tensors are not read.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fulgurite.models.attention import Attention
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import (
    ConfigFields,
    LayerConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoEConfig,
)
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import common
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.llama import read_dense_config
from fulgurite.models.families.qwen_vl import SEPARATE_EXPERTS, VISION_TENSORS, with_mrope
from fulgurite.models.layers import CausalLM
from fulgurite.models.linear_attention import GatedDeltaNet
from fulgurite.models.moe import build_moe, softmax_then_topk
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.weight_mapping import (
    WeightMapping,
    group_ba,
    group_qkvz,
    slice_gate,
    slice_query,
    transpose_conv,
    view_first_half,
    view_qkv_rows,
    view_second_half,
    view_z_rows,
)

LAYER_TYPES = ("linear_attention", "full_attention")
NORM_OFFSET = 1.0
MROPE_SECTIONS = (11, 11, 10)


def read_config(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(head_dim=256, partial_rotary_factor=0.25)
    fields.require("hidden_act", "silu", default="silu")  # also of the convolutions
    bias = fields.get_bool("attention_bias", False)
    config = replace(
        read_dense_config("qwen3_next", fields),
        qk_norm=True,
        qkv_bias=bias,
        o_proj_bias=bias,
        attention_output_gate=True,
        linear_attention=read_linear_attention(fields),
        moe=_read_moe(fields),
    )
    return replace(config, layers=_read_layers(fields, config))


def read_qwen3_5(fields: ConfigFields) -> ModelConfig:
    config = read_config(fields.with_defaults(num_experts=0))
    return with_mrope(replace(config, family="qwen3_5"), MROPE_SECTIONS, interleaved=True)


def read_qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(num_experts=256, num_experts_per_tok=8)
    config = replace(read_config(fields), family="qwen3_5_moe")
    return with_mrope(config, MROPE_SECTIONS, interleaved=True)


def read_linear_attention(fields: ConfigFields) -> LinearAttentionConfig:
    return LinearAttentionConfig(
        conv_taps=fields.get_positive_int("linear_conv_kernel_dim", 4),
        num_key_heads=fields.get_positive_int("linear_num_key_heads", 16),
        num_value_heads=fields.get_positive_int("linear_num_value_heads", 32),
        key_dim=fields.get_positive_int("linear_key_head_dim", 128),
        value_dim=fields.get_positive_int("linear_value_head_dim", 128),
    )


def _read_moe(fields: ConfigFields) -> MoEConfig | None:
    num_experts = fields.get_int("num_experts", 512)
    if not num_experts:
        return None
    return MoEConfig(
        num_experts=num_experts,
        top_k=fields.get_positive_int("num_experts_per_tok", 10),
        intermediate_size=fields.get_positive_int("moe_intermediate_size", 512),
        shared_intermediate_size=fields.get_positive_int("shared_expert_intermediate_size", 512),
        shared_expert_gate=True,
        renormalize=fields.get_bool("norm_topk_prob", True),
    )


def _read_layers(fields: ConfigFields, config: ModelConfig) -> tuple[LayerConfig, ...]:
    count = len(config.layers)
    interval = fields.get_positive_int("full_attention_interval", 4)
    default = [LAYER_TYPES[(index + 1) % interval == 0] for index in range(count)]
    types = read_layer_types(fields, count, default, LAYER_TYPES)
    dense = {int(index) for index in fields.get_floats("mlp_only_layers")}
    step = fields.get_positive_int("decoder_sparse_step", 1)
    return tuple(
        replace(
            layer,
            rope=None if kind == "linear_attention" else layer.rope,
            is_moe=config.moe is not None and index not in dense and (index + 1) % step == 0,
            is_linear_attention=kind == "linear_attention",
        )
        for index, (layer, kind) in enumerate(zip(config.layers, types, strict=True))
    )


def build(config: ModelConfig) -> nn.Module:
    layers = [_build_layer(config, index) for index in range(len(config.layers))]
    return CausalLM(config, layers, NORM_OFFSET)


def _build_layer(config: ModelConfig, index: int) -> nn.Module:
    layer = config.layers[index]
    attention = (
        GatedDeltaNet(config, index)
        if layer.is_linear_attention
        else Attention(config, index, NORM_OFFSET)
    )
    feed_forward = (
        build_moe(config, softmax_then_topk) if layer.is_moe else GatedMLP.from_config(config)
    )
    return PreNormLayer(config, attention, feed_forward, NORM_OFFSET)


# ---- weights -------------------------------------------------------------------------------------


LINEAR = common.HF_LAYER + "linear_attn."
OURS = "layers.{layer}.attention."
GATED_ATTENTION = tuple(
    mapping for mapping in common.ATTENTION if ".q_proj." not in mapping.source
) + tuple(
    WeightMapping(f"{common.HF_LAYER}self_attn.q_proj.{kind}", OURS + f"{name}.{kind}", convert)
    for name, convert in (("q_proj", slice_query), ("gate_proj", slice_gate))
    for kind in ("weight", "bias")
)
DELTA_NET_COMMON = (
    WeightMapping(LINEAR + "conv1d.weight", OURS + "conv.weight", transpose_conv),
    WeightMapping(LINEAR + "A_log", OURS + "A_log"),
    WeightMapping(LINEAR + "dt_bias", OURS + "dt_bias"),
    WeightMapping(LINEAR + "norm.weight", OURS + "norm.weight"),
    WeightMapping(LINEAR + "out_proj.weight", OURS + "out_proj.weight"),
)
DELTA_NET = (
    WeightMapping(LINEAR + "in_proj_qkvz.weight", OURS + "in_proj.weight", group_qkvz),
    WeightMapping(LINEAR + "in_proj_ba.weight", OURS + "gates_proj.weight", group_ba),
    *DELTA_NET_COMMON,
)
SPLIT_DELTA_NET = (
    *(
        WeightMapping(f"{LINEAR}in_proj_{name}.weight", OURS + target, target_view=view)
        for name, target, view in (
            ("qkv", "in_proj.weight", view_qkv_rows),
            ("z", "in_proj.weight", view_z_rows),
            ("a", "gates_proj.weight", view_first_half),
            ("b", "gates_proj.weight", view_second_half),
        )
    ),
    *DELTA_NET_COMMON,
)
STACKED_EXPERTS = (
    WeightMapping(common.HF_LAYER + "mlp.gate.weight", common.ROUTER),
    WeightMapping(common.HF_LAYER + "mlp.experts.gate_up_proj", common.GATE_UP_PROJ),
    WeightMapping(common.HF_LAYER + "mlp.experts.down_proj", common.DOWN_PROJ),
)
SHARED_EXPERT = (
    *common.map_shared_expert("shared_expert"),
    WeightMapping(
        common.HF_LAYER + "mlp.shared_expert_gate.weight",
        "layers.{layer}.feed_forward.shared_expert.output_gate.weight",
    ),
)
OTHER_WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD
    + common.NORMS
    + GATED_ATTENTION
    + common.QK_NORMS
    + common.MLP
    + STACKED_EXPERTS
    + SHARED_EXPERT
)
IGNORED = (r"mtp\..*",)  # layers that predict further tokens

SHARDING_RULES = (
    common.EMBED_NORM_HEAD_SHARDING
    | common.ATTENTION_SHARDING
    | {"layers.*.attention.gate_proj": "query", "layers.*.attention.out_proj": "output"}
    | common.MLP_SHARDING
    | common.EXPERTS_SHARDING
)

QWEN3_NEXT = ModelFamily(
    "qwen3_next",
    read_config,
    build,
    OTHER_WEIGHT_MAPPINGS + DELTA_NET,
    IGNORED,
    sharding_rules=SHARDING_RULES,
    named_experts=SEPARATE_EXPERTS,
)
QWEN3_5 = ModelFamily(
    "qwen3_5",
    read_qwen3_5,
    build,
    OTHER_WEIGHT_MAPPINGS + SPLIT_DELTA_NET,
    IGNORED + VISION_TENSORS,
    sharding_rules=SHARDING_RULES,
    named_experts=SEPARATE_EXPERTS,
)
QWEN3_5_MOE = ModelFamily(
    "qwen3_5_moe",
    read_qwen3_5_moe,
    build,
    OTHER_WEIGHT_MAPPINGS + SPLIT_DELTA_NET,
    IGNORED + VISION_TENSORS,
    sharding_rules=SHARDING_RULES,
    named_experts=SEPARATE_EXPERTS,
)
