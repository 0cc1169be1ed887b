"""Special functions, integer division and gcd, and rare data movement."""

from __future__ import annotations

import pytest
import torch

from tests.fuser.support import check_fused, check_interpreted

RUNS_ON_TRITON = True

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_functions(dtype: torch.dtype) -> None:
    unit = torch.cat([torch.linspace(-1, 1, 301), torch.linspace(-0.99999, 0.99999, 77)])
    unit = torch.cat([unit, torch.tensor([0.0, -0.0, 1.5, NAN, 1e-30, 0.9999999])]).to(dtype)
    line = torch.cat([torch.linspace(-20.3, 30, 501), torch.linspace(0.001, 3, 300)])
    special = torch.tensor([0.0, -0.0, -1.0, -2.0, 1e-5, 1e10, INF, NAN, -INF])
    line = torch.cat([line, special]).to(dtype)
    check_fused(lambda u, x: (torch.erfinv(u), torch.digamma(x), torch.angle(x)), unit, line)


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def numbers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    info = torch.iinfo(dtype)
    signed = info.min < 0
    a = [0, 1, 2, 3, 5, info.max, info.min, info.max - 1, 7, -9 if signed else 9, 100, 99]
    b = [
        3,
        -1 if signed else 255,
        7,
        -3 if signed else 3,
        2,
        5,
        info.max,
        info.max,
        1,
        2,
        7,
        9,
    ]
    return torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_powers_and_gcd(dtype: torch.dtype) -> None:
    """No integer is divided by zero. int8 and uint8 wrap."""
    first, second = numbers(dtype)
    first = first.clamp(min=-100)

    def function(a, b):
        small = b.clamp(min=0, max=9)
        return torch.gcd(a, b), torch.lcm(a, b), a**small, a**b, torch.gcd(a - a, b), a[:1] ** small

    check_fused(function, first, second)
    check_fused(function, first[[0]], second)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_division(dtype: torch.dtype) -> None:
    a, b = numbers(dtype)

    def function(a, b):
        return (
            a // b,
            torch.div(a, b, rounding_mode="trunc"),
            a % b,
            torch.fmod(a, b),
            torch.gcd(a.clamp(min=-100), b),
            torch.lcm(a.clamp(min=-100), b),
            a ** b.clamp(min=0, max=9),
            torch.pow(a, b),
            a // 255 if dtype == torch.uint8 else a // -1 * 0,
        )

    check_interpreted(function, a, b)
    region = check_fused(function, a, b)
    for zero in (b * 0, torch.where(b == 7, b * 0, b)):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            function(a, zero)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            region(a, zero)


DATA_MOVEMENT = {
    "roll": lambda x: torch.roll(x, 3),
    "roll_dims": lambda x: torch.roll(x, (2, -1), (0, 2)) * 2,
    "steps_written": lambda x: torch.slice_scatter(x, x[1::3] * 2, 0, 1, 6, 3),
    "diagonal_written": lambda x: aten.diagonal_scatter(x, x.diagonal(1) * 0, 1),
    "other_diagonal": lambda x: aten.diagonal_scatter(x, x.diagonal(-2, 2, 0) * 0, -2, 2, 0),
    "take": lambda x: torch.take(x, torch.arange(4).view(2, 2) * 60 - 9),
    "unsafe_split": lambda x: torch.unsafe_split(x, 4)[1] * 2,
    "repeat_nothing": lambda x: x[:0].repeat(2, 1, 1),
}


def test_data_movement() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8, 5)
    for case in DATA_MOVEMENT.values():
        check_interpreted(case, x)
    check_fused(lambda x: tuple(case(x) for case in DATA_MOVEMENT.values()), x)
