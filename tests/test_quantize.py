"""fulgurite.quantize: every recipe, the report, memory, files, calibration, refusals."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.errors import ArgumentError, FormatError, WeightsError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.kernels.quantize.row_chunks import PIECE, quantize_by_rows
from fulgurite.quant import FORMATS, QuantTensor, resolve, signal_to_noise
from fulgurite.quant import quantize as oracle
from fulgurite.quant.recipe import RECIPES, Recipe
from fulgurite.quantize import load, quantize, save


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 256)
        self.up = nn.Linear(256, 512)
        self.down = nn.Linear(512, 256, bias=False)
        self.odd = nn.Linear(256, 100)
        self.last = nn.Linear(100, 256)
        self.head = nn.Linear(256, 32, bias=False)
        self.tied = nn.Linear(256, 32, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.down(torch.nn.functional.silu(self.up(x)))
        x = self.last(self.odd(x))
        return self.head(x) + self.tied(x)


@pytest.fixture
def model():
    return Model().eval()


IDS = torch.arange(12).view(3, 4)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_recipes(model, recipe):
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    dense = copy.deepcopy(model)
    report = quantize(model, recipe, calibrate=[IDS])
    for layer in report.layers:
        packed = model.get_submodule(layer.name).weight
        assert torch.equal(packed, oracle(weights[layer.name + ".weight"], layer.format))
        assert layer.decibels == pytest.approx(
            signal_to_noise(weights[layer.name + ".weight"], packed), abs=1e-3
        )
        assert layer.after == packed.nbytes and layer.before == packed.numel() * 4
        dense.get_submodule(layer.name).weight.data = packed.dequantize()
    names = [layer.name for layer in report.layers]
    assert names[:3] == ["up", "down", "odd"]
    why = {one.name: one.why for one in report.skipped}
    assert why["embedding.weight"] == "Embedding, not a linear"
    assert why["head.weight"] == "skip='head'"
    assert why["tied.weight"] == "shared with embedding.weight"
    assert ("last" in names) == (resolve(report.recipe.weights).block[1] == 0)
    if "last" not in names:
        assert "K = 100 is no multiple" in why["last.weight"]
    # What is left to differ is how activations are rounded: at worst by fp8, a relative 2^-4 each.
    got, want = model(IDS), dense(IDS)
    assert (got - want).norm() <= 0.06 * want.norm()
    with torch.no_grad():
        torch.testing.assert_close(fulgurite.compile(model)(IDS), got, rtol=1e-4, atol=1e-4)


def test_the_report_prints_as_a_table(model):
    text = str(quantize(model, "nvfp4", skip=("up",), progress=False))
    assert "skip='up'" in text and "K = 100" in text
    first, *rows = text.splitlines()
    assert first.split() == ["layer", "shape", "format", "activations", "before", "after", "dB"]
    assert rows[0].split()[:3] == ["down", "256x512", "nvfp4"]
    assert text.splitlines()[-1].startswith("3 layers quantized: ")


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e4m3_128x128", "nvfp4", "int8", "q4_0"])
def test_by_rows_is_the_same_as_whole(name):
    weight = torch.randn(PIECE // 256 + 200, 256)
    assert torch.equal(quantize_by_rows(weight, FORMATS[name]), oracle(weight, name))


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_static", "int4"])
def test_saved_and_loaded(model, recipe, tmp_path):
    fresh = copy.deepcopy(model)
    quantize(model, recipe, calibrate=[IDS])
    want = model(IDS)
    model.load_state_dict(model.state_dict())
    save(model, tmp_path / "model.safetensors")
    loaded = load(fresh, tmp_path / "model.safetensors")
    assert (
        isinstance(loaded.up.weight, QuantTensor) and loaded.up.activations == model.up.activations
    )
    assert torch.equal(loaded(IDS), want)
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises((WeightsError, AttributeError)):
        load(other, tmp_path / "model.safetensors")


def test_static_scales_come_from_the_batches(model):
    seen = []
    model.down.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].abs().max()))
    batches = [IDS, (IDS + 4,), {"ids": IDS + 8}]
    quantize(model, "fp8_static", calibrate=batches)
    assert model.down.input_scale == max(seen) / 448
    assert model.down.activations == "fp8_e4m3_tensor"


def test_refusals(model):
    with pytest.raises(ArgumentError, match="no batches"):
        quantize(model, "fp8_static")
    with pytest.raises(FormatError, match="is not a number format"):
        quantize(model, "fp9")
    with pytest.raises(ArgumentError, match="format for activations"):
        quantize(model, Recipe("fp8_e4m3_row", static=True), calibrate=[IDS])
    with pytest.raises(FormatError, match="no static scale"):
        quantize(model, Recipe("mxfp4", "mxfp8", static=True), calibrate=[IDS])
    with torch.no_grad():
        model.embedding.weight.zero_()
    with pytest.raises(FormatError, match="all zero"):
        quantize(model, "fp8_static", calibrate=[IDS])
    with torch.no_grad():
        model.up.weight[3, 5] = float("nan")
    with pytest.raises(WeightsError, match="not a finite number"):
        quantize(model, "nvfp4")


@pytest.mark.parametrize("given", [nn.Linear(32, 4), torch.ones(3, 32)], ids=["linear", "tensor"])
def test_what_has_no_linears_inside_is_refused(given):
    with pytest.raises(ArgumentError, match="linears inside of a module"):
        quantize(given, "fp8")
    assert type(given) is not nn.Linear or not list(given.children())


class Turned(nn.Module):
    """Two parameters in the same memory that are not the same numbers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4))
        self.second = nn.Parameter(self.first.data.t())


def test_one_memory_and_two_tensors(tmp_path):
    model = Turned()
    save(model, tmp_path / "model.safetensors")
    loaded = load(Turned(), tmp_path / "model.safetensors")
    assert torch.equal(loaded.first, model.first) and torch.equal(loaded.second, model.second)


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "text").write_text("no weights in here")
    for name in ("text", "missing"):
        with pytest.raises(WeightsError, match="no safetensors file"):
            load(nn.Sequential(nn.Linear(4, 4)), tmp_path / name)


def test_twice_changes_nothing(model):
    quantize(model, "int8")
    again = quantize(model, "nvfp4", skip=("head", "last", "odd"))
    assert not again.layers and "already in int8" in str(again)
    assert isinstance(model.up, QuantLinear)


MEMORY = """
import ctypes, gc, resource, torch
from torch import nn
from fulgurite.quantize import quantize, model_bytes
torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # blocks over 1 MiB go back to the system when they are freed
def layer(): return nn.Linear(2048, 4096, bias=False)
quantize(nn.Sequential(layer()), "int8", progress=False)
model = nn.Sequential(*[layer() for _ in range(12)])
gc.collect()
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
before, most = resident(), 0
import sys
module = sys.modules["fulgurite.quantize"]
whole = module._quantize_layer
def watched(*arguments):
    global most
    result = whole(*arguments)
    most = max(most, resident())
    return result
module._quantize_layer = watched
report = quantize(model, "int8", progress=False)
gc.collect()
print(before, most, resident(), report.before, report.after)
"""


def test_memory_falls_as_layers_are_packed():
    """Dense weights go as packed ones come: never more than the dense model and a layer's work."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    before, most, after, dense, packed = map(int, done.stdout.split())
    layer = 4 * 2048 * 4096
    assert dense == 12 * layer and packed < dense / 3.9
    assert most - before <= 2 * layer
    assert before - after >= 0.9 * (dense - packed) - layer
