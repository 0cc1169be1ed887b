"""Copies, hooks and overridden calls of compiled modules."""

from __future__ import annotations

import copy

import torch
from torch import nn

import fulgurite


def test_shallow_copy_shares_parameters_but_not_graphs():
    compiled = fulgurite.compile(nn.Linear(3, 3))
    twin = copy.copy(compiled)
    twin.extra = 1
    assert twin.weight is compiled.weight and not hasattr(compiled, "extra")
    assert torch.equal(twin(torch.ones(2, 3)), compiled(torch.ones(2, 3)))
    assert twin.graphs and twin.graphs is not compiled.graphs


def test_hooks_and_an_overridden_call():
    class Scaled(nn.Linear):
        def __call__(self, x, factor=2):
            return super().__call__(x) * factor

    compiled = fulgurite.compile(Scaled(3, 3))
    x = torch.randn(2, 3)
    plain = nn.functional.linear(x, compiled.weight, compiled.bias)
    torch.testing.assert_close(compiled(x, factor=5), plain * 5)
    compiled.register_forward_hook(lambda module, inputs, output: output * 0)
    assert fulgurite.compile(compiled)(x).abs().sum() == 0
