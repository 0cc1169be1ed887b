"""SmolLM3 and Seed-OSS: Llama, with layers without RoPE and with other biases, respectively."""

from __future__ import annotations

from dataclasses import replace

from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import common, llama
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.layer_types import FULL, SLIDING
from fulgurite.models.families.llama import read_dense_config, with_layer_types

DEFAULT_NO_ROPE_INTERVAL = 4


def read_smollm3(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(tie_word_embeddings=True)
    config = read_dense_config("smollm3", fields, theta=2_000_000.0)
    count = len(config.layers)
    interval = fields.get_positive_int("no_rope_layer_interval", DEFAULT_NO_ROPE_INTERVAL)
    # In config.json, `no_rope_layers` is nonzero for the layers that use RoPE.
    uses_rope = fields.get_floats("no_rope_layers") or tuple(
        (index + 1) % interval for index in range(count)
    )
    if len(uses_rope) < count:
        raise fields.error(f"no_rope_layers has {len(uses_rope)} entries for {count} layers")
    window = fields.get_optional_positive_int("sliding_window")
    windowed = fields.get_bool("use_sliding_window", False) and window is not None
    default = [SLIDING if windowed and not uses_rope[i] else FULL for i in range(count)]
    types = read_layer_types(fields, count, default)
    config = with_layer_types(config, types, window if windowed else None)
    layers = tuple(
        layer if uses_rope[index] else replace(layer, rope=None)
        for index, layer in enumerate(config.layers)
    )
    bias = fields.get_bool("attention_bias", False)
    return replace(
        config,
        layers=layers,
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=fields.get_bool("mlp_bias", False),
    )


def read_seed_oss(fields: ConfigFields) -> ModelConfig:
    return replace(
        read_dense_config("seed_oss", fields.with_defaults(head_dim=128)),
        qkv_bias=fields.get_bool("attention_bias", True),
        o_proj_bias=fields.get_bool("attention_out_bias", False),
        mlp_bias=fields.get_bool("mlp_bias", False),
    )


GGUF_SEED_OSS = GGUFMapping(
    common.read_gguf_fields,
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_NORMS_AFTER_ATTENTION
    + common.GGUF_ATTENTION
    + common.GGUF_MLP,
)

SMOLLM3 = ModelFamily(
    "smollm3",
    read_smollm3,
    llama.build,
    llama.WEIGHT_MAPPINGS,
    gguf=llama.GGUF,
    sharding_rules=llama.SHARDING_RULES,
)
SEED_OSS = ModelFamily(
    "seed_oss",
    read_seed_oss,
    llama.build,
    llama.WEIGHT_MAPPINGS,
    gguf=GGUF_SEED_OSS,
    sharding_rules=llama.SHARDING_RULES,
)
