"""0-dim float64 tensors beside Python floats, which torch passes in the same clothes; and calls without wrappers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.capture import autograd


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


def around(compiled, *inputs):
    """Whether calls go through AOTAutograd's wrappers: the results, and what stood between."""
    seen = []
    found = autograd.needs_nothing_around

    def note(*arguments):
        seen.append(found(*arguments))
        return seen[-1]

    with mock.patch.object(autograd, "needs_nothing_around", note):
        result = compiled(*inputs)
    return result, not (seen and all(seen))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x * 2 + 1, False),
        (lambda x: (x.sum(), {"a": x.neg()}, 3), False),
        (lambda x: F.dropout(x, 0.5), False),
        (lambda x: x.view(-1), True),
        (lambda x: (x + 1).split(1), False),
        (lambda x: x.add_(1), True),
        (lambda x: (x.t(), x.t() * 2), True),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_wrappers_are_left_out_where_they_would_do_nothing(function, expected, grad):
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    wanted_x = x.clone()
    wanted = function(wanted_x)
    compiled = fulgurite.compile(function, executors=["torch"])
    with torch.set_grad_enabled(grad):
        torch.manual_seed(0)
        result, wrapped = around(compiled, x)
    assert wrapped == expected
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(x, wanted_x)


def test_wrappers_stay_for_inputs_given_twice_and_autocast():
    x = torch.randn(3, 4)
    _, wrapped = around(fulgurite.compile(lambda a, b: a.add_(1) + b), x, x)
    assert wrapped
    with torch.autocast("cpu", torch.bfloat16):
        result, wrapped = around(fulgurite.compile(lambda a: a @ a.t()), x)
    assert wrapped and result.dtype == torch.bfloat16


def test_no_gradient_is_kept_without_wrappers():
    weight = torch.randn(4, requires_grad=True)
    compiled = fulgurite.compile(lambda x: (x * weight).detach(), executors=["torch"])
    result, _ = around(compiled, torch.randn(3, 4))
    assert not result.requires_grad and result.grad_fn is None
