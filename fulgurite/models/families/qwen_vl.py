"""The language models of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE.

They are Qwen2, Qwen3 and Qwen3-MoE with M-RoPE. The vision tensors of a checkpoint are not read: text
runs as in any model, and users with image embeddings pass them to `CausalLM.compute_hidden_states`
with the three position rows of M-RoPE. Qwen3-VL also adds image features between its first layers
(DeepStack), which is not done here.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.models.config import ConfigFields, ModelConfig, RopeConfig
from fulgurite.models.families import common
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.llama import build as build_dense
from fulgurite.models.families.qwen import (
    DENSE_WEIGHT_MAPPINGS,
    MOE_SHARDING_RULES,
    SHARDING_RULES,
    build_moe,
    read_qwen2,
    read_qwen3,
    read_qwen3_moe,
)
from fulgurite.models.weight_mapping import WeightMapping, orient_down, orient_gate_up

VISION_TENSORS = (r"(model\.)?visual\..*",)
SEPARATE_EXPERTS = tuple(mapping for mapping in common.EXPERTS if mapping.target != common.ROUTER)
FUSED_EXPERTS = (
    WeightMapping(common.HF_LAYER + "mlp.gate.weight", common.ROUTER),
    WeightMapping(
        common.HF_LAYER + "mlp.experts.gate_up_proj", common.GATE_UP_PROJ, orient_gate_up
    ),
    WeightMapping(common.HF_LAYER + "mlp.experts.down_proj", common.DOWN_PROJ, orient_down),
)


def read_qwen2_vl(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(rope_theta=1_000_000.0)
    config = read_qwen2(fields)
    return with_mrope(replace(config, family="qwen2_vl"), (16, 24, 24), interleaved=False)


def read_qwen3_vl(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(rope_theta=500_000.0, head_dim=128)
    config = replace(read_qwen3(fields), family="qwen3_vl")
    return with_mrope(config, (24, 20, 20), interleaved=True)


def read_qwen3_vl_moe(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(rope_theta=500_000.0, norm_topk_prob=True)
    config = replace(read_qwen3_moe(fields), family="qwen3_vl_moe")
    return with_mrope(config, (24, 20, 20), interleaved=True)


def with_mrope(
    config: ModelConfig, default_sections: tuple[int, int, int], *, interleaved: bool
) -> ModelConfig:
    """The config with M-RoPE in every layer with RoPE. Sections that the file omits are the default
    ones, if they fit the head size.
    """

    def change(rope: RopeConfig | None) -> RopeConfig | None:
        if rope is None:
            return None
        sections = rope.mrope_sections
        if not sections and sum(default_sections) == rope.rotary_dim // 2:
            sections = default_sections
        return replace(rope, mrope_sections=sections, mrope_interleaved=interleaved)

    layers = tuple(replace(layer, rope=change(layer.rope)) for layer in config.layers)
    return replace(config, layers=layers)


QWEN2_VL = ModelFamily(
    "qwen2_vl",
    read_qwen2_vl,
    build_dense,
    DENSE_WEIGHT_MAPPINGS,
    VISION_TENSORS,
    sharding_rules=SHARDING_RULES,
)
QWEN3_VL = ModelFamily(
    "qwen3_vl",
    read_qwen3_vl,
    build_dense,
    DENSE_WEIGHT_MAPPINGS,
    VISION_TENSORS,
    sharding_rules=SHARDING_RULES,
)
QWEN3_VL_MOE = ModelFamily(
    "qwen3_vl_moe",
    read_qwen3_vl_moe,
    build_moe,
    DENSE_WEIGHT_MAPPINGS + FUSED_EXPERTS,
    VISION_TENSORS,
    sharding_rules=MOE_SHARDING_RULES,
    named_experts=SEPARATE_EXPERTS,
)
