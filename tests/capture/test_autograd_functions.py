"""User-made `torch.autograd.Function`s in compiled programs."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import fulgurite


class PassesNone(Function):
    """Its gradient of y depends on whether the second output has one."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        return first * y, first * x if second is None else second


class PassesNoneBySetup(PassesNone):
    @staticmethod
    def forward(x, y):
        return x * y, x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)


class OneOutput(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        return x.sin(), order

    @staticmethod
    def backward(ctx, grad, _):
        return grad * ctx.saved_tensors[0].cos()


def find_gradients(function, *inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*inputs).sum(), inputs)


@pytest.mark.parametrize("kind", [PassesNone, PassesNoneBySetup])
@pytest.mark.parametrize("uses", [lambda x, y: x * 2, lambda x, y: x * y])
def test_missing_gradients_are_none(kind, uses):
    inputs = torch.randn(3), torch.randn(3)

    def function(x, y):
        return uses(*kind.apply(x, y))

    expected = find_gradients(function, *inputs)
    compiled = fulgurite.compile(function)
    for _ in range(2):
        torch.testing.assert_close(find_gradients(compiled, *inputs), expected)


def test_one_differentiable_output_is_no_graph_break():
    x = torch.randn(4)
    compiled = fulgurite.compile(lambda x: OneOutput.apply(x)[0] * 2, fullgraph=True)
    torch.testing.assert_close(find_gradients(compiled, x), (2 * x.cos(),))
