"""GGUF files written by the gguf package, read without copies."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fulgurite.errors import ArgumentError, FormatError, WeightsError
from fulgurite.quant import QuantTensor, quantize, read_gguf
from fulgurite.quant.files.gguf import (
    DTYPE_OF_GGUF_TYPE,
    FORMAT_OF_GGUF_TYPE,
    GGUFReader,
    dequantize_gguf,
)
from fulgurite.quant.files.gguf_header import TENSOR_TYPES

gguf = pytest.importorskip("gguf", reason="the gguf package is what these compare with")
QUANTIZED = ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"]


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def write_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, str]], alignment: int = 32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    add_all_value_types(writer)
    for name, (data, gguf_type) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[gguf_type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_all_value_types(writer: "gguf.GGUFWriter") -> None:
    """Add a key of each value type, including arrays of numbers and strings."""
    writer.add_uint8("x.uint8", 200)
    writer.add_int8("x.int8", -100)
    writer.add_uint16("x.uint16", 60_000)
    writer.add_int16("x.int16", -30_000)
    writer.add_uint32("x.uint32", 4_000_000_000)
    writer.add_int32("x.int32", -2_000_000_000)
    writer.add_float32("x.float32", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_uint64("x.uint64", 2**63 + 1)
    writer.add_int64("x.int64", -(2**63))
    writer.add_float64("x.float64", 0.1)
    writer.add_string("x.string", "größer")
    writer.add_token_list(["<s>", "a", "Ġb", "文"])
    writer.add_token_scores([0.0, -1.5, -2.25, 0.1])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_array("x.bools", [True, False])


@pytest.fixture
def gguf_path(tmp_path):
    x = gaussian(3, 64, 512)
    tensors = {name: (quantize(x, name).packed.numpy(), name.upper()) for name in QUANTIZED}
    tensors["f32"] = (x.numpy(), "F32")
    tensors["f16"] = (x.half().numpy(), "F16")
    tensors["bf16"] = (x.bfloat16().view(torch.uint8).numpy(), "BF16")
    tensors["vector"] = (x[0, 0].numpy(), "F32")
    return write_gguf(tmp_path / "model.gguf", tensors)


def test_quantized_tensors_are_the_bytes_of_the_file(gguf_path):
    x, tensors_read = gaussian(3, 64, 512), read_gguf(gguf_path, dtype=torch.float16)
    content = gguf_path.read_bytes()
    for name in QUANTIZED:
        tensor = tensors_read[name]
        assert isinstance(tensor, QuantTensor)
        assert (tensor.format.name, tensor.shape, tensor.dtype) == (name, x.shape, torch.float16)
        assert torch.equal(tensor, quantize(x, name))
        assert tensor.packed.numpy().tobytes() in content
        expected = gguf.quants.dequantize(
            tensor.packed.numpy(), gguf.GGMLQuantizationType[name.upper()]
        )
        assert np.array_equal(tensor.dequantize(torch.float32).numpy(), expected)


def test_plain_types(gguf_path):
    x, tensors_read = gaussian(3, 64, 512), read_gguf(gguf_path)
    assert torch.equal(tensors_read["f32"], x)
    assert torch.equal(tensors_read["f16"], x.half())
    assert torch.equal(tensors_read["bf16"], x.bfloat16())
    assert torch.equal(tensors_read["vector"], x[0, 0])


def test_tensors_are_views_of_the_mapped_file(gguf_path):
    """All tensors are views of one mapping, at their file offsets."""
    tensors_read = read_gguf(gguf_path)
    reader = gguf.GGUFReader(gguf_path)
    offsets = {tensor.name: int(tensor.data_offset) for tensor in reader.tensors}
    base = tensors_read["q4_0"].packed.data_ptr() - offsets["q4_0"]
    for name, tensor in tensors_read.items():
        data = tensor.packed if isinstance(tensor, QuantTensor) else tensor
        assert data.data_ptr() == base + offsets[name]
    before = gguf_path.read_bytes()
    tensors_read["q8_0"].packed.zero_()
    assert gguf_path.read_bytes() == before


def test_reading_some_names(gguf_path):
    assert set(read_gguf(gguf_path, names=["q4_k", "f32"])) == {"q4_k", "f32"}
    with pytest.raises(WeightsError, match=r"no tensor 'output\.weight'") as caught:
        read_gguf(gguf_path, names=["output.weight"])
    assert "such as q4_0" in str(caught.value)


def test_unsupported_type(tmp_path):
    data = np.zeros((2, 176), dtype=np.uint8)
    path = write_gguf(tmp_path / "q5.gguf", {"blk.0.up": (data, "Q5_K")})
    with pytest.raises(FormatError, match="GGUF type Q5_K is not supported") as caught:
        read_gguf(path)
    assert "blk.0.up" in str(caught.value)
    assert "Q4_K" in str(caught.value)


@pytest.mark.parametrize("name", QUANTIZED)
def test_nan_scale_is_rejected(name, tmp_path):
    x = gaussian(4, 512)
    x[2, 3] = float("nan")
    path = write_gguf(
        tmp_path / "bad.gguf", {"w": (quantize(x, name).packed.numpy(), name.upper())}
    )
    with pytest.raises(WeightsError, match=r"scale is not finite: nan at index \[2, 0\]") as caught:
        read_gguf(path)
    assert "w in " in str(caught.value)
    assert read_gguf(path, check=False)["w"].shape == (4, 512)


@pytest.mark.parametrize("alignment", [8, 32, 128])
def test_reader_matches_the_gguf_package(alignment, tmp_path):
    """All keys and tensor types: names, values, shapes, offsets and bytes."""
    tensors = {}
    for code, (name, block, size) in TENSOR_TYPES.items():
        if block > 1 and code in list(gguf.GGMLQuantizationType):
            row = np.random.randint(0, 256, (3, 5, 2 * size), dtype=np.uint8)
            tensors[f"blk.{code}"] = (row, name)
    for gguf_type, dtype in {
        "F32": "<f4",
        "F16": "<f2",
        "F64": "<f8",
        "I8": "i1",
        "I32": "<i4",
    }.items():
        tensors[gguf_type] = (np.random.randint(0, 99, (2, 3, 7)).astype(dtype), gguf_type)
    path = write_gguf(tmp_path / "all.gguf", tensors, alignment)
    actual, expected = GGUFReader(path), gguf.GGUFReader(path)
    fields = {k: v.contents() for k, v in expected.fields.items() if not k.startswith("GGUF.")}
    assert actual.metadata == fields and len(fields) > 16
    assert [type(actual.metadata[k]) for k in fields] == [type(v) for v in fields.values()]
    assert list(actual.tensors) == [tensor.name for tensor in expected.tensors] == list(tensors)
    for tensor in expected.tensors:
        info, data = actual.tensors[tensor.name], actual.read_data(tensor.name)
        assert info.type.name == tensor.tensor_type.name
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert data.numpy().tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("code", sorted(TENSOR_TYPES))
def test_types_match_the_gguf_package(code):
    if code not in list(gguf.GGMLQuantizationType):
        pytest.skip("the gguf package is too old for this type")
    gguf_type, type = gguf.GGMLQuantizationType(code), TENSOR_TYPES[code]
    assert (gguf_type.name, *gguf.GGML_QUANT_SIZES[gguf_type]) == type
    if type.name in DTYPE_OF_GGUF_TYPE:
        assert DTYPE_OF_GGUF_TYPE[type.name].itemsize == type.block_bytes
        return
    data = torch.randint(0, 60, (3, 2 * type.block_bytes), dtype=torch.uint8)
    try:
        expected = gguf.quants.dequantize(data.numpy(), gguf_type)
    except NotImplementedError:
        with pytest.raises(FormatError, match=f"GGUF type {type.name} is not supported"):
            dequantize_gguf(data, type.name)
        return
    actual = dequantize_gguf(data, type.name)
    assert actual.shape == (3, 2 * type.block_size)
    assert np.array_equal(actual.numpy(), expected, equal_nan=True)


def test_our_formats_do_not_need_the_gguf_package(gguf_path, tmp_path, monkeypatch):
    data = torch.zeros(2, 176, dtype=torch.uint8)
    monkeypatch.setitem(sys.modules, "gguf", None)
    tensors_read = read_gguf(gguf_path)
    for gguf_type, name in FORMAT_OF_GGUF_TYPE.items():
        assert torch.equal(
            tensors_read[name].dequantize(torch.float32),
            dequantize_gguf(tensors_read[name].packed, gguf_type),
        )
    with pytest.raises(ArgumentError, match="Q5_K needs the gguf package"):
        dequantize_gguf(data, "Q5_K")


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.5, 0.99999])
def test_truncated_file(fraction, gguf_path, tmp_path):
    truncated, data = tmp_path / "truncated.gguf", gguf_path.read_bytes()
    truncated.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(WeightsError, match="truncated") as caught:
        read_gguf(str(truncated))
    assert str(truncated) in str(caught.value)
