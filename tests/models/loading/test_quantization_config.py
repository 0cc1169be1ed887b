"""`quantization_config`: what is read from it, and the errors that name a field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.errors import WeightsError
from fulgurite.models import load_model, open_checkpoint
from fulgurite.models.config import ConfigFields
from fulgurite.models.loading.quantization_config import (
    CheckpointQuantization,
    matches_module,
    parse_quantization,
    read_quantization,
)
from tests.models.loading.checkpoint_files import edit_config
from tests.models.loading.published_layouts import LAYOUTS, args, compressed, write_checkpoints


def parse(section: dict[str, Any]) -> CheckpointQuantization:
    return parse_quantization(ConfigFields(section, "config.json, quantization_config"))


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.*.mlp.gate", "model.layers.3.mlp.gate", True),
        ("*lm_head*", "lm_head", True),
        ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("vision", "model.division.proj", False),
    ],
)
def test_patterns(pattern: str, module: str, expected: bool) -> None:
    assert matches_module(pattern, module) == expected


def test_groups_of_compressed_tensors() -> None:
    weights, inputs = args(4, "int", "group", group_size=128), args(8, "int", "token", dynamic=True)
    section = compressed(weights, None)
    section["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj$"], "weights": args(8, "int", "channel"),
        "input_activations": inputs,
    }  # fmt: skip
    found = parse(section)
    assert found.find_scheme("model.layers.0.mlp.up_proj").activations == "none"
    assert found.find_scheme("model.layers.0.mlp.down_proj").activations == "dynamic"
    assert found.find_scheme("lm_head") is None and found.is_ignored("model.layers.0.mlp.gate")


@pytest.mark.parametrize(
    ("section", "activations", "kv_cache"),
    [
        ({"quant_method": "fp8"}, "dynamic", None),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "static", None),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, "dynamic", "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "dynamic", None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "static", None),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "static", "fp8"),
        ({"quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": "INT8"}, "none", None),
        (LAYOUTS["ct_fp8_static"].config, "static", "fp8"),
        (LAYOUTS["ct_nvfp4"].config, "static", None),
        (LAYOUTS["ct_int4"].config, "none", None),
        (LAYOUTS["awq"].config, "none", None),
    ],
)
def test_activations_and_kv_cache(section, activations, kv_cache) -> None:
    found = parse(section)
    assert found.find_scheme("model.layers.0.mlp.up_proj").activations == activations
    assert found.kv_cache == kv_cache


def test_mixed_precision_of_modelopt() -> None:
    layers = {
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.down_proj": {"quant_algo": "W4A16_AWQ", "group_size": 128},
    }
    found = parse({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert found.find_scheme("model.layers.0.mlp.up_proj").activations == "static"
    assert found.find_scheme("model.layers.0.mlp.down_proj").activations == "none"
    assert found.find_scheme("model.layers.1.mlp.down_proj") is None


@pytest.mark.parametrize(
    ("packing", "method", "offset"),
    [
        ("auto_round:auto_gptq", "gptq", "gptq"),
        ("auto_round:auto_gptq:exllamav2", "gptq", "gptq"),
        ("auto_round:gptqmodel", "gptq", "gptq_v2"),
        ("auto_round", "gptq", "gptq_v2"),
        ("auto_round:auto_awq", "awq", None),
    ],
)
def test_auto_round_names_the_layout_of_another(packing, method, offset) -> None:
    extra = {"lm_head": {"bits": 16}}
    section = {"quant_method": "auto-round", "packing_format": packing, "bits": 4}
    found = parse({**section, "extra_config": extra})
    assert found.method == "auto-round" and not found.section["dynamic"]
    assert found.section["quant_method"] == method
    assert found.section.get("checkpoint_format") == offset
    mixed = parse({**section, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}})
    assert mixed.section["dynamic"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "aqlm"}, r"quant_method='aqlm' is not supported(.|\n)*fulgurite quantize"),
    ({"quant_method": "fp8", "activation_scheme": "random"}, r"activation_scheme='random'"),
    ({"quant_method": "auto-round", "data_type": "mx_fp"}, r"data_type='mx_fp'"),
    ({"quant_method": "auto-round", "act_bits": 8}, r"act_bits=8 is not supported"),
    ({"quant_method": "fp8", "ignored_layers": "lm_head"}, r"ignored_layers must be of type list"),
    ({"quant_method": "awq", "modules_to_not_convert": [3]}, r"modules_to_not_convert must be"),
    (
        compressed(args(8, "int", "channel"), None, ignore=["re:("]),
        r"ignore has an invalid pattern",
    ),
    (
        compressed(args(8, "int", "channel"), None, quantization_status="calibration"),
        r"quantization_status='calibration'",
    ),
    (
        compressed(
            args(8, "int", "channel"), None, sparsity_config={"format": "sparse-24-bitmask"}
        ),
        r"sparsity_config\.format='sparse-24-bitmask'",
    ),
    (
        compressed(
            args(8, "int", "channel"),
            None,
            transform_config={"config_groups": {"R3": {"apply": [{"location": "q_attn"}]}}},
        ),
        r"transform_config\.config_groups\.R3",
    ),
    (compressed(args(4, "int", "group"), None, format="marlin-24"), r"format='marlin-24'"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {"g": {"weights": args(4, "int", "group"), "format": "later"}},
        },
        r"format='later' is not supported(.|\n)*config_groups, g",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]}}},
        r"config_groups\.g quantizes activations but no weights",
    ),
    ({"quant_method": "fp8", "kv_cache_scheme": 3, "ignore": 3}, r"ignore must be of type list"),
]


@pytest.mark.parametrize(("section", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused_sections_name_the_field(section: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        parse(section)


def test_sections_of_config_json_come_first(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    fields = ConfigFields({"compression_config": LAYOUTS["ct_int8"].config}, "config.json")
    assert read_quantization(fields, tmp_path).method == "compressed-tensors"
    assert read_quantization(ConfigFields({}, "config.json"), tmp_path).method == "modelopt"
    (tmp_path / "hf_quant_config.json").write_text("[")
    with pytest.raises(WeightsError, match=r"cannot parse hf_quant_config\.json"):
        read_quantization(ConfigFields({}, "config.json"), tmp_path)


def test_ignored_modules_are_dense_in_the_file(tmp_path: Path) -> None:
    """lm_head is on the ignore list and stored dense; the rest is quantized."""
    folder, _ = write_checkpoints(tmp_path, "ct_fp8_channel", moe=False)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization.is_ignored("lm_head")
    assert checkpoint.entries()["lm_head.weight"].dtype == torch.float32
    assert load_model(folder, keep_quantized=True).lm_head.weight.dtype == torch.float32


def test_fields_of_a_weight_are_named(tmp_path: Path) -> None:
    folder, _ = write_checkpoints(tmp_path, "awq", moe=False)
    edit_config(folder, quantization_config=LAYOUTS["awq"].config | {"bits": 3})
    with pytest.raises(WeightsError, match="bits"):
        load_model(folder)


@pytest.mark.parametrize("name", ["ct_fp8_channel", "ct_int8", "modelopt_nvfp4"])
def test_a_weight_without_its_scale_is_an_error(tmp_path: Path, name: str) -> None:
    folder, _ = write_checkpoints(tmp_path, name, moe=False)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / "model-a.safetensors"
    (folder / "model.safetensors.index.json").unlink()
    shard.rename(folder / "model.safetensors")  # the other shard has the scales
    assert any("scale" in tensor for tensor in index["weight_map"])
    with pytest.raises(WeightsError, match=r"has dtype torch\.\w+ and no scales"):
        load_model(folder)
