"""Adapters in PEFT's layout: PEFT loads them into transformers with equal logits, and back."""

from __future__ import annotations

import copy
import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers builds the families' small models")
pytest.importorskip("peft", reason="PEFT reads and writes the adapters to compare with")

import peft

from fulgurite.errors import WeightsError
from fulgurite.models import load_model
from fulgurite.train.tune.lora import LoRAConfig, adapter_weights, add_adapters
from fulgurite.train.tune.peft_files import CONFIG_FILE, save_adapters
from fulgurite.train.tune.peft_loading import load_adapters
from tests.models.reference_models import build_reference
from tests.train.tune.test_lora import make_tokens, randomize

FAMILIES = ["llama", "qwen3", "phi3", "dots1", "mixtral", "gpt_oss", "llama4", "deepseek_v3"]
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_loads_what_we_write(name: str, tmp_path) -> None:
    reference = build_reference(name, num_hidden_layers=2)
    reference.save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base")
    config = LoRAConfig(rank=3, alpha=5.0)
    add_adapters(model, config)
    randomize(model)
    save_adapters(model, config, tmp_path / "adapter")
    tokens, positions = make_tokens()
    with torch.no_grad():
        ours = model(tokens, positions)
        before = reference(tokens).logits
        tuned = peft.PeftModel.from_pretrained(copy.deepcopy(reference), tmp_path / "adapter")
        theirs = tuned(tokens).logits
    assert float((theirs - before).abs().max()) > 0.1
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    # and back
    again = load_model(tmp_path / "base")
    load_adapters(again, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(again(tokens, positions), ours, rtol=1e-5, atol=1e-4)
    for first, second in zip(adapter_weights(model), adapter_weights(again), strict=True):
        assert first.path == second.path and first.scaling == pytest.approx(second.scaling)
        assert first.a.shape == second.a.shape, first.path
        assert torch.equal(first.a, second.a) and torch.equal(first.b, second.b), first.path


@pytest.mark.parametrize("use_rslora", [False, True])
def test_we_load_what_peft_writes(use_rslora: bool, tmp_path) -> None:
    """Also of a fused qkv_proj, of one expert weight alone, and with ranks by pattern."""
    cases = {
        "phi3": {"target_modules": ["qkv_proj", "o_proj"], "rank_pattern": {"o_proj": 5}},
        "dots1": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
    }
    for name, fields in cases.items():
        reference = build_reference(name, num_hidden_layers=2)
        reference.save_pretrained(tmp_path / name)
        settings = peft.LoraConfig(
            r=3, lora_alpha=7, use_rslora=use_rslora, init_lora_weights=False, **fields
        )
        tuned = peft.get_peft_model(reference, settings)
        tuned.save_pretrained(tmp_path / f"{name}-adapter")
        model = load_model(tmp_path / name)
        load_adapters(model, tmp_path / f"{name}-adapter")
        tokens, positions = make_tokens()
        with torch.no_grad():
            theirs = tuned(tokens).logits
            torch.testing.assert_close(model(tokens, positions), theirs, **TOLERANCE)


def test_adapters_of_another_model_are_refused(tmp_path) -> None:
    for name, size in (("small", 64), ("large", 96)):
        build_reference("llama", num_hidden_layers=1, hidden_size=size).save_pretrained(
            tmp_path / name
        )
    model = load_model(tmp_path / "small")
    add_adapters(model, LoRAConfig(rank=2))
    save_adapters(model, LoRAConfig(rank=2), tmp_path / "adapter")
    other = load_model(tmp_path / "large")
    with pytest.raises(WeightsError, match="the model needs"):
        load_adapters(other, tmp_path / "adapter")
    assert not adapter_weights(other)
    build_reference("mixtral", num_hidden_layers=1).save_pretrained(tmp_path / "moe")
    with pytest.raises(WeightsError, match="belong to no weight"):
        load_adapters(load_model(tmp_path / "moe"), tmp_path / "adapter")
    config = tmp_path / "adapter" / CONFIG_FILE
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    with pytest.raises(WeightsError, match="use_dora"):
        load_adapters(load_model(tmp_path / "small"), tmp_path / "adapter")
