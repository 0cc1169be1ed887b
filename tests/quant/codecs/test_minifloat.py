"""Rounding to 8-bit and 4-bit floats, exhaustively, against a brute-force float64 reference."""

import math
from itertools import pairwise

import pytest
import torch

from fulgurite.quant.codecs.minifloat import (
    E2M1_VALUES,
    dequantize_e2m1,
    dequantize_e8m0,
    floor_log2,
    quantize_e2m1,
    quantize_e8m0,
    saturating_cast,
)
from fulgurite.quant.format import E4M3, E5M2

FLOAT8 = [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)]


def magnitudes(exponent_bits: int, mantissa_bits: int, max_value: float) -> list[float]:
    """The finite magnitudes of a small float type in code order, from its definition."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        power = max(exponent, 1) - bias
        values.append(((exponent > 0) + fraction) * 2.0**power)
    return [value for value in values if value <= max_value]


def nearest_even(x: float, values: list[float]) -> int:
    """The code of the value nearest to |x|; ties to the even code; saturating."""
    x = min(abs(x), values[-1])
    distances = [abs(x - value) for value in values]
    best = min(distances)
    codes = [code for code, distance in enumerate(distances) if distance == best]
    return next((code for code in codes if code % 2 == 0), codes[0])


def make_test_points(values: list[float]) -> torch.Tensor:
    """Every value and midpoint, their float32 neighbours, and out-of-range points; both signs."""
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    points = torch.tensor([*values, *middles, values[-1] * 1.04, values[-1] * 1.5, 1e30, 1e-30])
    up = torch.nextafter(points, torch.tensor(float("inf")))
    down = torch.nextafter(points, torch.tensor(0.0))
    return torch.cat([points, up, down, -points, -up, -down])


@pytest.mark.parametrize(("element", "dtype"), FLOAT8)
def test_float8_rounds_to_nearest_even_and_saturates(element, dtype):
    bits = (4, 3) if element is E4M3 else (5, 2)
    values = magnitudes(*bits, element.max_value)
    points = make_test_points(values)
    codes = saturating_cast(points, element, dtype).view(torch.uint8)
    expected = [
        nearest_even(x, values) | (128 if math.copysign(1, x) < 0 else 0) for x in points.tolist()
    ]
    assert codes.tolist() == expected


@pytest.mark.parametrize(("element", "dtype"), FLOAT8)
def test_float8_matches_torch_for_finite_values(element, dtype):
    all_codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = all_codes[all_codes.float().isfinite()]
    cast = saturating_cast(finite.float(), element, dtype)
    assert torch.equal(cast.view(torch.uint8), finite.view(torch.uint8))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=generator) * torch.logspace(-8, 2, 100_000)
    x = x.clamp(element.min_value, element.max_value)
    actual = saturating_cast(x, element, dtype).view(torch.uint8)
    assert torch.equal(actual, x.to(dtype).view(torch.uint8))


@pytest.mark.parametrize(("element", "dtype"), FLOAT8)
def test_float8_nan_infinity_and_zeros(element, dtype):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    y = saturating_cast(x, element, dtype)
    assert y.float().isnan().tolist() == [True, False, False, False, False]
    assert y.float()[1:3].tolist() == [element.max_value, element.min_value]
    assert y.view(torch.uint8)[3:].tolist() == [0x00, 0x80]


def test_e2m1_values():
    assert E2M1_VALUES == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert tuple(magnitudes(2, 1, 6.0)) == E2M1_VALUES
    values = dequantize_e2m1(torch.arange(16, dtype=torch.uint8))
    assert values.dtype == torch.float32
    assert values.tolist() == [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    assert math.copysign(1, values[8].item()) == -1


def test_e2m1_rounds_to_nearest_even_and_saturates():
    points = make_test_points(list(E2M1_VALUES))
    expected = [
        nearest_even(x, list(E2M1_VALUES)) | (8 if math.copysign(1, x) < 0 else 0)
        for x in points.tolist()
    ]
    assert quantize_e2m1(points).tolist() == expected


def test_e2m1_special_values():
    inf = float("inf")
    x = torch.tensor([inf, -inf, float("nan"), -float("nan"), -0.0, 1e-45, -1e-45])
    assert quantize_e2m1(x).tolist() == [7, 15, 0, 0, 8, 0, 8]


def test_e2m1_codes_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(quantize_e2m1(dequantize_e2m1(codes)), codes)


def test_e8m0_values_match_torch():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    actual = dequantize_e8m0(codes)
    assert actual[:255].double().tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert actual[255].isnan()
    assert torch.equal(actual[:255], codes.float()[:255])
    exponents = torch.arange(-127, 128, dtype=torch.float32)
    assert torch.equal(quantize_e8m0(exponents).view(torch.uint8), codes.view(torch.uint8)[:255])


def test_e8m0_clamps_and_keeps_nan():
    x = torch.tensor([-1000.0, -128.0, float("-inf"), 128.0, 500.0, float("nan")])
    assert quantize_e8m0(x).view(torch.uint8).tolist() == [0, 0, 0, 254, 254, 255]


def test_floor_log2_is_exact_around_every_power():
    powers = torch.tensor([math.ldexp(1.0, e) for e in range(-149, 128)], dtype=torch.float32)
    assert floor_log2(powers).tolist() == list(range(-149, 128))
    below = torch.nextafter(powers[1:], torch.tensor(0.0))
    assert floor_log2(below).tolist() == list(range(-149, 127))
    special = floor_log2(torch.tensor([0.0, float("nan")]))
    assert special[0] == float("-inf")
    assert special[1].isnan()
