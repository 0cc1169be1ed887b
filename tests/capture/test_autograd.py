"""0-dim float64 tensors beside Python floats, which torch passes in the same clothes."""

from __future__ import annotations

import pytest
import torch

import fulgurite


def write(a, s, v):
    a.add_(1)
    return -a


def write_a_float(a, s, v):
    a.mul_(s)
    v.add_(a)
    return v * s, torch.full((2,), s)


def fill_and_clamp(a, s, v):
    a[...] = s
    v.clamp_(max=s)
    return a + v


def float_that_cannot_be_a_tensor(a, s, v):
    a.sub_(1)
    return torch.nn.functional.leaky_relu(v - 1, s) + a


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize(
    "function", [write, write_a_float, fill_and_clamp, float_that_cannot_be_a_tensor]
)
def test_writes_to_scalar_tensors_are_kept(function, dynamic):
    compiled = fulgurite.compile(function, dynamic=dynamic)
    ours, eager = ([torch.tensor(2.0, dtype=torch.float64), torch.arange(3.0)] for _ in range(2))
    for s in (0.5, 1.25, 3.0):  # a changing float becomes a symbol
        found = compiled(ours[0], s, ours[1])
        expected = function(eager[0], s, eager[1])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_writes_to_scalar_tensors_while_gradients_are_taken():
    def function(a, x):
        a.mul_(2)
        return (x * a).sum()

    for each in (function, fulgurite.compile(function)):
        a, x = torch.tensor(3.0, dtype=torch.float64), torch.ones(4, requires_grad=True)
        each(a, x).backward()
        assert a.item() == 6.0 and x.grad.tolist() == [6.0] * 4
