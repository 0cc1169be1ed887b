"""GGUF's blocks as groups of integers: the same numbers, bit for bit."""

import importlib

import pytest
import torch

from fulgurite.quant import FORMATS, QuantTensor, codec, quantize, regroup, resolve
from fulgurite.quant.regroup import GROUPED

module = importlib.import_module("fulgurite.quant.regroup")  # the name is the function's, too


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("shape", [(1, 256), (5, 768), (3, 4, 256), (0, 256)], ids=str)
def test_the_same_numbers(name, shape):
    packed = quantize(torch.randn(shape) * torch.randn(*shape[:-1], 1).exp(), name, torch.bfloat16)
    grouped = regroup(packed)
    assert grouped.format.name == GROUPED[name] and grouped.shape == packed.shape
    assert grouped.dtype == torch.bfloat16
    assert torch.equal(grouped.dequantize(torch.float32), packed.dequantize(torch.float32))
    assert grouped.check() is grouped


@pytest.mark.parametrize("most", [1, 4 * 512, 5 * 512])
def test_a_stack_in_parts(most, monkeypatch):
    """Of one expert, or of some; the last part may be a smaller one."""
    packed = quantize(torch.randn(5, 2, 512), "q4_k")
    whole = regroup(packed)
    monkeypatch.setattr(module, "AT_ONCE", most)
    assert torch.equal(regroup(packed).packed, whole.packed)
    assert torch.equal(regroup(packed).dequantize(), packed.dequantize())


@pytest.mark.parametrize("name", GROUPED)
def test_the_same_numbers_of_any_bytes(name):
    """Scales of zero, negative ones, infinities and NaN among them."""
    entry = resolve(name)
    data = torch.randint(256, (64, 4 * entry.items_per_group), dtype=torch.uint8)
    data[::7] = 0
    packed = QuantTensor(entry, data, {})
    wanted, found = packed.dequantize(torch.float32), regroup(packed).dequantize(torch.float32)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("name", GROUPED)
def test_scales_of_zero_over_codes(name):
    """GGUF has them; in a format of integers they would pass for damage."""
    codes = quantize(torch.randn(3, 512), name).codes()
    codes.scales["scale"][1] = 0
    packed = codec.pack(codes, resolve(name))
    weight = QuantTensor(resolve(name), packed.data, packed.scales).check()
    grouped = regroup(weight)
    assert grouped.check() is grouped
    assert torch.equal(grouped.dequantize(), weight.dequantize())


def test_what_has_no_blocks_stays():
    packed = quantize(torch.randn(4, 128), "nvfp4")
    assert regroup(packed) is packed
    assert {name for name, entry in FORMATS.items() if entry.family == "gguf"} == set(GROUPED)


def test_shapes_alone():
    """A plan of memory asks for sizes before anything is loaded."""
    packed = quantize(torch.randn(8, 512), "q4_k")
    grouped = regroup(packed.to("meta"))
    assert grouped.is_meta and grouped.nbytes == regroup(packed).nbytes == 8 * 512 * 6 // 8
