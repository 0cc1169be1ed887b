"""dots.llm1: the attention of Qwen3 and the experts of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import glm
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.layer_types import FULL, SLIDING
from fulgurite.models.families.llama import read_dense_config, with_layer_types


def read_config(fields: ConfigFields) -> ModelConfig:
    fields.get_choice("scoring_func", ("noaux_tc", "sigmoid"), "noaux_tc")  # two names for one
    config = read_dense_config("dots1", fields)
    bias = fields.get_bool("attention_bias", False)
    count = len(config.layers)
    window = fields.get_optional_positive_int("sliding_window")
    first = count if window is None else fields.get_int("max_window_layers", count)
    types = read_layer_types(
        fields, count, [SLIDING if index >= first else FULL for index in range(count)]
    )
    config = with_layer_types(config, types, window)
    config = replace(config, qk_norm=True, qkv_bias=bias, o_proj_bias=bias)
    return glm.with_grouped_moe(config, fields)


GGUF = GGUFMapping(glm.read_gguf_grouped_moe_fields, glm.GGUF_GROUPED_MOE_WEIGHTS)

DOTS1 = ModelFamily(
    "dots1",
    read_config,
    glm.build_grouped_moe,
    glm.GROUPED_MOE_WEIGHTS,
    gguf=GGUF,
    sharding_rules=glm.MOE_SHARDING_RULES,
)
