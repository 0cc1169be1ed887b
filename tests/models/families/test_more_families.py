"""The families of `MORE_CASES` against transformers, through the plain model and the engine."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers

from fulgurite.errors import WeightsError
from fulgurite.models import load_model
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.registry import find_family
from fulgurite.serve.engine.request import SamplingParams
from tests.models.families.test_families import TOLERANCE, check_no_tokens, relative_error
from tests.models.more_cases import MORE_CASES
from tests.models.reference_models import (
    CASES,
    COMMON,
    ModelPair,
    greedy_reference,
    make_prompt,
    randomize,
)
from tests.models.test_config import INVALID_VALUES
from tests.serve.engines import check_idle, make_engine

LENGTHS, NEW = (3, 30, 17), 12


@pytest.fixture(params=list(MORE_CASES))
def pair(request: pytest.FixtureRequest, get_pair) -> ModelPair:
    return get_pair(request.param)


def read_config(fields: dict[str, object]) -> ModelConfig:
    config_fields = ConfigFields(fields, "config.json")
    return find_family(config_fields).read_config(config_fields)


def test_logits_and_gradients_match_transformers(pair: ModelPair) -> None:
    """70 tokens: past windows and LongRoPE's switch (48)."""
    ids, embedding = make_prompt(70), pair.reference.get_input_embeddings().weight
    with torch.enable_grad():
        expected = pair.reference(ids[None]).logits[0]
        actual = pair.model(ids[None], torch.arange(70)[None])[0]
        (expected_grad,) = torch.autograd.grad(expected.pow(2).mean(), [embedding])
        (actual_grad,) = torch.autograd.grad(actual.pow(2).mean(), [pair.model.embed_tokens.weight])
    assert relative_error(actual, expected) < TOLERANCE
    assert relative_error(actual_grad, expected_grad) < TOLERANCE


def test_no_tokens(pair: ModelPair) -> None:
    check_no_tokens(pair)


def test_engine_matches_transformers(pair: ModelPair) -> None:
    """A batch, chunked prefill mixed with decode steps: every token is transformers' best."""
    engine = make_engine(pair.model, max_batched_tokens=11, context=100)
    prompts = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    results = engine.generate([ids.tolist() for ids in prompts], params)
    for ids, result in zip(prompts, results, strict=True):
        if pair.model.needs_sequence_lengths:
            assert result.token_ids == greedy_reference(pair.reference, ids, NEW)
            continue
        sequence = torch.cat((ids, torch.tensor(result.token_ids)))
        best = pair.reference(sequence[None]).logits[0, len(ids) - 1 : -1].argmax(dim=-1)
        assert result.token_ids == best.tolist()
    check_idle(engine)


def test_float16_error_is_at_most_twice_that_of_transformers(pair: ModelPair) -> None:
    """Errors relative to float32. Medians, since another expert choice changes a whole row."""
    ids = make_prompt(40)
    exact = pair.reference(ids[None]).logits[0]
    half = type(pair.reference).from_pretrained(
        pair.path, dtype=torch.float16, attn_implementation="eager"
    )
    allowed = 2 * (half(ids[None]).logits[0].float() - exact).abs().median()
    actual = load_model(pair.path, dtype=torch.float16)(ids[None], torch.arange(40)[None])[0]
    assert (actual.float() - exact).abs().median() < allowed


@pytest.mark.parametrize("name", MORE_CASES)
def test_config_of_transformers_4(name: str, get_pair) -> None:
    """`rope_theta`, `rope_scaling` and `torch_dtype` instead of `rope_parameters` and `dtype`."""
    pair = get_pair(name)
    values = json.loads((pair.path / "config.json").read_text())
    assert read_config(values) == pair.model.config
    scaling = values.pop("rope_parameters")
    scaling = dict(scaling.get("full_attention", scaling))
    values["torch_dtype"] = values.pop("dtype")
    values["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        values["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    values["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    assert read_config(values) == pair.model.config


@pytest.mark.parametrize("name", MORE_CASES)
def test_invalid_values_in_any_field(name: str, get_pair) -> None:
    """Reading a config succeeds or raises WeightsError, never another exception."""
    values = json.loads((get_pair(name).path / "config.json").read_text())
    sections = [(), *((name,) for name, value in values.items() if isinstance(value, dict))]
    for section in sections:
        for field in values[section[0]] if section else values:
            for value in INVALID_VALUES:
                damaged = copy.deepcopy(values)
                (damaged[section[0]] if section else damaged)[field] = value
                try:
                    read_config(damaged)
                except WeightsError as error:
                    assert str(error)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("granite_moe_hybrid", {"layer_types": ["linear_attention"] * 4}),
        ("granite_moe_hybrid", {"position_embedding_type": "alibi"}),
        ("phi_moe", {"num_experts_per_tok": 3}),
        ("ernie_moe", {"moe_norm_min": 0.5}),
        ("hunyuan_moe", {"moe_topk": [1, 2, 3, 3]}),
        ("hunyuan", {"use_cla": True}),
        ("minimax_m2", {"qk_norm_type": "per_head"}),
        ("minimax_m2", {"scoring_func": "softmax"}),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}),
        ("minimax_m2", {"shared_intermediate_size": 64}),
        ("dots1", {"scoring_func": "softmax"}),
        ("exaone4", {"sliding_window_pattern": "LLX", "layer_types": None}),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}),
        ("smollm3", {"no_rope_layers": [1]}),
    ],
)
def test_unsupported_values_are_rejected(name: str, change: dict[str, object]) -> None:
    prefix, fields = MORE_CASES[name]
    values = {**COMMON, **fields, "architectures": [prefix + "ForCausalLM"], **change}
    with pytest.raises(WeightsError, match=next(iter(change))):
        read_config(values)


@pytest.mark.parametrize("name", ["mistral", "ministral3"])
def test_language_model_of_mistral3(name: str, tmp_path) -> None:
    """The text part of a multimodal checkpoint, which may be a Mistral or a Ministral 3."""
    _, fields = (CASES | MORE_CASES)[name]
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28}
    config = transformers.Mistral3Config(
        text_config={**COMMON, **fields, "model_type": name},
        vision_config={**vision, "num_attention_heads": 2, "head_dim": 16, "model_type": "pixtral"},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    reference = transformers.Mistral3ForConditionalGeneration(config).eval()
    randomize(reference, torch.Generator().manual_seed(1))
    reference.save_pretrained(tmp_path)
    ids = make_prompt(40)
    expected = reference(input_ids=ids[None]).logits[0]
    assert relative_error(load_model(tmp_path)(ids, torch.arange(40)), expected) < TOLERANCE
