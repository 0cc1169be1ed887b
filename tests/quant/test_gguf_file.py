""".gguf files written by the gguf package and read through ours, without copying a block."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fulgurite.errors import ArgumentError, FormatError, WeightsError
from fulgurite.quant import QuantTensor, quantize, read_gguf

gguf = pytest.importorskip("gguf")
QUANTIZED = ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"]


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path):
    x = gaussian(3, 64, 512)
    tensors = {name: (quantize(x, name).packed.numpy(), name.upper()) for name in QUANTIZED}
    tensors["f32"] = (x.numpy(), "F32")
    tensors["f16"] = (x.half().numpy(), "F16")
    tensors["bf16"] = (x.bfloat16().view(torch.uint8).numpy(), "BF16")
    tensors["vector"] = (x[0, 0].numpy(), "F32")
    return write(tmp_path / "model.gguf", tensors)


def test_blocks_are_the_files_bytes(model):
    x, read = gaussian(3, 64, 512), read_gguf(model, dtype=torch.float16)
    content = model.read_bytes()
    for name in QUANTIZED:
        tensor = read[name]
        assert isinstance(tensor, QuantTensor)
        assert (tensor.format.name, tensor.shape, tensor.dtype) == (name, x.shape, torch.float16)
        assert torch.equal(tensor, quantize(x, name))
        assert tensor.packed.numpy().tobytes() in content
        theirs = gguf.quants.dequantize(
            tensor.packed.numpy(), gguf.GGMLQuantizationType[name.upper()]
        )
        assert np.array_equal(tensor.dequantize(torch.float32).numpy(), theirs)


def test_plain_types_are_torchs(model):
    x, read = gaussian(3, 64, 512), read_gguf(model)
    assert torch.equal(read["f32"], x)
    assert torch.equal(read["f16"], x.half())
    assert torch.equal(read["bf16"], x.bfloat16())
    assert torch.equal(read["vector"], x[0, 0])


def test_tensors_are_views_of_the_mapped_file(model):
    """All tensors of a file lie in one mapping, at the file's own distances."""
    read = read_gguf(model)
    reader = gguf.GGUFReader(model)
    offsets = {tensor.name: int(tensor.data_offset) for tensor in reader.tensors}
    base = read["q4_0"].packed.data_ptr() - offsets["q4_0"]
    for name, tensor in read.items():
        data = tensor.packed if isinstance(tensor, QuantTensor) else tensor
        assert data.data_ptr() == base + offsets[name]
    before = model.read_bytes()
    read["q8_0"].packed.zero_()
    assert model.read_bytes() == before


def test_some_names_and_missing_ones(model):
    assert set(read_gguf(model, names=["q4_k", "f32"])) == {"q4_k", "f32"}
    with pytest.raises(WeightsError, match=r"no tensor 'output\.weight'") as caught:
        read_gguf(model, names=["output.weight"])
    assert "such as q4_0" in str(caught.value)


def test_a_type_that_is_not_read(tmp_path):
    data = np.zeros((2, 176), dtype=np.uint8)
    path = write(tmp_path / "q5.gguf", {"blk.0.up": (data, "Q5_K")})
    with pytest.raises(FormatError, match="Q5_K blocks can't be read") as caught:
        read_gguf(path)
    assert "blk.0.up" in str(caught.value)
    assert "Q4_K" in str(caught.value)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_nan_scale_is_refused(name, tmp_path):
    x = gaussian(4, 512)
    x[2, 3] = float("nan")
    path = write(tmp_path / "bad.gguf", {"w": (quantize(x, name).packed.numpy(), name.upper())})
    with pytest.raises(
        WeightsError, match=r"scale is not a finite number: nan at \[2, 0\]"
    ) as caught:
        read_gguf(path)
    assert "w in " in str(caught.value)
    assert read_gguf(path, check=False)["w"].shape == (4, 512)


def test_without_the_package(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ArgumentError, match="needs the gguf package"):
        read_gguf(model)
