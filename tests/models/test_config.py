"""config.json: old and new fields, and errors that name the field."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from transformers.activations import ACT2FN

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.registry import ARCHITECTURES, find_family
from fulgurite.models.loading.checkpoint import get_language_model_fields
from tests.models.more_cases import MORE_CASES
from tests.models.reference_models import CASES, COMMON, ModelPair

LLAMA = {**COMMON, "architectures": ["LlamaForCausalLM"]}


def read_config(fields: dict[str, object]) -> ModelConfig:
    config_fields = ConfigFields(fields, "config.json")
    return find_family(config_fields).read_config(config_fields)


def test_unsupported_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(WeightsError) as caught:
        read_config({**LLAMA, "architectures": ["WhisperForConditionalGeneration"]})
    assert "WhisperForConditionalGeneration" in str(caught.value)
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    with pytest.raises(WeightsError, match="names no architecture"):
        read_config({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "the field hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be of type int, not '64'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be of type bool"),
        ({"vocab_size": True}, "vocab_size must be of type int"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; supported: silu"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4 must be a multiple of num_key_value_heads=3",
        ),
        ({"rope_scaling": "fast"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "the field factor is missing"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be a list of numbers"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"hidden_size": -64}, "hidden_size=-64 must be at least 1"),
        ({"vocab_size": 2**70}, "fit into 64 bits"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"head_dim": 7}, "rotary_dim=7 must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rope_theta": 0}, "rope_theta=0 must be greater than 0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0 must be greater than 0"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, "other than 1"),
        ({"partial_rotary_factor": 1e20}, "must be even and between 2"),
    ],
)
def test_errors_name_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(WeightsError) as caught:
        read_config({**LLAMA, **change})
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("gemma3", {"attn_logit_softcapping": 50.0}),
        ("gemma2", {"layer_types": ["full_attention"]}),
        ("llama", {"hidden_act": "relu"}),
        ("gemma2", {"hidden_activation": "relu"}),
        ("qwen3_next", {"hidden_act": "gelu"}),  # also of its convolutions
        ("qwen3_5_moe", {"hidden_act": "gelu"}),
    ],
)
def test_unsupported_values_are_rejected(name: str, change: dict[str, object]) -> None:
    prefix, fields = CASES[name]
    with pytest.raises(WeightsError, match=next(iter(change))):
        read_config({**COMMON, **fields, "architectures": [prefix + "ForCausalLM"], **change})


@pytest.mark.parametrize(
    ("name", "activation"),
    [("swish", "silu"), ("gelu_new", "gelu_pytorch_tanh"), ("gelu_fast", "gelu_pytorch_tanh")],
)
def test_other_names_of_an_activation(name: str, activation: str) -> None:
    assert read_config({**LLAMA, "hidden_act": name}).activation == activation
    x = torch.linspace(-4, 4, 101)
    assert torch.allclose(ACT2FN[name](x), ACT2FN[activation](x), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "field"),
    [("cohere", "layer_norm_eps"), ("starcoder2", "norm_epsilon"), ("lfm2", "norm_eps")],
)
def test_a_family_reads_its_own_epsilon(name: str, field: str) -> None:
    """Not `rms_norm_eps`, which another tool may have left in the file."""
    prefix, fields = (CASES | MORE_CASES)[name]
    values = {**COMMON, **fields, "architectures": [prefix + "ForCausalLM"], "rms_norm_eps": 0.5}
    assert read_config({**values, field: 1e-3}).norm_eps == 1e-3
    assert read_config(values).norm_eps == 1e-5


@pytest.mark.parametrize(
    ("name", "dtype"), [("torch.bfloat16", torch.bfloat16), ("float64", torch.float32)]
)
def test_names_of_dtypes(name: str, dtype: torch.dtype) -> None:
    assert read_config({**LLAMA, "torch_dtype": name}).dtype == dtype


def test_gemma3_old_rope_fields(get_pair) -> None:
    new = json.loads((get_pair("gemma3").path / "config.json").read_text())
    old = {
        key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")
    }
    old |= {
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert read_config(old) == read_config(new)


def test_phi3_old_rope_types(get_pair) -> None:
    new = json.loads((get_pair("phi3").path / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = dict(new["rope_parameters"])
    old["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    old["rope_theta"] = scaling.pop("rope_theta")
    for rope_type in ("su", "yarn", "longrope"):
        old["rope_scaling"] = {**scaling, "rope_type": None, "type": rope_type}
        assert read_config(old) == read_config(new)


def test_config_is_hashable_and_comparable(pair: ModelPair) -> None:
    fields = json.loads((pair.path / "config.json").read_text())
    assert read_config(fields) == pair.model.config
    assert hash(read_config(fields)) == hash(pair.model.config)


INVALID_VALUES = (None, 0, -1, 1, 3, 0.0, -2.5, float("inf"), float("nan"), "x", [], [1], {}, True)


def test_invalid_values_in_any_field(pair: ModelPair) -> None:
    """Reading a config succeeds or raises WeightsError, never another exception."""
    values = json.loads((pair.path / "config.json").read_text())
    sections = [(), *((name,) for name, value in values.items() if isinstance(value, dict))]
    for section in sections:
        for name in values[section[0]] if section else values:
            for value in INVALID_VALUES:
                damaged = copy.deepcopy(values)
                (damaged[section[0]] if section else damaged)[name] = value
                fields = ConfigFields(damaged, "config.json")
                try:
                    find_family(fields).read_config(fields)
                except WeightsError as error:
                    assert str(error)


@pytest.mark.parametrize(
    ("case", "field", "read"),
    [
        ("gemma2", "attn_logit_softcapping", lambda config: config.attention_softcap),
        ("gemma2", "final_logit_softcapping", lambda config: config.logit_softcap),
        ("gpt_oss", "rms_norm_eps", lambda config: config.norm_eps),
        ("deepseek_v3", "norm_topk_prob", lambda config: config.moe.renormalize),
        ("deepseek_v3", "routed_scaling_factor", lambda config: config.moe.routed_scaling_factor),
    ],
)
def test_an_absent_field_has_the_default_of_transformers(case, field, read) -> None:
    prefix, values = CASES[case]
    fields = {**COMMON, **values, "architectures": [f"{prefix}ForCausalLM"]}
    fields.pop(field, None)
    expected = getattr(getattr(transformers, f"{prefix}Config")(), field)
    assert read(read_config(fields)) == expected


def test_null_turns_a_cap_off() -> None:
    fields = {**COMMON, **CASES["gemma2"][1], "architectures": ["Gemma2ForCausalLM"]}
    config = read_config({**fields, "attn_logit_softcapping": None})
    assert config.attention_softcap is None and config.logit_softcap == 3.0


def test_rope_scaling_that_was_added_to_a_newer_file_replaces_its_scaling() -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    fields = ConfigFields(
        {**LLAMA, "rope_parameters": rope, "rope_scaling": scaling}, "config.json"
    )
    merged = get_language_model_fields(fields)
    (layer, *_) = find_family(merged).read_config(merged).layers
    assert layer.rope is not None
    assert (layer.rope.rope_type, layer.rope.factor, layer.rope.theta) == ("yarn", 4.0, 5000.0)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_a_file_without_architectures_is_known_by_its_model_type(model_type: str) -> None:
    family = find_family(ConfigFields({"model_type": model_type, "architectures": None}, "x"))
    assert family.name == model_type
