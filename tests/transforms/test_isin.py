"""`torch.isin` against eager: few and many test elements, NaN and infinities among them."""

from __future__ import annotations

import pytest
import torch

import fulgurite

INF, NAN = float("inf"), float("nan")


@pytest.mark.covering
@pytest.mark.parametrize("count", [0, 1, 9, 10, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("invert", [False, True])
def test_isin(count, dtype, invert):
    def program(x, y):
        return torch.isin(x * 2, y * 2, invert=invert)

    torch.manual_seed(0)
    x, y = (torch.randint(-20, 20, (n,)).to(dtype) for n in (300, count))
    if dtype.is_floating_point:
        x[:4] = torch.tensor([NAN, INF, -INF, -0.0])
        y[: min(count, 8)] = torch.tensor([INF, NAN, NAN, 0.0, NAN, 1.0, NAN, 3.0])[:count]
    assert torch.equal(fulgurite.compile(program)(x, y), program(x, y))


def test_numbers():
    def program(x):
        return torch.isin(x, 2.0), torch.isin(3.0, x), torch.isin(x, x[:3], assume_unique=True)

    x = torch.tensor([2.0, NAN, 3.0, INF])
    for ours, eager in zip(fulgurite.compile(program)(x), program(x), strict=True):
        assert torch.equal(ours, eager)
