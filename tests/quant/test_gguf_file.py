""".gguf files written by the gguf package and read by ours, without copying a block."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fulgurite.errors import ArgumentError, FormatError, WeightsError
from fulgurite.quant import QuantTensor, quantize, read_gguf
from fulgurite.quant.gguf_file import GGUF_TYPES, PLAIN_TYPES, GGUFContainer, dequantize
from fulgurite.quant.gguf_header import TYPES

gguf = pytest.importorskip("gguf", reason="the gguf package is what these compare with")
QUANTIZED = ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"]


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]], alignment: int = 32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    add_one_of_each(writer)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_one_of_each(writer: "gguf.GGUFWriter") -> None:
    """A key of each value type, arrays of numbers and of text among them."""
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


@pytest.mark.parametrize("alignment", [8, 32, 128])
def test_the_container_is_what_the_gguf_package_reads(alignment, tmp_path):
    """Every key and every type of tensor: names, values, shapes, places and bytes."""
    tensors = {}
    for code, (name, block, size) in TYPES.items():
        if block > 1 and code in list(gguf.GGMLQuantizationType):
            row = np.random.randint(0, 256, (3, 5, 2 * size), dtype=np.uint8)
            tensors[f"blk.{code}"] = (row, name)
    for kind, dtype in {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I32": "<i4"}.items():
        tensors[kind] = (np.random.randint(0, 99, (2, 3, 7)).astype(dtype), kind)
    path = write(tmp_path / "all.gguf", tensors, alignment)
    ours, theirs = GGUFContainer(path), gguf.GGUFReader(path)
    fields = {k: v.contents() for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields and len(fields) > 16
    assert [type(ours.metadata[k]) for k in fields] == [type(v) for v in fields.values()]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors] == list(tensors)
    for tensor in theirs.tensors:
        info, data = ours.tensors[tensor.name], ours.data(tensor.name)
        assert info.type.name == tensor.tensor_type.name
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.start, info.size) == (tensor.data_offset, tensor.n_bytes)
        assert data.numpy().tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("code", sorted(TYPES))
def test_types_are_what_the_gguf_package_says(code):
    if code not in list(gguf.GGMLQuantizationType):
        pytest.skip("the gguf package is too old for this type")
    kind, type = gguf.GGMLQuantizationType(code), TYPES[code]
    assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == type
    if type.name in PLAIN_TYPES:
        assert PLAIN_TYPES[type.name].itemsize == type.size
        return
    data = torch.randint(0, 60, (3, 2 * type.size), dtype=torch.uint8)
    try:
        theirs = gguf.quants.dequantize(data.numpy(), kind)
    except NotImplementedError:
        with pytest.raises(FormatError, match=f"{type.name} blocks can't be read"):
            dequantize(data, type.name)
        return
    ours = dequantize(data, type.name)
    assert ours.shape == (3, 2 * type.block)
    assert np.array_equal(ours.numpy(), theirs, equal_nan=True)


def test_our_formats_read_without_the_package(model, tmp_path, monkeypatch):
    data = torch.zeros(2, 176, dtype=torch.uint8)
    monkeypatch.setitem(sys.modules, "gguf", None)
    read = read_gguf(model)
    for kind, name in GGUF_TYPES.items():
        assert torch.equal(
            read[name].dequantize(torch.float32), dequantize(read[name].packed, kind)
        )
    with pytest.raises(ArgumentError, match="Q5_K blocks needs the gguf package"):
        dequantize(data, "Q5_K")


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.5, 0.99999])
def test_a_truncated_file_is_an_error(part, model, tmp_path):
    cut, data = tmp_path / "cut.gguf", model.read_bytes()
    cut.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(WeightsError, match="cut short") as caught:
        read_gguf(str(cut))
    assert str(cut) in str(caught.value)
