"""Vector math functions against float64: error bounds in ulp over the whole range, and limits."""

from __future__ import annotations

import math

import pytest
import torch

from fulgurite import fuser
from tests.fuser.support import trace

# Bounds that include/math.h, trigonometry.h and functions.h state, and the tested interval (None:
# all exponents).
BOUNDS = {
    "exp": (1.0, (-104.0, 89.0)),
    "exp2": (1.0, (-150.0, 128.0)),
    "expm1": (2.0, (-30.0, 88.0)),
    "log": (1.5, None),
    "log2": (2.0, None),
    "log1p": (2.0, (-0.999, 1e6)),
    "tanh": (2.5, (-10.0, 10.0)),
    "sigmoid": (2.5, (-104.0, 80.0)),
    "erf": (2.0, (-4.5, 4.5)),
    "sin": (2.0, None),
    "cos": (2.0, None),
    "tan": (3.5, None),
    "log10": (1.0, None),
    "asin": (1.0, (-1.0, 1.0)),
    "acos": (1.0, (-1.0, 1.0)),
    "atan": (1.0, None),
    "sinh": (1.0, (-88.0, 88.0)),
    "cosh": (1.0, (-88.0, 88.0)),
    "asinh": (1.0, None),
    "acosh": (1.0, (1.0, 1e6)),
    "atanh": (1.0, (-0.99999, 0.99999)),
}
LIMITS = torch.tensor(
    [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38, 1.0, -1.0]
)


@pytest.fixture(scope="module")
def unary_functions():
    """All functions of one vector, in one library."""
    x = torch.randn(1 << 17)
    region = fuser.lower_region(trace(lambda x: tuple(getattr(torch, n)(x) for n in BOUNDS), (x,)))
    assert len(region.kernels) == 1
    return lambda x: dict(zip(BOUNDS, region(x), strict=True))


def samples(interval: tuple[float, float] | None) -> torch.Tensor:
    count = 1 << 17
    generator = torch.Generator().manual_seed(0)
    if interval is None:
        # every exponent, including subnormal numbers
        codes = torch.randint(1, 0x7F800000, (count,), generator=generator, dtype=torch.int32)
        return codes.view(torch.float32)
    low, high = interval
    wide = torch.rand(count // 2, generator=generator, dtype=torch.float64) * (high - low) + low
    small = 2.0 ** -(torch.rand(count // 2, generator=generator, dtype=torch.float64) * 40)
    small = small * torch.where(torch.rand(count // 2, generator=generator) < 0.5, -1, 1)
    return torch.cat([wide, small.clamp(low, high)]).float()


def ulps(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Returns the distance in float32 ulp.

    Subnormal numbers have the ulp of the smallest normal.
    """
    _, exponent = torch.frexp(exact.abs().clamp(min=2.0**-126))
    return (ours.double() - exact).abs() / 2.0 ** (exponent - 24).double()


@pytest.mark.parametrize("name", BOUNDS)
def test_error_bound(name: str, unary_functions) -> None:
    bound, interval = BOUNDS[name]
    x = samples(interval)
    exact = getattr(torch, name)(x.double())
    inside = exact.abs() < torch.finfo(torch.float32).max
    errors = ulps(unary_functions(x)[name], exact)[inside]
    worst = errors.max()
    assert worst <= bound, f"{name} is off by {worst:.2f} ulp at {x[inside][errors.argmax()]}"


@pytest.mark.parametrize("name", BOUNDS)
def test_limits(name: str, unary_functions) -> None:
    x = torch.cat([LIMITS, torch.zeros((1 << 17) - len(LIMITS))])
    got = unary_functions(x)[name][: len(LIMITS)]
    want = getattr(torch, name)(LIMITS.double()).float()
    same = (got == want) | (got.isnan() & want.isnan())
    close = (got - want).abs() <= 3e-7 * want.abs() + 1e-44
    assert bool((same | close).all()), f"{name}: {got} instead of {want}"
    zeros = want == 0
    assert torch.equal(got[zeros].signbit(), want[zeros].signbit()), "the sign of zero"


BINARY_BOUNDS = {"pow": 1.0, "atan2": 1.0, "hypot": 1.0}


@pytest.fixture(scope="module")
def binary_functions():
    """All functions of two vectors, in one library."""
    x = torch.randn(1 << 17)
    region = fuser.lower_region(
        trace(lambda x, y: tuple(getattr(torch, n)(x, y) for n in BINARY_BOUNDS), (x, x.clone()))
    )
    return lambda x, y: dict(zip(BINARY_BOUNDS, region(x, y), strict=True))


@pytest.mark.parametrize("name", BINARY_BOUNDS)
def test_binary_error_bound(name: str, binary_functions) -> None:
    count = 1 << 16
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-(1 << 31), 1 << 31, (2, count), generator=generator)
    anywhere = codes.to(torch.int32).view(torch.float32)
    near = torch.randn(2, count, generator=generator) * 4
    x, y = torch.cat([anywhere, near], 1)
    exact = getattr(torch, name)(x.double(), y.double())
    got = binary_functions(x, y)[name]
    inside = exact.abs() < torch.finfo(torch.float32).max
    assert ulps(got, exact)[inside].max() <= BINARY_BOUNDS[name]
    assert torch.equal(got.isnan(), exact.isnan())


@pytest.mark.parametrize("name", BINARY_BOUNDS)
def test_binary_limits(name: str, binary_functions) -> None:
    special = torch.cat([LIMITS, torch.tensor([2.0, -2.0, 3.0, -3.0, 0.5, -0.5, 2.0**24, 1e10])])
    pairs = torch.cartesian_prod(special, special)
    padded = torch.ones(1 << 17, 2)
    padded[: len(pairs)] = pairs
    got = binary_functions(*padded.T.contiguous())[name][: len(pairs)]
    want = getattr(torch, name)(*pairs.double().T).float()
    same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= 2e-7 * want.abs())
    assert bool(same.all()), f"{name}: {pairs[~same]}: {got[~same]} instead of {want[~same]}"
    zeros = want == 0
    assert torch.equal(got[zeros].signbit(), want[zeros].signbit()), "the sign of zero"
