"""Phi-3 and Phi-4: Llama with fused projections in the file, LongRoPE, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from fulgurite.models import family
from fulgurite.models.config import Fields, LayerConfig, ModelConfig, read_rope
from fulgurite.models.family import GGUF_LAYER, LAYER, Family, GGUFTable, Rule
from fulgurite.models.llama import build, read_dense_config, with_window


def read_config(fields: Fields) -> ModelConfig:
    plain = {
        key: value
        for key, value in fields.values.items()
        if key not in ("rope_scaling", "rope_parameters")
    }
    config = read_dense_config("phi3", Fields(plain, fields.where))
    rope = read_rope(fields, config.head_dim, yarn_is_longrope=True)
    config = replace(config, layers=(LayerConfig(rope),) * len(config.layers))
    return with_window(config, fields.optional_size("sliding_window"))


def _split(layer: str, qkv: str, output: str, gate_up: str, down: str) -> tuple[Rule, ...]:
    attention, mlp = "layers.{layer}.attention.", "layers.{layer}.feed_forward."
    return (
        Rule(f"{layer}{qkv}.weight", attention + "query.weight", family.fused_query),
        Rule(f"{layer}{qkv}.weight", attention + "key.weight", family.fused_key),
        Rule(f"{layer}{qkv}.weight", attention + "value.weight", family.fused_value),
        Rule(f"{layer}{output}.weight", attention + "output.weight"),
        Rule(f"{layer}{gate_up}.weight", mlp + "gate.weight", family.first_half),
        Rule(f"{layer}{gate_up}.weight", mlp + "up.weight", family.second_half),
        Rule(f"{layer}{down}.weight", mlp + "down.weight"),
    )


WEIGHTS = (
    family.OUTSIDE_LAYERS
    + family.NORMS
    + _split(LAYER, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
)


def _gguf_fields(fields: Fields) -> dict[str, object]:
    result = family.gguf_fields(fields)
    head_dim = int(str(result["head_dim"]))
    window = fields.integer("attention.sliding_window", 0)
    result["sliding_window"] = window or None
    result["partial_rotary_factor"] = fields.integer("rope.dimension_count", head_dim) / head_dim
    if "rope_factors_long" in fields:
        scaling: dict[str, object] = {
            "rope_type": "longrope",
            "short_factor": list(fields.sequence("rope_factors_short")),
            "long_factor": list(fields.sequence("rope_factors_long")),
            "original_max_position_embeddings": fields.integer(
                "rope.scaling.original_context_length"
            ),
        }
        if "rope.scaling.attn_factor" in fields:
            scaling["attention_factor"] = fields.number("rope.scaling.attn_factor")
        result["rope_scaling"] = scaling
    return result


GGUF = GGUFTable(
    _gguf_fields,
    family.GGUF_OUTSIDE_LAYERS
    + family.GGUF_NORMS
    + _split(GGUF_LAYER, "attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)

PLAN = family.DENSE_PLAN

PHI3 = Family("phi3", read_config, build, WEIGHTS, gguf=GGUF, plan=PLAN)
