"""Mutated 0-dim float64 tensors next to Python floats; calls without AOTAutograd's runtime wrapper."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.capture import autograd
from fulgurite.errors import FallbackWarning


def mutate(a, s, v):
    a.add_(1)
    return -a


def mutate_with_a_float(a, s, v):
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
    "function", [mutate, mutate_with_a_float, fill_and_clamp, float_that_cannot_be_a_tensor]
)
def test_mutation_of_scalar_tensors(function, dynamic):
    compiled = fulgurite.compile(function, dynamic=dynamic)
    ours, eager = ([torch.tensor(2.0, dtype=torch.float64), torch.arange(3.0)] for _ in range(2))
    for s in (0.5, 1.25, 3.0):  # a changing float becomes a symbol
        found = compiled(ours[0], s, ours[1])
        expected = function(eager[0], s, eager[1])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_mutation_of_scalar_tensors_with_gradients():
    def function(a, x):
        a.mul_(2)
        return (x * a).sum()

    for each in (function, fulgurite.compile(function)):
        a, x = torch.tensor(3.0, dtype=torch.float64), torch.ones(4, requires_grad=True)
        each(a, x).backward()
        assert a.item() == 6.0 and x.grad.tolist() == [6.0] * 4


def run_and_check_wrapper(compiled, *inputs):
    """The results, and whether the call uses AOTAutograd's runtime wrapper."""
    answers = []
    original = autograd.can_skip_runtime_wrapper

    def record(*arguments):
        answers.append(original(*arguments))
        return answers[-1]

    with mock.patch.object(autograd, "can_skip_runtime_wrapper", record):
        result = compiled(*inputs)
    return result, not (answers and all(answers))


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
def test_runtime_wrapper_is_skipped_if_it_does_nothing(function, expected, grad):
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    wanted_x = x.clone()
    wanted = function(wanted_x)
    compiled = fulgurite.compile(function, executors=["torch"])
    with torch.set_grad_enabled(grad):
        torch.manual_seed(0)
        result, wrapped = run_and_check_wrapper(compiled, x)
    assert wrapped == expected
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(x, wanted_x)


def test_runtime_wrapper_stays_for_duplicate_inputs_and_autocast():
    x = torch.randn(3, 4)
    _, wrapped = run_and_check_wrapper(fulgurite.compile(lambda a, b: a.add_(1) + b), x, x)
    assert wrapped
    with torch.autocast("cpu", torch.bfloat16):
        result, wrapped = run_and_check_wrapper(fulgurite.compile(lambda a: a @ a.t()), x)
    assert wrapped and result.dtype == torch.bfloat16


def test_no_gradient_is_recorded_without_the_runtime_wrapper():
    weight = torch.randn(4, requires_grad=True)
    compiled = fulgurite.compile(lambda x: (x * weight).detach(), executors=["torch"])
    result, _ = run_and_check_wrapper(compiled, torch.randn(3, 4))
    assert not result.requires_grad and result.grad_fn is None


def test_an_input_that_gets_other_memory():
    def f(x):
        before = x.sum()
        x.data = torch.zeros(4, 6) + before
        return x.cumsum(0) + before

    compiled = fulgurite.compile(f)
    ours, eager = torch.ones(4, 6), torch.ones(4, 6)
    for _ in range(2):
        assert torch.equal(compiled(ours), f(eager))
        assert torch.equal(ours, eager)


def test_inputs_in_a_layout_without_memory_run_as_captured():
    """AOTAutograd traces them as plain tensors, and drops the `to_dense`."""
    compiled = fulgurite.compile(lambda x: x.to_dense() + 1)
    x = torch.randn(3, 3)
    with pytest.warns(FallbackWarning, match="to_mkldnn"):
        assert torch.equal(compiled(x.to_mkldnn()), x + 1)
    assert autograd.OPAQUE_INPUTS in str(compiled.explain())
