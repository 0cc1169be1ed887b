"""GGUF blocks repacked into grouped integers: bit-identical values."""

import pytest
import torch

from fulgurite.quant import FORMATS, QuantTensor, quantize, repack_gguf, resolve_format
from fulgurite.quant import repack as repack_module
from fulgurite.quant.codecs import codec
from fulgurite.quant.repack import REPACKED_FORMAT


@pytest.mark.parametrize("name", REPACKED_FORMAT)
@pytest.mark.parametrize("shape", [(1, 256), (5, 768), (3, 4, 256), (0, 256)], ids=str)
def test_values_are_bit_identical(name, shape):
    packed = quantize(torch.randn(shape) * torch.randn(*shape[:-1], 1).exp(), name, torch.bfloat16)
    repacked = repack_gguf(packed)
    assert repacked.format.name == REPACKED_FORMAT[name] and repacked.shape == packed.shape
    assert repacked.dtype == torch.bfloat16
    assert torch.equal(repacked.dequantize(torch.float32), packed.dequantize(torch.float32))
    assert repacked.check_scales() is repacked


@pytest.mark.parametrize("max_elements", [1, 4 * 512, 5 * 512])
def test_large_stacks_are_repacked_in_chunks(max_elements, monkeypatch):
    """Chunks of one or several experts; the last chunk may be smaller."""
    packed = quantize(torch.randn(5, 2, 512), "q4_k")
    whole = repack_gguf(packed)
    monkeypatch.setattr(repack_module, "MAX_ELEMENTS_AT_ONCE", max_elements)
    assert torch.equal(repack_gguf(packed).packed, whole.packed)
    assert torch.equal(repack_gguf(packed).dequantize(), packed.dequantize())


@pytest.mark.parametrize("name", REPACKED_FORMAT)
def test_values_of_random_bytes_are_identical(name):
    """Including zero, negative, infinite and NaN scales."""
    entry = resolve_format(name)
    data = torch.randint(256, (64, 4 * entry.items_per_pack), dtype=torch.uint8)
    data[::7] = 0
    packed = QuantTensor(entry, data, {})
    expected, actual = (
        packed.dequantize(torch.float32),
        repack_gguf(packed).dequantize(torch.float32),
    )
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", REPACKED_FORMAT)
def test_zero_scales_over_nonzero_codes(name):
    """Valid in GGUF; in integer formats checks.py would reject them."""
    codes = quantize(torch.randn(3, 512), name).unpack()
    codes.scales["scale"][1] = 0
    packed = codec.pack(codes, resolve_format(name))
    weight = QuantTensor(resolve_format(name), packed.data, packed.scales).check_scales()
    repacked = repack_gguf(weight)
    assert repacked.check_scales() is repacked
    assert torch.equal(repacked.dequantize(), weight.dequantize())


def test_other_formats_are_unchanged():
    packed = quantize(torch.randn(4, 128), "nvfp4")
    assert repack_gguf(packed) is packed
    assert {name for name, entry in FORMATS.items() if entry.family == "gguf"} == set(
        REPACKED_FORMAT
    )


def test_meta_tensors():
    """A memory plan needs sizes before anything is loaded."""
    packed = quantize(torch.randn(8, 512), "q4_k")
    repacked = repack_gguf(packed.to("meta"))
    assert repacked.is_meta and repacked.nbytes == repack_gguf(packed).nbytes == 8 * 512 * 6 // 8
