"""Ops that torch's kernels refuse raise torch's error, also where a generated kernel could run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.executors import refusals

INTEGERS, MASK, FLOATS = torch.arange(6).view(2, 3), torch.ones(2, 3).bool(), torch.randn(2, 3)
REFUSED = {
    "gelu": lambda: (F.gelu, INTEGERS),
    "silu": lambda: (F.silu, INTEGERS),
    "relu": lambda: (torch.relu, MASK),
    "softmax": lambda: (lambda x: F.softmax(x, 0), INTEGERS),
    "argmax": lambda: (lambda x: x.argmax(0), MASK),
    "var": lambda: (lambda x: x.logcumsumexp(0), INTEGERS),
    "bits": lambda: (lambda x: x & 1, FLOATS),
    "gcd": lambda: (lambda x: torch.gcd(x, x), FLOATS),
    "complex": lambda: (lambda x: torch.complex(x, x.double()), FLOATS),
    "heaviside": lambda: (lambda x: torch.heaviside(x, x.double()), FLOATS),
    "random": lambda: (torch.rand_like, INTEGERS),
    "sort": lambda: (lambda x: x.sort(2)[0], FLOATS),
    "cross entropy": lambda: (lambda x: F.binary_cross_entropy(x + 2, x), FLOATS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_eagers(name):
    function, x = REFUSED[name]()

    def f(x):
        return function(x), x + 1

    with pytest.raises(Exception) as expected:
        f(x)
    compiled = fulgurite.compile(f)
    for _ in range(2):
        with pytest.raises(expected.type) as found:
            compiled(x)
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_kernels_are_asked_once_for_each_combination_of_dtypes(monkeypatch):
    asked = []
    try_one_element = refusals._try_one_element
    monkeypatch.setattr(refusals, "_refused", {})
    monkeypatch.setattr(
        refusals,
        "_try_one_element",
        lambda node, kinds: asked.append(node) or try_one_element(node, kinds),
    )
    state = torch.get_rng_state()
    torch.manual_seed(0)
    f = fulgurite.compile(lambda x, y: (x.sin() + y.sin()).sin() * torch.rand_like(x))
    f(FLOATS, FLOATS)
    names = sorted(node.target._schema.name for node in asked)
    assert names == ["aten::add", "aten::mul", "aten::rand_like", "aten::sin"]
    first = f(FLOATS, FLOATS)
    torch.manual_seed(0)
    f(FLOATS, FLOATS)
    assert torch.equal(f(FLOATS, FLOATS), first), "asking must not draw random numbers"
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    "function",
    [torch.bucketize, torch.isin, lambda x, sequence: torch.searchsorted(sequence, x)],
    ids=["bucketize", "isin", "searchsorted"],
)
def test_kernels_that_refuse_dtypes_accept_no_elements(function):
    x, sequence = torch.zeros(0, 2).to(torch.float8_e5m2), torch.zeros(0)
    assert torch.equal(fulgurite.compile(function)(x, sequence), function(x, sequence))
