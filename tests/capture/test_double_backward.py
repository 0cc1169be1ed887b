"""Gradients of gradients through compiled graphs equal those of eager mode, at the first call and later."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fulgurite


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    )


def gradient_penalty(call, parameters, x):
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    loss = (first.norm(dim=1) - 1).square().sum()
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("granularity", ["auto", "model"])
def test_gradient_penalty(granularity):
    model = make_mlp()
    compiled = fulgurite.compile(model, granularity=granularity)
    parameters = list(model.parameters())
    for batch in (3, 3, 5, 7):  # the last two have symbolic sizes
        x = torch.randn(batch, 4)
        expected = gradient_penalty(model, parameters, x)
        torch.testing.assert_close(gradient_penalty(compiled, parameters, x), expected)


def test_repeated_layers():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
    compiled = fulgurite.compile(model)
    parameters = list(model.parameters())
    for _ in range(2):
        x = torch.randn(3, 4)
        expected = gradient_penalty(model, parameters, x)
        torch.testing.assert_close(gradient_penalty(compiled, parameters, x), expected)


def test_third_derivative():
    def f(x):
        return (x**4).sum()

    def third(call, x):
        (first,) = torch.autograd.grad(call(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return torch.autograd.grad(second.sum(), x)[0]

    compiled = fulgurite.compile(f)
    x = torch.randn(5, requires_grad=True)
    for _ in range(2):
        torch.testing.assert_close(third(compiled, x), 24 * x.detach())


def test_gradient_inside_the_compiled_function():
    def f(x):
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return (first**2).sum()

    x = torch.randn(5, requires_grad=True)
    (found,) = torch.autograd.grad(fulgurite.compile(f)(x), x)
    torch.testing.assert_close(found, torch.autograd.grad(f(x), x)[0])


def test_history_of_inputs_and_of_gradients():
    """Second gradients flow into what computed the inputs, and into the gradient that was given."""

    def second(call, w, scale):
        x = w.sin()
        (first,) = torch.autograd.grad(call(x, x), w, scale.exp(), create_graph=True)
        return torch.autograd.grad(first.square().sum(), [w, scale])

    def f(a, b):
        return (a * b.exp()).sin()

    compiled = fulgurite.compile(f)
    w, scale = (torch.randn(4, requires_grad=True) for _ in range(2))
    expected = second(f, w, scale)
    for _ in range(2):
        torch.testing.assert_close(second(compiled, w, scale), expected)


def test_two_outputs_of_which_one_is_used():
    def second(call, x):
        a, b = call(x)
        (first,) = torch.autograd.grad(b.sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    compiled = fulgurite.compile(lambda x: (x.sin(), x**3))
    x = torch.randn(4, requires_grad=True)
    for _ in range(2):
        torch.testing.assert_close(second(compiled, x), 6 * x.detach())


class SavedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class CallsFunction(nn.Module):
    def forward(self, x):
        return SavedOutput.apply(x) * x


def test_what_can_not_be_run_again_is_an_error():
    x = torch.randn(4, 3, requires_grad=True)
    for module, reason in (
        (CallsFunction(), "torch.autograd.Function without its gradient"),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5)), "draws random numbers"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "writes one of its inputs"),
    ):
        compiled = fulgurite.compile(module)
        for _ in range(2):
            (first,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match=reason):
                first.sum().backward()


def test_changed_inputs_are_an_error():
    weight = torch.randn(3, requires_grad=True)
    compiled = fulgurite.compile(lambda x, w: (x + w).sin())
    for _ in range(2):
        x = torch.randn(3, requires_grad=True)
        (first,) = torch.autograd.grad(compiled(x, weight).sum(), x, create_graph=True)
        with torch.no_grad():
            weight += 1
        with pytest.raises(RuntimeError, match="in-place operation"):
            first.sum().backward()


def test_backward_twice_at_the_first_call_with_symbolic_sizes():
    def f(x, w):
        return torch.tanh(x @ w).sin().sum()

    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    result = fulgurite.compile(f, dynamic=True)(x, w)
    first = torch.autograd.grad(result, [x, w], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result, [x, w]), first)
    torch.testing.assert_close(torch.autograd.grad(f(x, w), [x, w]), first)


def test_inputs_are_freed_with_the_graph():
    compiled = fulgurite.compile(lambda x, w: (x + w).sum())
    weight = torch.randn(3, requires_grad=True)
    for _ in range(3):
        x = torch.randn(3)
        alive = weakref.ref(x)
        result = compiled(x, weight)
        del x
        result.backward()
        gc.collect()
    assert alive() is None, "backward keeps the inputs of its call"
