"""INT8 and INT4 against scalar arithmetic; the error is at most half a step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.quant import FORMATS, quantize

SYMMETRIC = ["int8", "int4_g32", "int4_g64", "int4_g128"]
ASYMMETRIC = ["int4_g32_asym", "int4_g64_asym", "int4_g128_asym", "int8_asym", "int8_g32_asym"]
SCALE_AND_RANGE = {"int8": (127.0, -127, 127)} | dict.fromkeys(SYMMETRIC[1:], (7.5, -8, 7))
# Near the largest float32, code * scale may overflow.
any_float = st.floats(-(2.0**126), 2.0**126, width=32)
moderate_float = st.floats(-100, 100, width=32)
MIN_SCALE = np.float32(2.0**-126)


def split_groups(name: str, row: np.ndarray) -> np.ndarray:
    width = FORMATS[name].block[1] or row.size
    return row.reshape(-1, width)


def reference_symmetric(row: np.ndarray, name: str) -> tuple[list[int], list[float]]:
    span, low, high = SCALE_AND_RANGE[name]
    codes, scales = [], []
    for group in split_groups(name, row):
        amax = np.abs(group).max()
        scale = max(amax / np.float32(span), MIN_SCALE) if amax > 0 else np.float32(1)
        scales.append(float(scale))
        codes += [min(max(round(float(x / scale)), low), high) for x in group]
    return codes, scales


def reference_asymmetric(row: np.ndarray, name: str) -> tuple[list[int], list[float], list[int]]:
    codes, scales, zero_points = [], [], []
    first, last = (-128, 127) if name.startswith("int8") else (0, 15)
    steps = np.float32(last - first)
    for group in split_groups(name, row):
        low, high = min(group.min(), np.float32(0)), max(group.max(), np.float32(0))
        scale = max(high / steps - low / steps, MIN_SCALE) if low or high else np.float32(1)
        zero_point = min(max(round(float(-low / scale)) + first, first), last)
        scales.append(float(scale))
        zero_points.append(zero_point)
        codes += [min(max(round(float(x / scale)) + zero_point, first), last) for x in group]
    return codes, scales, zero_points


rows = st.lists(any_float, min_size=128, max_size=128) | st.lists(
    moderate_float, min_size=128, max_size=128
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(values=rows, name=st.sampled_from(SYMMETRIC))
def test_symmetric(values, name):
    x = torch.tensor(values, dtype=torch.float32)
    q = quantize(x, name)
    codes, scales = reference_symmetric(x.numpy(), name)
    assert q.unpack().codes.tolist() == codes
    assert q.scales["scale"].tolist() == scales
    element_scales = q.scales["scale"].double().repeat_interleave(128 // len(scales))
    error = (q.dequantize().double() - x.double()).abs()
    assert bool((error <= element_scales * 0.5 * (1 + 1e-4)).all())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(values=rows, name=st.sampled_from(ASYMMETRIC))
def test_asymmetric(values, name):
    x = torch.tensor(values, dtype=torch.float32)
    q = quantize(x, name)
    codes, scales, zero_points = reference_asymmetric(x.numpy(), name)
    assert q.scales["scale"].tolist() == scales
    assert q.scales["zero_point"].tolist() == zero_points
    assert q.unpack().codes.tolist() == codes
    element_scales = q.scales["scale"].double().repeat_interleave(128 // len(scales))
    error = (q.dequantize().double() - x.double()).abs()
    # Rounding of the zero point can add half a step of error at one end of the range.
    assert bool((error <= element_scales * (1 + 1e-4)).all())
    assert bool((q.dequantize()[x == 0] == 0).all())


@pytest.mark.parametrize("name", [*SYMMETRIC, *ASYMMETRIC[:-1]])
def test_every_code_round_trips(name):
    format = FORMATS[name]
    low, high = int(format.element.min_value), int(format.element.max_value)
    codes = torch.arange(low, high + 1, dtype=torch.float32)
    width = format.block[1] or codes.numel()
    x = codes.repeat(-(-width // codes.numel()))[:width]
    static_scale = {"scale": 1.0} if name in SYMMETRIC else {}
    q = quantize(x, name, **static_scale)
    assert torch.equal(q.dequantize(), x)
    assert torch.equal(q.unpack().codes.float(), x)


def test_rounds_halves_to_even():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.0, -127.0]])
    assert quantize(x, "int8").packed.tolist() == [[0, 2, 2, 0, -2, -2, 127, -127]]


def test_nibbles_are_low_first_and_offset_by_eight():
    x = torch.zeros(32)
    x[:4] = torch.tensor([-7.5, 1.0, 2.0, 7.5])
    q = quantize(x, "int4_g32")
    assert q.scales["scale"].tolist() == [1.0]
    assert q.packed[:3].tolist() == [0x0 | (0x9 << 4), 0xA | (0xF << 4), 0x88]


def test_asymmetric_ranges_include_zero():
    x = torch.linspace(10, 25, 32)
    q = quantize(x, "int4_g32_asym")
    assert q.scales["zero_point"].item() == 0
    assert q.scales["scale"].item() == pytest.approx(25 / 15)
    q = quantize(-x, "int4_g32_asym")
    assert q.scales["zero_point"].item() == 15
