"""Phi-3 and Phi-4: Llama with LongRoPE and partial rotary; checkpoints store fused projections."""

from __future__ import annotations

from dataclasses import replace

from fulgurite.models.config import ConfigFields, LayerConfig, ModelConfig
from fulgurite.models.config_readers import read_rope
from fulgurite.models.families import common
from fulgurite.models.families.common import GGUF_LAYER, HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import build, read_dense_config, with_sliding_window
from fulgurite.models.weight_mapping import (
    WeightMapping,
    slice_first_half,
    slice_k,
    slice_q,
    slice_second_half,
    slice_v,
)

ORIGINAL_MAX_POSITIONS = 4096  # of a config.json that names none


def read_config(fields: ConfigFields) -> ModelConfig:
    values_without_rope = {
        key: value
        for key, value in fields.values.items()
        if key not in ("rope_scaling", "rope_parameters")
    }
    config = read_dense_config("phi3", ConfigFields(values_without_rope, fields.where))
    scaling = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    if "original_max_position_embeddings" not in fields.get_section(scaling):
        fields = fields.with_defaults(original_max_position_embeddings=ORIGINAL_MAX_POSITIONS)
    rope = read_rope(fields, config.head_dim, yarn_is_longrope=True)
    config = replace(config, layers=(LayerConfig(rope),) * len(config.layers))
    return with_sliding_window(config, fields.get_optional_positive_int("sliding_window"))


def _map_fused_projections(
    layer: str, qkv: str, output: str, gate_up: str, down: str
) -> tuple[WeightMapping, ...]:
    attention, mlp = "layers.{layer}.attention.", "layers.{layer}.feed_forward."
    return (
        WeightMapping(f"{layer}{qkv}.weight", attention + "q_proj.weight", slice_q),
        WeightMapping(f"{layer}{qkv}.weight", attention + "k_proj.weight", slice_k),
        WeightMapping(f"{layer}{qkv}.weight", attention + "v_proj.weight", slice_v),
        WeightMapping(f"{layer}{output}.weight", attention + "o_proj.weight"),
        WeightMapping(f"{layer}{gate_up}.weight", mlp + "gate_proj.weight", slice_first_half),
        WeightMapping(f"{layer}{gate_up}.weight", mlp + "up_proj.weight", slice_second_half),
        WeightMapping(f"{layer}{down}.weight", mlp + "down_proj.weight"),
    )


WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD
    + common.NORMS
    + _map_fused_projections(
        HF_LAYER, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"
    )
)


def _read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    result = common.read_gguf_fields(fields)
    head_dim = int(str(result["head_dim"]))
    window = fields.get_int("attention.sliding_window", 0)
    result["sliding_window"] = window or None
    result["partial_rotary_factor"] = fields.get_int("rope.dimension_count", head_dim) / head_dim
    if "rope_factors_long" in fields:
        scaling: dict[str, object] = {
            "rope_type": "longrope",
            "short_factor": list(fields.get_list("rope_factors_short")),
            "long_factor": list(fields.get_list("rope_factors_long")),
            "original_max_position_embeddings": fields.get_int(
                "rope.scaling.original_context_length"
            ),
        }
        if "rope.scaling.attn_factor" in fields:
            scaling["attention_factor"] = fields.get_float("rope.scaling.attn_factor")
        result["rope_scaling"] = scaling
    return result


GGUF = GGUFMapping(
    _read_gguf_fields,
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_NORMS
    + _map_fused_projections(GGUF_LAYER, "attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)

SHARDING_RULES = common.DENSE_SHARDING

PHI3 = ModelFamily(
    "phi3", read_config, build, WEIGHT_MAPPINGS, gguf=GGUF, sharding_rules=SHARDING_RULES
)
