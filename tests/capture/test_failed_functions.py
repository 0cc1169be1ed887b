"""Programs on which TorchDynamo itself fails."""

from __future__ import annotations

import os

import pytest
import torch
from torch._dynamo.variables import TensorVariable

import fulgurite
from fulgurite.errors import FallbackWarning
from tests.forked import run_program


@pytest.fixture(params=[AssertionError, IndexError, LookupError])
def failure(request, monkeypatch):
    """TorchDynamo fails at every `tanh`. It wraps the last of these errors."""
    original = TensorVariable.call_method

    def call_method(self, tx, name, *args):
        if name == "tanh":
            raise request.param("broken")
        return original(self, tx, name, *args)

    monkeypatch.setattr(TensorVariable, "call_method", call_method)
    return request.param


def function(x):
    return x.tanh() + 1


def test_eager_mode_runs_the_function(failure, monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")
    x = torch.randn(3)
    compiled = fulgurite.compile(function)
    with pytest.warns(FallbackWarning, match="broken"):
        torch.testing.assert_close(compiled(x), function(x))
    torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_strict_mode_and_fullgraph_raise(failure, monkeypatch, fullgraph):
    if fullgraph:
        monkeypatch.delenv("FULGURITE_STRICT")
    with pytest.raises(Exception, match="broken"):
        fulgurite.compile(function, fullgraph=fullgraph)(torch.randn(3))


def test_errors_of_the_program_are_its_own(monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")

    def check(x, n):
        assert n > 3, "too small"
        return x + [1, 2][n]

    compiled = fulgurite.compile(check)
    with pytest.raises(AssertionError, match="too small"):
        compiled(torch.ones(2), 1)
    with pytest.raises(IndexError, match="list index out of range"):
        compiled(torch.ones(2), 5)


ASYNCHRONOUS = """
import asyncio, gc, torch, fulgurite

async def double(x):
    return x * 2

async def count(x):
    for k in range(3):
        yield x + k

async def collect(generator):
    return [x async for x in generator]

coroutine, generator = map(fulgurite.compile, (double, count))
x = torch.ones(2)
for _ in range(3):
    assert asyncio.run(coroutine(x)).tolist() == [2, 2]
    assert [y[0].item() for y in asyncio.run(collect(generator(x)))] == [1, 2, 3]
    gc.collect()
"""


def test_coroutines_run_in_eager_mode():
    """In a process of its own: a captured coroutine makes a later garbage collection crash."""
    result = run_program(ASYNCHRONOUS, os.environ)
    assert result.returncode == 0, result.stderr
