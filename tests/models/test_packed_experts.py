"""Experts that are packed, while loading or by fulgurite.quantize, against the dequantized model."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fulgurite.models import load_model, weights
from fulgurite.models.checkpoint import open_checkpoint
from fulgurite.models.moe import Experts
from fulgurite.models.safetensors_file import SINGLE
from fulgurite.quant import QuantTensor
from fulgurite.quant import quantize as oracle
from fulgurite.quant.recipe import Recipe
from fulgurite.quantize import load, quantize, save
from fulgurite.serve.llm import shapes_of
from tests.models.model_oracle import make_theirs, prompt
from tests.models.test_weights import change, edit_config

IDS, POSITIONS = prompt(19), torch.arange(19)
MODELS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4"]


def experts_of(model: nn.Module) -> dict[str, Experts]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Experts)}


def dequantized(model: nn.Module) -> nn.Module:
    """The same model with dense weights that stand for the packed ones."""
    dense = copy.deepcopy(model)
    for module in experts_of(dense).values():
        for name in module.takes_packed:
            weight = getattr(module, name)
            if isinstance(weight, QuantTensor):
                setattr(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))
    return dense


def close(model: nn.Module, tolerance: float = 1e-4) -> None:
    want, got = dequantized(model)(IDS, POSITIONS), model(IDS, POSITIONS)
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3_row", "q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_quantize_packs_experts(get_pair, name, format):
    model = load_model(get_pair(name).path, dtype=torch.float32)
    before = {
        n: (m.gate_up.detach().clone(), m.down.detach()) for n, m in experts_of(model).items()
    }
    report = quantize(model, Recipe(format, activations="none"), progress=False)
    names = {layer.name for layer in report.layers}
    skipped = {one.name: one.why for one in report.skipped}
    assert before
    for path, module in experts_of(model).items():
        for part, dense in zip(module.takes_packed, before[path], strict=True):
            if dense.shape[-1] % (32 if format == "q8_0" else 1):
                assert "no multiple" in skipped[f"{path}.{part}"]
                continue
            assert f"{path}.{part}" in names
            assert torch.equal(getattr(module, part), oracle(dense, format))
    close(model)


def test_activations_are_rounded_as_asked(get_pair):
    model = load_model(get_pair("mixtral").path, dtype=torch.float32)
    quantize(model, "q8_0", skip=["*attention*", "head"], progress=False)
    mixture, dense = (m.layers[1].feed_forward for m in (model, dequantized(model)))
    x = torch.randn(11, 64)
    routes = mixture.router(x)
    got, want = mixture.experts(x, routes), dense.experts(x, routes)
    assert 1e-5 < (got - want).norm() / want.norm() < 0.02


def test_saved_and_loaded(get_pair, tmp_path):
    path = get_pair("qwen3_moe").path
    model = load_model(path, dtype=torch.float32)
    quantize(model, Recipe("int8", activations="none"), progress=False)
    save(model, tmp_path / "small.safetensors")
    again = load(load_model(path, dtype=torch.float32), tmp_path / "small.safetensors")
    assert torch.equal(again(IDS, POSITIONS), model(IDS, POSITIONS))
    assert all(m.activations == "none" for m in experts_of(again).values())


@pytest.mark.parametrize("inner", [128, 64])
def test_float8_experts_stay_as_they_are_in_the_file(tmp_path: Path, inner: int) -> None:
    """Halves of gate_up that end inside a tile of 128 rows can't share a stack: those are unpacked."""
    make_theirs("deepseek_v3", moe_intermediate_size=inner).save_pretrained(tmp_path)
    tensors: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(tmp_path / SINGLE).items():
        if ".experts." in name:
            packed = oracle(weight, "fp8_e4m3_128x128")
            tensors |= {name: packed.packed, f"{name}_scale_inv": packed.scales["scale"]}
    change(tmp_path, **tensors)
    edit_config(
        tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    model = load_model(tmp_path, dtype=torch.float32, keep="packed", activations="none")
    experts = experts_of(model)
    assert experts
    for module in experts.values():
        assert isinstance(module.gate_up, QuantTensor) == (inner == 128)
        assert isinstance(module.down, QuantTensor)
    plain = load_model(tmp_path, dtype=torch.float32)
    for path, module in experts_of(dequantized(model)).items():
        for part in module.takes_packed:
            assert torch.equal(getattr(module, part), getattr(experts_of(plain)[path], part))
    close(model)


def test_gpt_oss_keeps_its_blocks(get_pair, tmp_path: Path) -> None:
    folder = tmp_path / "mxfp4"
    shutil.copytree(get_pair("gpt_oss").path, folder)
    tensors: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(folder / SINGLE).items():
        if name.endswith(("gate_up_proj", "down_proj")) and weight.dim() == 3:
            packed = oracle(weight.transpose(-1, -2).contiguous(), "mxfp4")
            blocks = packed.packed.unflatten(-1, (-1, 16))
            scales = packed.scales["scale"].view(torch.uint8)
            tensors |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
    change(folder, **tensors)
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    model = load_model(folder, dtype=torch.float32, keep="packed", activations="none")
    plain = load_model(folder, dtype=torch.float32)
    for path, module in experts_of(model).items():
        for part in module.takes_packed:
            weight = getattr(module, part)
            assert isinstance(weight, QuantTensor) and weight.format.name == "mxfp4"
            assert torch.equal(weight.dequantize(), getattr(experts_of(plain)[path], part))
    close(model)


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch) -> Path:
    """A Mixtral whose experts are in blocks."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is what these compare with")
    from tests.models.test_gguf import write

    plain_add = gguf.GGUFWriter.add_tensor

    def add(writer, name, data, **options):
        if name.endswith("_exps.weight"):
            kind = (
                gguf.GGMLQuantizationType.Q8_0 if "down" in name else gguf.GGMLQuantizationType.Q4_1
            )
            return plain_add(writer, name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        return plain_add(writer, name, data, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    return write(make_theirs("mixtral"), "llama", tmp_path)


def test_gguf_experts_keep_their_blocks(gguf_file: Path) -> None:
    model = load_model(gguf_file, dtype=torch.float32, keep="packed", activations="none")
    plain = load_model(gguf_file, dtype=torch.float32)
    assert experts_of(model)
    for path, module in experts_of(model).items():
        assert module.gate_up.format.name == "q4_1" and module.down.format.name == "q8_0"
        for part in module.takes_packed:
            assert torch.equal(
                getattr(module, part).dequantize(), getattr(experts_of(plain)[path], part)
            )
    close(model)


def test_gguf_experts_become_groups_where_those_are_read(gguf_file: Path, monkeypatch) -> None:
    """And a plan of memory counts them so."""
    planned = experts_of(shapes_of(open_checkpoint(gguf_file), torch.bfloat16, True, "cuda"))
    monkeypatch.setattr(weights, "reads_groups", lambda device, dtype: True)
    model = load_model(gguf_file, dtype=torch.bfloat16, keep="packed", activations="none")
    plain = load_model(gguf_file, dtype=torch.bfloat16)
    assert experts_of(model).keys() == planned.keys()
    for path, module in experts_of(model).items():
        for part in module.takes_packed:
            weight = getattr(module, part)
            assert weight.format.name == {"gate_up": "int4_g32_min", "down": "int8_g32"}[part]
            assert torch.equal(weight.dequantize(), getattr(experts_of(plain)[path], part))
            assert getattr(planned[path], part).nbytes == weight.nbytes
    close(load_model(gguf_file, dtype=torch.float32, keep="packed", activations="none"))
