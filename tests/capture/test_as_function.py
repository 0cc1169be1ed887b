"""Compiled functions where code expects Python functions and methods."""

from __future__ import annotations

import inspect
import weakref

import pytest
import torch
from torch import nn

import fulgurite


class Scaler:
    factor = 3.0

    @fulgurite.compile
    def scale(self, x):
        return x * self.factor

    def plain(self, x):
        return x * self.factor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @fulgurite.compile
    def forward(self, x, scale=1.0):
        return self.linear(x) * scale


def test_methods_are_bound_methods():
    scaler = Scaler()
    method = scaler.scale
    assert inspect.ismethod(method) and method.__name__ == "scale"
    assert method.__self__ is scaler and method == scaler.scale and method in {scaler.scale}
    assert weakref.WeakMethod(method)() == method
    x = torch.randn(4)
    assert torch.equal(method(x), x * 3)
    assert method.compiled is Scaler.scale and Scaler.scale.graphs


def test_methods_inside_other_compilations():
    scaler, x = Scaler(), torch.randn(4)
    method = scaler.scale
    for program in (lambda x: scaler.scale(x) + 1, lambda x: method(x) + 1):
        assert torch.equal(fulgurite.compile(program, fullgraph=True)(x), x * 3 + 1)
        theirs = torch.compile(program, backend="eager", fullgraph=True)
        assert torch.equal(theirs(x), x * 3 + 1)


def test_a_compiled_forward_method():
    model, x = Model(), torch.randn(2, 3)
    expected = model.linear(x)
    assert str(inspect.signature(model.forward)) == "(x, scale=1.0)"
    for call in (model, fulgurite.compile(model), torch.compile(model, backend="eager")):
        torch.testing.assert_close(call(x), expected)
    torch.testing.assert_close(torch.vmap(model)(x), expected)


@pytest.mark.parametrize(
    "compiled", [fulgurite.compile(Scaler().plain), Scaler.scale, Scaler().scale]
)
def test_the_argument_list_is_that_of_a_wrapper(compiled):
    theirs = torch.compile(Scaler().plain)
    found = inspect.getfullargspec(compiled)
    assert (found.args, found.varargs) == ([], inspect.getfullargspec(theirs).varargs)


def test_the_code_is_not_that_of_a_base_class():
    assert fulgurite.compile(Scaler().plain).__code__ != Scaler.plain.__code__
    assert Scaler().scale.__code__ != Scaler.plain.__code__
