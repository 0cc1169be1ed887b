"""Mistral, Ministral, the language model of Mistral Small 3, CWM: Llama with sliding windows.

Mistral has the same window on every layer, or none. Ministral has one on some layers. Ministral 3
scales queries with the position (`llama_4_scaling_beta`). Multimodal checkpoints
(`Mistral3ForConditionalGeneration`) hold either of them, so one reader covers all.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.models.config import AttentionTemperature, ConfigFields, ModelConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import llama
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.layer_types import FULL, SLIDING
from fulgurite.models.families.llama import (
    read_dense_config,
    with_layer_types,
    with_sliding_window,
)

# The rotary embedding of a Ministral 3 config.json that names none.
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# The same of CWM, whose every fourth layer has full attention.
CWM_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FULL_ATTENTION_INTERVAL = 4


def read_mistral(fields: ConfigFields) -> ModelConfig:
    if fields.get_str("model_type", "") == "ministral3":
        return read_ministral3(fields)
    config = read_dense_config("mistral", fields)
    return with_sliding_window(config, fields.get_optional_positive_int("sliding_window"))


def read_ministral(fields: ConfigFields) -> ModelConfig:
    config = read_dense_config("ministral", fields)
    window = fields.get_optional_positive_int("sliding_window")
    count = len(config.layers)
    types = read_layer_types(fields, count, [FULL if window is None else SLIDING] * count)
    return with_layer_types(config, types, window)


def read_cwm(fields: ConfigFields) -> ModelConfig:
    """Code World Model: Llama 3 with a window on three of four layers."""
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    fields = fields.with_defaults(**{name: CWM_ROPE}, rms_norm_eps=1e-5, head_dim=128)
    config = read_dense_config("cwm", fields, theta=1_000_000.0)
    count = len(config.layers)
    default = [SLIDING if index % FULL_ATTENTION_INTERVAL else FULL for index in range(count)]
    types = read_layer_types(fields, count, default)
    config = with_layer_types(config, types, fields.get_positive_int("sliding_window", 8192))
    return replace(config, mlp_bias=fields.get_bool("mlp_bias", False))


def read_ministral3(fields: ConfigFields) -> ModelConfig:
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    fields = fields.with_defaults(
        **{name: MINISTRAL3_ROPE}, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=False
    )
    config = read_dense_config("ministral3", fields)
    config = with_sliding_window(config, fields.get_optional_positive_int("sliding_window"))
    scaling = fields.get_section(name)
    beta = scaling.get_float("llama_4_scaling_beta", 0.0)
    if not beta:
        return config
    trained = scaling.get_positive_int("original_max_position_embeddings")
    temperature = AttentionTemperature(float(trained), beta, offset=0)
    layers = (replace(layer, attention_temperature=temperature) for layer in config.layers)
    return replace(config, layers=tuple(layers))


IGNORED = (
    *llama.IGNORED,
    r"(model\.)?vision_tower\..*",
    r"(model\.)?multi_modal_projector\..*",
)

MISTRAL = ModelFamily(
    "mistral",
    read_mistral,
    llama.build,
    llama.WEIGHT_MAPPINGS,
    IGNORED,
    sharding_rules=llama.SHARDING_RULES,
)
MINISTRAL = replace(MISTRAL, name="ministral", read_config=read_ministral)
MINISTRAL3 = replace(MISTRAL, name="ministral3", read_config=read_ministral3)
CWM = replace(MINISTRAL, name="cwm", read_config=read_cwm)
