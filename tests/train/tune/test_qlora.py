"""QLoRA: packed weights of every format under adapters; the base stays bit-identical."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers builds the families' small models")

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.models import CausalLM, load_model
from fulgurite.models.moe import Experts
from fulgurite.quant import QuantTensor
from fulgurite.train.loss import LossModule
from fulgurite.train.tune.lora import (
    LoRAConfig,
    adapter_weights,
    adapters_merged,
    add_adapters,
    set_module,
)
from fulgurite.train.tune.qlora import quantize_frozen, quantized_formats
from tests.models.reference_models import build_reference
from tests.train.tune.test_lora import make_tokens, randomize

FORMATS = ["nf4", "int4", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8", "q8_0", "q4_1"]
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}


def build(name: str, folder: object, format: str) -> CausalLM:
    fields = {"moe_intermediate_size": 128} if name == "dots1" else {}
    build_reference(name, **SIZES, **fields).save_pretrained(folder)
    model = load_model(folder)  # type: ignore[arg-type]
    quantize_frozen(model, format)
    return model


def dequantize(model: CausalLM) -> None:
    """The dense model that quantized weights stand for."""
    for path, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            linear = torch.nn.Linear(module.in_features, module.out_features)
            linear.weight = torch.nn.Parameter(module.weight.dequantize())
            linear.bias = module.bias
            set_module(model, path, linear)
        elif isinstance(module, Experts):
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(module, name)
                if isinstance(weight, QuantTensor):
                    setattr(module, name, torch.nn.Parameter(weight.dequantize()))


def gradients(model: CausalLM, compiled: bool = False) -> dict[str, torch.Tensor]:
    tokens, positions = make_tokens()
    module = LossModule(model)
    module = fulgurite.compile(module) if compiled else module
    module(tokens, tokens.roll(-1, 1), positions).total.backward()
    found = {
        f"{w.path}.{part}": p.grad
        for w in adapter_weights(model)
        for part, p in (("A", w.a), ("B", w.b))
    }
    model.zero_grad()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_those_of_the_dequantized_model(format: str, tmp_path) -> None:
    name = "dots1" if format in ("nf4", "int8", "mxfp4") else "qwen3"
    model, dense = (build(name, tmp_path, format) for _ in range(2))
    dequantize(dense)
    for one in (model, dense):
        add_adapters(one, LoRAConfig(rank=3))
        randomize(one)
    assert len(quantized_formats(model)) == len(adapter_weights(model))
    before = {
        n: p.packed.clone() for n, p in model.named_parameters() if isinstance(p, QuantTensor)
    }
    found, expected = gradients(model), gradients(dense)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        scale = float(expected[key].abs().max())
        torch.testing.assert_close(gradient, expected[key], rtol=2e-3, atol=2e-3 * scale, msg=key)
    with torch.no_grad():
        for weights in adapter_weights(model):  # a step
            weights.b.sub_(0.1 * found[f"{weights.path}.B"])
    for n, packed in before.items():
        assert torch.equal(model.get_parameter(n).packed, packed), n


def test_compiled(tmp_path) -> None:
    model = build("qwen3", tmp_path, "nf4")
    add_adapters(model, LoRAConfig(rank=3))
    randomize(model)
    eager, compiled = gradients(model), gradients(model, compiled=True)
    for key, gradient in compiled.items():
        scale = float(eager[key].abs().max())
        torch.testing.assert_close(gradient, eager[key], rtol=2e-3, atol=2e-3 * scale, msg=key)


def test_merged_is_the_dequantized_weight_with_the_adapter(tmp_path) -> None:
    model = build("dots1", tmp_path, "nf4")
    add_adapters(model, LoRAConfig(rank=3, targets=("q_proj", "experts")))
    randomize(model)
    tokens, positions = make_tokens()
    with torch.no_grad():
        adapted = model(tokens, positions)
        with adapters_merged(model):
            assert not quantized_formats(model)
            merged = model(tokens, positions)
        assert torch.equal(model(tokens, positions), adapted)
    scale = float(adapted.abs().max())
    torch.testing.assert_close(merged, adapted, rtol=1e-3, atol=1e-3 * scale)


def test_weights_without_an_adapter_are_merged_as_they_are(tmp_path, monkeypatch) -> None:
    model = build("llama", tmp_path, "nf4")
    add_adapters(model, LoRAConfig(rank=3, targets=("q_proj",)))
    name = next(n for n, m in model.named_modules() if isinstance(m, QuantLinear) and "down" in n)
    weight = model.get_submodule(name).weight.dequantize()
    allocate = torch.empty
    monkeypatch.setattr(  # new memory may hold anything
        torch, "empty", lambda *size, **options: allocate(*size, **options).fill_(float("nan"))
    )
    with adapters_merged(model):
        merged = model.get_submodule(name).weight
        assert torch.equal(merged, weight) and merged.dtype == weight.dtype


def test_a_format_that_fits_no_weight_is_an_error(tmp_path) -> None:
    build_reference("llama", num_hidden_layers=1, hidden_size=40).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    with pytest.raises(ArgumentError, match="no weight can be quantized to int4_g128"):
        quantize_frozen(model, "int4")
