"""The language models of Qwen's vision models: text, and positions of images, against transformers."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

pytest.importorskip("transformers", reason="transformers is the reference")

import transformers

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models import CausalLM, load_model
from fulgurite.models.config import RopeConfig
from fulgurite.models.rope import find_mrope_axes
from fulgurite.serve.engine.request import SamplingParams
from tests.models.families.test_families import TOLERANCE, relative_error
from tests.models.reference_models import COMMON, greedy_reference, make_prompt, randomize
from tests.serve.engines import make_engine

VISION = {"depth": 1, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# name -> class prefix, fields of the text and of the vision part, sections
CASES = {
    "qwen2_vl": ("Qwen2VL", {}, {"embed_dim": 16, "hidden_size": 64, **VISION}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64, **VISION},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 16},
        {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64, **VISION},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"head_dim": 16, **EXPERTS},
        {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64, **VISION},
    ),
}
SECTIONS = [2, 3, 3]


def build(name: str) -> torch.nn.Module:
    prefix, text, vision = CASES[name]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": SECTIONS}
    fields = {**COMMON, "num_hidden_layers": 3, **text, "rope_parameters": rope}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=fields, vision_config=vision, tie_word_embeddings=False
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    randomize(model.model.language_model, torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[torch.nn.Module, CausalLM]:
    reference = build(request.param)
    path = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(path)
    return reference, load_model(path)


@torch.no_grad()
def test_text_matches_transformers(pair) -> None:
    reference, model = pair
    ids = make_prompt(30)
    expected = reference(ids[None]).logits[0]
    assert relative_error(model(ids[None], torch.arange(30)[None])[0], expected) < TOLERANCE
    engine = make_engine(model, max_batched_tokens=11)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    result = engine.generate([ids.tolist(), [1, 2, 3]], params)[0]
    assert result.token_ids == greedy_reference(reference, ids, 10)


@torch.no_grad()
def test_embeddings_and_positions_of_images_match_transformers(pair) -> None:
    """Twelve tokens of text around an image of 2 x 3 x 4 tokens."""
    reference, model = pair
    generator = torch.Generator().manual_seed(0)
    time, height, width = torch.meshgrid(*map(torch.arange, (2, 3, 4)), indexing="ij")
    image = torch.stack([axis.flatten() for axis in (time, height, width)]) + 5
    before, after = torch.arange(5).expand(3, 5), torch.arange(9, 16).expand(3, 7)
    positions = torch.cat((before, image, after), dim=1)
    length = positions.shape[1]
    embeddings = torch.randn(length, 64, generator=generator)
    ids = torch.zeros(length, dtype=torch.int64)
    hidden = reference.model.language_model(
        inputs_embeds=embeddings[None], position_ids=positions[:, None]
    ).last_hidden_state[0]
    options = {"embeddings_XD": embeddings, "rope_positions_3X": positions}
    actual = model.compute_hidden_states(ids, torch.arange(length), **options)
    assert relative_error(actual, hidden) < TOLERANCE
    text = model.compute_hidden_states(ids, torch.arange(length), embeddings_XD=embeddings)
    assert relative_error(actual, text) > 100 * TOLERANCE, "the positions must matter"


def test_wrong_positions_are_refused(pair) -> None:
    _, model = pair
    with pytest.raises(ArgumentError, match="M-RoPE takes"):
        model(torch.zeros(4, dtype=torch.int64), torch.arange(4), rope_positions_3X=torch.arange(4))


def test_axes_of_pairs() -> None:
    rope = RopeConfig("default", 16, 1e4, 64, mrope_sections=(2, 3, 3))
    assert find_mrope_axes(rope).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    interleaved = RopeConfig(
        "default", 20, 1e4, 64, mrope_sections=(6, 2, 2), mrope_interleaved=True
    )
    assert find_mrope_axes(interleaved).tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 0, 0]


def test_sections_that_do_not_fit_are_refused(tmp_path) -> None:
    build("qwen2_vl").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 2, 3]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"mrope_section=\[1, 2, 3\].*rotary_dim / 2 = 8"):
        load_model(tmp_path)


def test_published_experts_are_transposed(tmp_path) -> None:
    """Files on the hub hold [E, D, 2I] and [E, I, D]; transformers 5 saves the transposes."""
    build("qwen3_vl_moe").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    other = load_model(tmp_path)
    ids, positions = make_prompt(9), torch.arange(9)
    assert torch.equal(model(ids, positions), other(ids, positions))
