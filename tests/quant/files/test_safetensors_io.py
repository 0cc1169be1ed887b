"""Our safetensors layout: bit-identical round trips, and errors for damaged files."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.quant import FORMATS, QuantTensor, load_quantized, quantize, save_quantized


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(name, tmp_path):
    tensors = {
        "experts.weight": quantize(gaussian(3, 64, 256).bfloat16(), name),
        "part.weight": quantize(gaussian(256, 512), name)[128:, 256:],
        "norm.weight": gaussian(64),
    }
    save_quantized(tensors, tmp_path / "model.safetensors", {"made by": "a test"})
    loaded = load_quantized(tmp_path / "model.safetensors")
    assert set(loaded) == set(tensors)
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor)
        assert loaded[key].dtype == tensor.dtype
    assert isinstance(loaded["experts.weight"], QuantTensor)
    assert type(loaded["norm.weight"]) is torch.Tensor
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["made by"] == "a test"
        described = json.loads(file.metadata()["fulgurite.quant"])["tensors"]["experts.weight"]
    assert described == {"format": name, "dtype": "bfloat16", "shape": [3, 64, 256]}


def test_loading_some_names(tmp_path):
    path = tmp_path / "model.safetensors"
    save_quantized({"a": quantize(gaussian(4, 32), "nvfp4"), "b": gaussian(3)}, path)
    assert set(load_quantized(path, names=["a"])) == {"a"}
    with pytest.raises(WeightsError, match="no tensor 'c'"):
        load_quantized(path, names=["c"])


def test_plain_file(tmp_path):
    save_file({"a": gaussian(3)}, tmp_path / "plain.safetensors")
    assert torch.equal(load_quantized(tmp_path / "plain.safetensors")["a"], gaussian(3))


def test_missing_tensor_of_a_quantized_weight(tmp_path):
    path = tmp_path / "model.safetensors"
    save_quantized({"a": quantize(gaussian(4, 32), "nvfp4")}, path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    parts = load_file(path)
    assert set(parts) == {"a.packed", "a.scale", "a.tensor_scale"}
    del parts["a.tensor_scale"]
    save_file(parts, path, metadata)
    with pytest.raises(WeightsError, match=r"'a.tensor_scale' is missing"):
        load_quantized(path)


def test_nan_scale_is_rejected_unless_check_is_false(tmp_path):
    path = tmp_path / "model.safetensors"
    invalid = quantize(gaussian(4, 32), "int8")
    invalid.scale[2] = float("nan")
    save_quantized({"a": invalid}, path)
    with pytest.raises(WeightsError, match=r"nan at index \[2, 0\]"):
        load_quantized(path)
    assert torch.equal(load_quantized(path, check=False)["a"], invalid)


def test_other_layout_version_is_rejected(tmp_path):
    path = tmp_path / "model.safetensors"
    header = {"fulgurite.quant": json.dumps({"version": 99, "tensors": {}})}
    save_file({"a": gaussian(3)}, path, header)
    with pytest.raises(WeightsError, match="layout version 99"):
        load_quantized(path)


def test_colliding_names_are_rejected(tmp_path):
    tensors = {"a.packed": gaussian(3), "a": quantize(gaussian(4, 32), "int8")}
    with pytest.raises(ArgumentError, match=r"'a.packed'"):
        save_quantized(tensors, tmp_path / "model.safetensors")
