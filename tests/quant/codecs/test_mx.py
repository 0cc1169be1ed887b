"""MXFP4 and MXFP8 against the OCP rule in exact arithmetic, and the gguf package's MXFP4 blocks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.quant import FORMATS, PackedData, dequantize_codes, quantize, unpack
from fulgurite.quant.codecs.minifloat import quantize_e2m1

NAMES = ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"]
EMAX = {"mxfp4": 2, "mxfp8_e4m3": 8, "mxfp8_e5m2": 15}
any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)


def reference_exponent(block: list[float], name: str) -> int:
    """floor(log2(amax)) - emax by Python's exact frexp, clamped to the range of e8m0."""
    amax = max(abs(value) for value in block)
    if amax == 0:
        return -127
    return min(max(math.frexp(amax)[1] - 1 - EMAX[name], -127), 127)


def reference_codes(block: list[float], exponent: int, name: str) -> torch.Tensor:
    """x / 2^exponent is exact in float64, then rounded once."""
    limit = FORMATS[name].element.max_value
    scaled = [min(max(math.ldexp(value, -exponent), -limit), limit) for value in block]
    if name == "mxfp4":
        return quantize_e2m1(torch.tensor(scaled, dtype=torch.float64))
    return torch.tensor(scaled, dtype=torch.float64).float().to(FORMATS[name].data_dtype)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(values=st.lists(any_float, min_size=32, max_size=32), name=st.sampled_from(NAMES))
def test_arbitrary_finite_values(values, name):
    q = quantize(torch.tensor([values], dtype=torch.float32), name)
    exponent = reference_exponent(values, name)
    assert q.scales["scale"].view(torch.uint8).item() == exponent + 127
    codes = q.unpack().codes[0].view(torch.uint8)
    assert torch.equal(codes, reference_codes(values, exponent, name).view(torch.uint8))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(values=st.lists(any_float, min_size=32, max_size=32), name=st.sampled_from(NAMES))
def test_requantizing_changes_nothing(values, name):
    once = quantize(torch.tensor([values], dtype=torch.float32), name)
    assert torch.equal(quantize(once.dequantize(), name).dequantize(), once.dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_amax_determines_the_scale_and_may_saturate(name):
    element = FORMATS[name].element
    x = torch.zeros(1, 32)
    x[0, 0] = 2.0 ** (EMAX[name] + 1) * 0.999
    q = quantize(x, name)
    assert q.scales["scale"].view(torch.uint8).item() == 127
    assert q.dequantize()[0, 0].item() == element.max_value
    x[0, 0] = 2.0 ** (EMAX[name] + 1)
    assert quantize(x, name).scales["scale"].view(torch.uint8).item() == 128


@pytest.mark.parametrize("name", NAMES)
def test_every_scale_with_every_code(name):
    format = FORMATS[name]
    scales = torch.arange(255, dtype=torch.uint8)
    if name == "mxfp4":
        data = torch.arange(16, dtype=torch.uint8)
        data = (data | (data << 4)).repeat(255, 1)
        rows = scales[:, None]
    else:
        codes = torch.arange(256, dtype=torch.uint8).view(format.data_dtype)
        data = codes.repeat(255, 1)
        rows = scales[:, None].repeat(1, 8)
    packed = PackedData(data, {"scale": rows.view(torch.float8_e8m0fnu)})
    values = dequantize_codes(unpack(packed, format), format)
    unit = dequantize_codes(unpack(packed, format)._replace(scales={"scale": torch.full_like(
        rows, 127).view(torch.float8_e8m0fnu)}), format)  # fmt: skip
    exact = unit.double() * torch.ldexp(torch.ones(()).double(), scales.double()[:, None] - 127)
    assert torch.equal(values.nan_to_num(nan=7.0), exact.float().nan_to_num(nan=7.0))
    if name == "mxfp4":
        table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
        assert unit[0].tolist() == [value for value in table for _ in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_nan_scale_dequantizes_to_nan(name):
    q = quantize(torch.ones(1, 64), name)
    q.scales["scale"].view(torch.uint8)[0, 1] = 255
    assert q.dequantize().isnan().sum().item() == 32


def test_mxfp4_values_match_the_gguf_package():
    gguf = pytest.importorskip("gguf", reason="the gguf package is what these compare with")
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(16, (255, 32), generator=generator, dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    # A gguf MXFP4 block is the scale, then elements i and i + 16 in byte i.
    halves = codes[:, :16] | (codes[:, 16:] << 4)
    block = torch.cat([scales, halves], dim=1).numpy()
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(block, gguf.GGMLQuantizationType.MXFP4)
    format = FORMATS["mxfp4"]
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    actual = dequantize_codes(
        unpack(PackedData(pairs, {"scale": scales.view(torch.float8_e8m0fnu)}), format), format
    )
    assert np.array_equal(actual.numpy(), expected)
