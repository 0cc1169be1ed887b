"""fulgurite.quantize: all configs, the report, memory, files, calibration, errors."""

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
from fulgurite.kernels.quantize.row_chunks import CHUNK_ELEMENTS, quantize_in_row_chunks
from fulgurite.quant import FORMATS, QuantTensor, compute_sqnr, resolve_format
from fulgurite.quant import quantize as quantize_tensor
from fulgurite.quant.config import QUANT_CONFIGS, QuantConfig
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


@pytest.mark.parametrize("config", list(QUANT_CONFIGS))
def test_configs(model, config):
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    dense = copy.deepcopy(model)
    report = quantize(model, config, calibrate=[IDS])
    for layer in report.layers:
        packed = model.get_submodule(layer.name).weight
        assert torch.equal(packed, quantize_tensor(weights[layer.name + ".weight"], layer.format))
        assert layer.sqnr_db == pytest.approx(
            compute_sqnr(weights[layer.name + ".weight"], packed), abs=1e-3
        )
        assert layer.bytes_after == packed.nbytes and layer.bytes_before == packed.numel() * 4
        dense.get_submodule(layer.name).weight.data = packed.dequantize()
    names = [layer.name for layer in report.layers]
    assert names[:3] == ["up", "down", "odd"]
    reasons = {parameter.name: parameter.reason for parameter in report.skipped}
    assert reasons["embedding.weight"] == "Embedding, not a linear"
    assert reasons["head.weight"] == "skip='head'"
    assert reasons["tied.weight"] == "tied to embedding.weight"
    assert ("last" in names) == (resolve_format(report.config.weights).block[1] == 0)
    if "last" not in names:
        assert "K=100 is not a multiple" in reasons["last.weight"]
    # Only the rounding of activations differs: at worst fp8, with a relative error of 2^-4 each.
    actual, expected = model(IDS), dense(IDS)
    assert (actual - expected).norm() <= 0.06 * expected.norm()
    with torch.no_grad():
        torch.testing.assert_close(fulgurite.compile(model)(IDS), actual, rtol=1e-4, atol=1e-4)


def test_report_table(model):
    text = str(quantize(model, "nvfp4", skip=("up",), progress=False))
    assert "skip='up'" in text and "K=100" in text
    first, *rows = text.splitlines()
    assert first.split() == [
        "layer",
        "shape",
        "format",
        "activations",
        "before",
        "after",
        "SQNR",
        "dB",
    ]
    assert rows[0].split()[:3] == ["down", "256x512", "nvfp4"]
    assert text.splitlines()[-1].startswith("3 layers quantized: ")


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e4m3_128x128", "nvfp4", "int8", "q4_0"])
def test_row_chunks_match_whole_weights(name):
    weight = torch.randn(CHUNK_ELEMENTS // 256 + 200, 256)
    assert torch.equal(quantize_in_row_chunks(weight, FORMATS[name]), quantize_tensor(weight, name))


@pytest.mark.parametrize("config", ["nvfp4", "fp8_static", "int4"])
def test_save_and_load(model, config, tmp_path):
    unquantized = copy.deepcopy(model)
    quantize(model, config, calibrate=[IDS])
    expected = model(IDS)
    model.load_state_dict(model.state_dict())
    save(model, tmp_path / "model.safetensors")
    loaded = load(unquantized, tmp_path / "model.safetensors")
    assert (
        isinstance(loaded.up.weight, QuantTensor) and loaded.up.activations == model.up.activations
    )
    assert torch.equal(loaded(IDS), expected)
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises((WeightsError, AttributeError)):
        load(other, tmp_path / "model.safetensors")


def test_static_scales_are_calibrated(model):
    amaxes = []
    model.down.register_forward_pre_hook(lambda m, inputs: amaxes.append(inputs[0].abs().max()))
    batches = [IDS, (IDS + 4,), {"ids": IDS + 8}]
    quantize(model, "fp8_static", calibrate=batches)
    assert model.down.input_scale == max(amaxes) / 448
    assert model.down.activations == "fp8_e4m3_tensor"


def test_invalid_arguments(model):
    with pytest.raises(ArgumentError, match="need calibration batches"):
        quantize(model, "fp8_static")
    with pytest.raises(FormatError, match="unknown number format"):
        quantize(model, "fp9")
    with pytest.raises(ArgumentError, match="needs an activation format"):
        quantize(model, QuantConfig("fp8_e4m3_row", static_activations=True), calibrate=[IDS])
    with pytest.raises(FormatError, match="no static scale"):
        quantize(model, QuantConfig("mxfp4", "mxfp8", static_activations=True), calibrate=[IDS])
    with torch.no_grad():
        model.embedding.weight.zero_()
    with pytest.raises(FormatError, match="all zero"):
        quantize(model, "fp8_static", calibrate=[IDS])
    with torch.no_grad():
        model.up.weight[3, 5] = float("nan")
    with pytest.raises(WeightsError, match="is not finite"):
        quantize(model, "nvfp4")


@pytest.mark.parametrize("invalid", [nn.Linear(32, 4), torch.ones(3, 32)], ids=["linear", "tensor"])
def test_models_without_linears_are_rejected(invalid):
    with pytest.raises(ArgumentError, match="needs a module that contains linears"):
        quantize(invalid, "fp8")
    assert type(invalid) is not nn.Linear or not list(invalid.children())


class SharedStorage(nn.Module):
    """Two parameters that share storage but differ in strides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4))
        self.second = nn.Parameter(self.first.data.t())


def test_transposed_parameters_that_share_storage(tmp_path):
    model = SharedStorage()
    save(model, tmp_path / "model.safetensors")
    loaded = load(SharedStorage(), tmp_path / "model.safetensors")
    assert torch.equal(loaded.first, model.first) and torch.equal(loaded.second, model.second)


def test_invalid_files(tmp_path):
    (tmp_path / "text").write_text("not a weights file")
    for name in ("text", "missing"):
        with pytest.raises(WeightsError, match="cannot read a safetensors file"):
            load(nn.Sequential(nn.Linear(4, 4)), tmp_path / name)


def test_quantized_layers_are_skipped(model):
    quantize(model, "int8")
    again = quantize(model, "nvfp4", skip=("head", "last", "odd"))
    assert not again.layers and "already quantized to int8" in str(again)
    assert isinstance(model.up, QuantLinear)


MEMORY = """
import ctypes, gc, resource, torch
from torch import nn
from fulgurite.quantize import quantize, model_bytes
torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # free() returns blocks above 1 MiB to the system
def layer(): return nn.Linear(2048, 4096, bias=False)
quantize(nn.Sequential(layer()), "int8", progress=False)
model = nn.Sequential(*[layer() for _ in range(12)])
gc.collect()
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
before, peak = resident(), 0
import sys
module = sys.modules["fulgurite.quantize"]
original = module._quantize_linear
def measured(*arguments):
    global peak
    result = original(*arguments)
    peak = max(peak, resident())
    return result
module._quantize_linear = measured
report = quantize(model, "int8", progress=False)
gc.collect()
print(before, peak, resident(), report.bytes_before, report.bytes_after)
"""


def test_memory_falls_as_layers_are_quantized():
    """Dense weights are freed one by one: the peak is the dense model plus one layer."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    before, peak, after, dense, packed = map(int, done.stdout.split())
    layer = 4 * 2048 * 4096
    assert dense == 12 * layer and packed < dense / 3.9
    assert peak - before <= 2 * layer
    assert before - after >= 0.9 * (dense - packed) - layer
