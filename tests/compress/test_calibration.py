"""Static scales, KV scales and second-order rounding from a calibration text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from tests.compress.checkpoints import TEXT, build_model, run_quantize, save_checkpoint
from tests.serve.tiny_checkpoint import byte_tokenizer

SEQUENCE, TOKENS = 64, 512
OPTIONS = ("--sequence", str(SEQUENCE), "--calibration-tokens", str(TOKENS))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def token_ids() -> Tensor:
    ids = byte_tokenizer().encode(TEXT).ids[:TOKENS]
    return torch.tensor(ids).view(-1, SEQUENCE)


def observe_inputs(model: nn.Module, names: list[str]) -> dict[str, float]:
    """The largest |input| of linears of a transformers model on the calibration text."""
    largest: dict[str, float] = dict.fromkeys(names, 0.0)

    def make_hook(name: str):
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest[name] = max(largest[name], inputs[0].abs().max().item())

        return hook

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(make_hook(name))
    with torch.no_grad():
        model(token_ids())
    return largest


@pytest.mark.parametrize("format", ["fp8_static", "nvfp4_w4a4"])
def test_static_scales_are_those_of_the_text(format, text, tmp_path):
    """The first layer sees what it sees in transformers."""
    source = save_checkpoint(tmp_path / "source", "llama")
    folder = tmp_path / "out"
    options = ("--format", format, "--no-eval", "--calibrate", str(text), "--kv", "fp8", *OPTIONS)
    assert not run_quantize(source, folder, *options)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    model = build_model("llama")
    parts = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    for name, amax in observe_inputs(model, [f"model.layers.0.{p}" for p in parts]).items():
        if format == "fp8_static":
            scale = tensors[f"{name}.input_scale"]
            torch.testing.assert_close(scale.item(), amax / 448, rtol=1e-5, atol=0)
        else:
            reciprocal = tensors[f"{name}.input_global_scale"]
            torch.testing.assert_close(reciprocal.item(), 448 * 6 / amax, rtol=1e-5, atol=0)
    with torch.no_grad():
        cache = model(token_ids(), use_cache=True).past_key_values
    layer = cache.layers[0]
    base = "model.layers.0.self_attn"
    for name, values in (("k_scale", layer.keys), ("v_scale", layer.values)):
        expected = values.abs().max().item() / 448
        torch.testing.assert_close(tensors[f"{base}.{name}"].item(), expected, rtol=1e-5, atol=0)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["num_bits"] == 8


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("format", ["nvfp4", "int4"])
def test_calibrated_weights_lower_the_error_of_the_logits(model, format, text, tmp_path):
    """Second-order rounding against round-to-nearest, on the calibration text."""
    source = save_checkpoint(tmp_path / "source", model, num_hidden_layers=1)
    options = ("--format", format, "--eval", str(text), "--eval-tokens", str(TOKENS), *OPTIONS)
    outputs = {}
    for name, more in (("nearest", ()), ("calibrated", ("--calibrate", str(text)))):
        json_file = tmp_path / f"{name}.json"
        assert not run_quantize(source, tmp_path / name, *options, *more, "--json", str(json_file))
        outputs[name] = json.loads(json_file.read_text())
    assert outputs["nearest"]["calibration_tokens"] == 0
    assert outputs["calibrated"]["calibration_tokens"] == TOKENS
    assert all(w["output_db"] > w["weight_db"] for w in outputs["calibrated"]["weights"])
    original = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    errors = {name: logits_error(original, tmp_path / name, model, format) for name in outputs}
    assert errors["calibrated"] < 0.85 * errors["nearest"]


def logits_error(original: nn.Module, folder: Path, model: str, format: str) -> float:
    """The error of our model's logits with the dequantized weights, against transformers."""
    from tests.compress.test_folder import decompress

    weights = decompress(folder)
    dense = build_model(model, num_hidden_layers=1)
    state = dense.state_dict()
    with torch.no_grad():
        for name, target in state.items():
            if name in weights:
                target.copy_(weights[name])
            elif ".experts." in name:
                prefix = name.rpartition(".")[0]
                parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
                for expert in range(len(target)):
                    stack = [weights[f"{prefix}.{expert}.{part}.weight"] for part in parts]
                    target[expert].copy_(torch.cat(stack))
        expected = original(token_ids()).logits
        return float((dense(token_ids()).logits - expected).norm() / expected.norm())


def test_perplexities_are_those_of_transformers(text, tmp_path):
    source = save_checkpoint(tmp_path / "source", "llama")
    figures = tmp_path / "figures.json"
    options = ("--eval", str(text), "--eval-tokens", "256", "--sequence", "64")
    assert not run_quantize(
        source, tmp_path / "out", "--format", "int8_w8a16", *options, "--json", str(figures)
    )
    found = json.loads(figures.read_text())
    ids = token_ids()[:4]
    for folder, key in ((source, "perplexity_before"), (tmp_path / "out", "perplexity_after")):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            loss = model(ids, labels=ids).loss
        assert found[key] == pytest.approx(loss.exp().item(), rel=1e-4)
    assert found["bits_per_weight"] == pytest.approx(8.2, abs=0.2)
