"""config.json: both spellings, and errors that name the field."""

from __future__ import annotations

import copy
import json

import pytest

from fulgurite.errors import WeightsError
from fulgurite.models.config import Fields, ModelConfig
from fulgurite.models.registry import ARCHITECTURES, family_of
from tests.models.model_oracle import CASES, COMMON, Pair

LLAMA = {**COMMON, "architectures": ["LlamaForCausalLM"]}


def read(fields: dict[str, object]) -> ModelConfig:
    found = Fields(fields, "config.json")
    return family_of(found).read_config(found)


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(WeightsError) as caught:
        read({**LLAMA, "architectures": ["WhisperForConditionalGeneration"]})
    assert "WhisperForConditionalGeneration" in str(caught.value)
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    with pytest.raises(WeightsError, match="none named"):
        read({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "the field hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be of type int, not '64'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be of type bool"),
        ({"vocab_size": True}, "vocab_size must be of type int"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; known: silu"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported"),
        ({"num_key_value_heads": 3}, "4 query heads can't share 3 key heads"),
        ({"rope_scaling": "fast"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "the field factor is missing"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be a list of numbers"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be 1 or more"),
        ({"hidden_size": -64}, "hidden_size=-64 must be 1 or more"),
        ({"vocab_size": 2**70}, "fit into 64 bits"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"head_dim": 7}, "can't turn in pairs"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rope_theta": 0}, "rope_theta=0 must be more than 0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0 must be more than 0"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, "log(1)"),
        ({"partial_rotary_factor": 1e20}, "turn in pairs"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(WeightsError) as caught:
        read({**LLAMA, **change})
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
    ],
)
def test_what_is_not_built_is_refused(name: str, change: dict[str, object]) -> None:
    prefix, fields = CASES[name]
    with pytest.raises(WeightsError, match=next(iter(change))):
        read({**COMMON, **fields, "architectures": [prefix + "ForCausalLM"], **change})


def test_gemma_reads_the_old_spelling(get_pair) -> None:
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
    assert read(old) == read(new)


def test_old_phi_calls_its_scaling_su(get_pair) -> None:
    new = json.loads((get_pair("phi3").path / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = dict(new["rope_parameters"])
    old["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    old["rope_theta"] = scaling.pop("rope_theta")
    for kind in ("su", "yarn", "longrope"):
        old["rope_scaling"] = {**scaling, "rope_type": None, "type": kind}
        assert read(old) == read(new)


def test_a_config_is_a_value(pair: Pair) -> None:
    fields = json.loads((pair.path / "config.json").read_text())
    assert read(fields) == pair.ours.config
    assert hash(read(fields)) == hash(pair.ours.config)


NASTY = (None, 0, -1, 1, 3, 0.0, -2.5, float("inf"), float("nan"), "x", [], [1], {}, True)


def test_any_field_may_be_nonsense(pair: Pair) -> None:
    """A configuration is read, or an error of ours says why not; never another."""
    values = json.loads((pair.path / "config.json").read_text())
    sections = [(), *((name,) for name, value in values.items() if isinstance(value, dict))]
    for section in sections:
        for name in values[section[0]] if section else values:
            for nasty in NASTY:
                changed = copy.deepcopy(values)
                (changed[section[0]] if section else changed)[name] = nasty
                fields = Fields(changed, "config.json")
                try:
                    family_of(fields).read_config(fields)
                except WeightsError as error:
                    assert str(error)
