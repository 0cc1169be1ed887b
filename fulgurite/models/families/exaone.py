"""EXAONE 4 and K-EXAONE: QK norm; with windows, full attention has no RoPE.

EXAONE 4 normalizes the output of each block. K-EXAONE (ExaoneMoe) normalizes its input, and has the
experts of DeepSeek-V3.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.config_readers import read_layer_types
from fulgurite.models.families import common, glm, olmo
from fulgurite.models.families.common import HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.layer_types import FULL, SLIDING
from fulgurite.models.families.llama import read_dense_config, with_layer_types
from fulgurite.models.weight_mapping import WeightMapping

DEFAULT_SLIDING_WINDOW_PATTERN = 4


def read_exaone4(fields: ConfigFields) -> ModelConfig:
    return _read("exaone4", fields)


def read_exaone_moe(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(
        n_routed_experts=fields.get_positive_int("num_experts", 64),
        n_shared_experts=fields.get_int("num_shared_experts", 1),
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        sliding_window=4096,
    )
    config = glm.with_grouped_moe(_read("exaone_moe", fields), fields)
    num_dense = fields.get_int("first_k_dense_replace", 1)
    return glm.with_mlp_layer_types(config, fields, num_dense)


def _read(name: str, fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    config = replace(read_dense_config(name, fields), qk_norm=True)
    count = len(config.layers)
    window = fields.get_optional_positive_int("sliding_window")
    if window is None:
        read_layer_types(fields, count, [FULL] * count, allowed=(FULL,))
        return config
    types = read_layer_types(fields, count, _read_pattern(fields, count))
    config = with_layer_types(config, types, window)
    layers = tuple(
        layer if kind == SLIDING else replace(layer, rope=None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    return replace(config, layers=layers)


def _read_pattern(fields: ConfigFields, count: int) -> list[str]:
    """Layer types from `sliding_window_pattern`: an interval, or letters such as "LLLG"."""
    pattern = fields.values.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        interval = fields.get_positive_int("sliding_window_pattern", DEFAULT_SLIDING_WINDOW_PATTERN)
        return [SLIDING if (index + 1) % interval else FULL for index in range(count)]
    if not pattern or set(pattern) - {"L", "G"}:
        raise fields.error(f"sliding_window_pattern={pattern!r} must consist of L and G")
    types = [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(count)]
    return [*types[:-1], FULL]


def _read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    window = fields.get_optional_positive_int("attention.sliding_window")
    return common.read_gguf_fields(fields) | {"sliding_window": window}


GGUF = GGUFMapping(_read_gguf_fields, olmo.GGUF_POST_NORM_WEIGHTS)

EXAONE4 = ModelFamily(
    "exaone4",
    read_exaone4,
    olmo.build_post_norm,
    olmo.POST_NORM_WEIGHTS,
    gguf=GGUF,
    sharding_rules=common.DENSE_SHARDING,
)
EXAONE_MOE = ModelFamily(
    "exaone_moe",
    read_exaone_moe,
    glm.build_grouped_moe,
    glm.GROUPED_MOE_WEIGHTS[: -len(common.CORRECTION_BIAS)]
    + (
        WeightMapping(
            HF_LAYER + "mlp.e_score_correction_bias",
            "layers.{layer}.feed_forward.router.correction_bias",
        ),
    ),
    ignored=(r"mtp.*",),
    sharding_rules=glm.MOE_SHARDING_RULES,
)
