"""In-place ops whose result does not fit into their tensor raise, as in eager mode."""

from __future__ import annotations

import operator

import pytest
import torch

import fulgurite
from fulgurite.errors import FallbackWarning

COUNTS, MASK, ROW = torch.arange(3), torch.tensor([True, False, True]), torch.ones(1, 3)
REFUSED = {
    "product": lambda: (COUNTS, lambda x: x.mul_(0.5)),
    "product of tensors": lambda: (COUNTS, lambda x: x.mul_(torch.tensor([0.5]))),
    "operator": lambda: (COUNTS, lambda x: operator.imul(x, torch.tensor([0.5]))),
    "mask": lambda: (MASK, lambda x: x.mul_(1.5)),
    "function of integers": lambda: (COUNTS, lambda x: x.logit_()),
    "more dimensions": lambda: (COUNTS.half(), lambda x: x.hypot_(ROW.half())),
    "comparison": lambda: (COUNTS, lambda x: x.lt_(ROW)),
    "floor division": lambda: (COUNTS.float(), lambda x: x.floor_divide_(ROW)),
    "larger": lambda: (torch.ones(1), lambda x: x.copysign_(torch.ones(3))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_results_that_do_not_fit(name):
    x, write = REFUSED[name]()

    def f(x):
        x = x.clone()
        write(x)
        return x

    with pytest.raises(RuntimeError):
        f(x)
    with pytest.raises(RuntimeError):
        fulgurite.compile(f)(x)


def test_results_that_fit():
    def f(x, counts, mask):
        x = x.clone().mul_(counts).pow_(2).lt_(3).floor_divide_(2.0)
        counts = counts.clone().add_(mask).mul_(2).eq_(2)
        return x, counts, mask.clone().logical_and_(counts).mul_(mask)

    inputs = torch.randn(2, 3), COUNTS, MASK
    for found, expected in zip(fulgurite.compile(f)(*inputs), f(*inputs), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_the_error_is_eagers_own(monkeypatch):
    """Without strict mode the op is a graph break."""
    monkeypatch.setenv("FULGURITE_STRICT", "0")
    with (
        pytest.warns(FallbackWarning),
        pytest.raises(RuntimeError, match="result type Float can't be cast"),
    ):
        fulgurite.compile(lambda x: x.clone().mul_(0.5))(COUNTS)
