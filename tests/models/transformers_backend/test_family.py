"""Checkpoints outside the registry: equal to transformers, or refused with the reason."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers", reason="its modules are tested")

import transformers

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models import ARCHITECTURES, load_model, open_checkpoint
from fulgurite.models.kv_cache import ContiguousKVCache
from fulgurite.models.loading.loader import build_meta_model
from fulgurite.models.transformers_backend.check import check_model
from fulgurite.models.transformers_backend.model import TransformersModel
from tests.models.transformers_backend.checkpoints import (
    CASES,
    SIZES,
    VOCAB_SIZE,
    build_module,
    write_checkpoint,
)


@pytest.fixture(scope="module", params=list(CASES))
def loaded(request, tmp_path_factory):
    """A module of transformers and its checkpoint, loaded here."""
    module = build_module(request.param)
    folder = write_checkpoint(module, tmp_path_factory.mktemp(request.param))
    return module, load_model(folder, implementation="transformers"), folder


def test_logits_equal_transformers(loaded):
    module, model, _ = loaded
    ids = torch.randint(0, VOCAB_SIZE, (2, 20))
    positions = torch.arange(20).expand(2, -1)
    expected = module(input_ids=ids).logits
    torch.testing.assert_close(model(ids, positions), expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(model(ids[1], positions[1]), expected[1], rtol=2e-4, atol=2e-4)


def test_logits_of_a_cache_equal_those_of_whole_prompts(loaded):
    """Prefill of [B, T] in two parts, then single tokens; the head runs over the last row only."""
    _, model, _ = loaded
    ids, positions = torch.randint(0, VOCAB_SIZE, (2, 17)), torch.arange(17).expand(2, -1)
    expected = model(ids, positions)
    cache = ContiguousKVCache(model.attention_specs, batch=2, capacity=17)
    for start, end in ((0, 9), (9, 15), (15, 16), (16, 17)):
        hidden = model.compute_hidden_states(ids[:, start:end], positions[:, start:end], cache)
        last = model.compute_logits(hidden[:, -1])
        torch.testing.assert_close(last, expected[:, end - 1], rtol=2e-4, atol=2e-4)


def test_meta_model_has_the_specs_and_sizes_of_the_loaded_one(loaded):
    _, model, folder = loaded
    checkpoint = open_checkpoint(folder, "transformers")
    meta = build_meta_model(checkpoint, torch.float32, keep_quantized=True)
    assert meta.attention_specs == model.attention_specs
    assert {n: p.shape for n, p in meta.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_specs_are_read_from_the_modules(tmp_path):
    folder = write_checkpoint(build_module("gemma2"), tmp_path)
    specs = load_model(folder, implementation="transformers").attention_specs
    assert [spec.sliding_window for spec in specs] == [6, None, 6]
    assert {(spec.num_heads, spec.num_kv_heads, spec.key_dim) for spec in specs} == {(4, 2, 12)}
    assert {(spec.softcap, spec.scale) for spec in specs} == {(50.0, 256**-0.5)}


def test_an_architecture_outside_the_registry_runs_through_transformers(tmp_path):
    assert "PersimmonForCausalLM" not in ARCHITECTURES, "this test needs another architecture"
    folder = write_checkpoint(build_module("persimmon"), tmp_path)
    assert isinstance(load_model(folder), TransformersModel)


@pytest.mark.parametrize("change", ["scale", "window", "positions"])
def test_check_finds_attention_that_differs(change, tmp_path):
    folder = write_checkpoint(build_module("cohere2"), tmp_path)
    model = load_model(folder, implementation="transformers")
    assert isinstance(model, TransformersModel) and check_model(model) is None
    if change == "scale":
        model.specs = tuple(replace(spec, scale=spec.scale * 1.1) for spec in model.specs)
    elif change == "window":
        model.specs = tuple(replace(spec, sliding_window=5) for spec in model.specs)
    else:
        original = model.decoder.forward
        model.decoder.forward = lambda input_ids, position_ids, **options: original(
            input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **options
        )
    assert "differ from those with eager attention" in str(check_model(model))


# ---- multimodal checkpoints --------------------------------------------------------------------------

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
GEMMA4_TEXT = {
    **SIZES,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "head_dim": 8,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
MULTIMODAL = {
    "AyaVision": ({**SIZES, "model_type": "cohere2"}, SIGLIP),
    "Gemma4": (GEMMA4_TEXT, VISION),
    "Llava": ({**SIZES, "model_type": "gemma2", "head_dim": 12}, SIGLIP),
}


def build_multimodal(name, text, vision):
    torch.manual_seed(3)
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    config = model_class.config_class(text_config=text, vision_config=vision)
    module = model_class(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("name", list(MULTIMODAL))
def test_text_decoder_of_a_multimodal_checkpoint(name, tmp_path):
    """Logits of text are the whole model's, and only the decoder and the head are held."""
    module = build_multimodal(name, *MULTIMODAL[name])
    folder = write_checkpoint(module, tmp_path)
    model = load_model(folder)
    assert isinstance(model, TransformersModel)
    ids = torch.randint(1, VOCAB_SIZE, (20,))
    expected = module(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(model(ids, torch.arange(20)), expected, rtol=2e-4, atol=2e-4)
    names = {parameter for parameter, _ in model.named_parameters()}
    assert not any("vision" in parameter or "projector" in parameter for parameter in names)
    meta = build_meta_model(open_checkpoint(folder), torch.float32, keep_quantized=True)
    assert {parameter for parameter, _ in meta.named_parameters()} == names


def test_a_decoder_that_is_not_causal_is_refused(tmp_path):
    """PaliGemma's prompts see themselves; transformers' eager attention does not show it."""
    module = build_multimodal("PaliGemma", {**SIZES, "model_type": "gemma"}, SIGLIP)
    with pytest.raises(WeightsError, match="not causal"):
        load_model(write_checkpoint(module, tmp_path))


# ---- refusals ----------------------------------------------------------------------------------------


def write_config(folder, architecture, config, **changes):
    """A checkpoint without a weight: refusals come before any is read."""
    fields = {**config.to_dict(), "architectures": [architecture], **changes}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return folder


ALIBI = {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
CONV = ["conv", "full_attention", "conv"]
REFUSED = {
    "T5ForConditionalGeneration": ("T5Config", {"num_layers": 1}, "an encoder and a decoder"),
    "MambaForCausalLM": ("MambaConfig", {"hidden_size": 32}, "layers of type linear_attention"),
    "BloomForCausalLM": ("BloomConfig", ALIBI, "takes no position_ids"),
    "GPTJForCausalLM": (
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4},
        "another attention",
    ),
    "BertLMHeadModel": ("BertConfig", SIZES, "neither causal"),
    "LlamaForSequenceClassification": ("LlamaConfig", SIZES, "its causal LM is LlamaForCausalLM"),
    "StableLmForCausalLM": ("StableLmConfig", {**SIZES, "rope_parameters": DYNAMIC}, "dynamic"),
    "DiffLlamaForCausalLM": ("DiffLlamaConfig", SIZES, "share one attention module"),
    "Lfm2ForCausalLM": ("Lfm2Config", {**SIZES, "layer_types": CONV}, "layers of type conv"),
}


@pytest.mark.parametrize("architecture", list(REFUSED))
def test_refused_with_the_reason(architecture, tmp_path):
    name, sizes, reason = REFUSED[architecture]
    folder = write_config(tmp_path, architecture, getattr(transformers, name)(**sizes))
    with pytest.raises(WeightsError, match=f"(?s){architecture} can't run.*{reason}") as raised:
        load_model(folder, implementation="transformers")
    assert "config.json" in str(raised.value)


def test_unknown_model_type_is_refused_and_its_code_not_run(tmp_path):
    (tmp_path / "modeling.py").write_text("raise SystemExit('this code must not run')")
    config = transformers.LlamaConfig(**SIZES)
    code = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    write_config(tmp_path, "NewForCausalLM", config, model_type="new", auto_map=code)
    with pytest.raises(WeightsError, match="has no model_type 'new', and the code of a checkpoint"):
        load_model(tmp_path)


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    write_config(tmp_path, "PersimmonForCausalLM", transformers.PersimmonConfig(**SIZES))
    with pytest.raises(WeightsError, match=r"does not match.*missing, 1 unexpected") as raised:
        load_model(tmp_path)
    assert "model.final_layernorm.weight" in str(raised.value)


def test_without_transformers_the_error_says_so(tmp_path, monkeypatch):
    write_config(tmp_path, "PersimmonForCausalLM", transformers.PersimmonConfig(**SIZES))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(WeightsError, match=r"(?s)is not an architecture.*pip install transformers"):
        load_model(tmp_path)


def test_implementation_of_fulgurite_can_be_asked_for(tmp_path):
    write_config(tmp_path, "PersimmonForCausalLM", transformers.PersimmonConfig(**SIZES))
    with pytest.raises(WeightsError, match="architecture PersimmonForCausalLM is not supported"):
        load_model(tmp_path, implementation="fulgurite")
    with pytest.raises(ArgumentError, match="one of auto, fulgurite, transformers"):
        load_model(tmp_path, implementation="vllm")
