"""Backward of compiled graphs inside `vmap` equals eager mode's, at the first call and later."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

import fulgurite


def layer(x, weight):
    return (x @ weight).sin() * 2


def basis(y):
    return torch.eye(y.numel()).reshape(-1, *y.shape)


def batched_gradients(call, x, weight):
    y = call(x, weight)
    return torch.autograd.grad(y, [x, weight], basis(y), is_grads_batched=True)


def vmapped_gradients(call, x, weight):
    y = call(x, weight)
    return vmap(lambda row: torch.autograd.grad(y, [x, weight], row))(basis(y))


def vectorized_jacobian(call, x, weight):
    return torch.autograd.functional.jacobian(lambda *a: call(*a), (x, weight), vectorize=True)


def gradients_of_a_jacobian(call, x, weight):
    y = call(x, weight)
    (rows,) = torch.autograd.grad(y, x, basis(y), is_grads_batched=True, create_graph=True)
    return torch.autograd.grad(rows.square().sum(), [x, weight])


@pytest.mark.parametrize(
    "differentiate",
    [batched_gradients, vmapped_gradients, vectorized_jacobian, gradients_of_a_jacobian],
)
def test_gradients_inside_vmap(differentiate):
    torch.manual_seed(0)
    compiled = fulgurite.compile(layer)
    for batch in (3, 3, 5):
        x, weight = torch.randn(batch, 4), torch.randn(4, 2)
        inputs = [x.requires_grad_(), weight.requires_grad_()]
        expected = differentiate(layer, *inputs)
        torch.testing.assert_close(differentiate(compiled, *inputs), expected)


def test_a_graph_with_random_numbers_is_refused():
    compiled = fulgurite.compile(lambda x, weight: torch.nn.functional.dropout(x * weight))
    for _ in range(2):
        x, weight = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"backward inside vmap(.|\n)*random numbers"):
            batched_gradients(compiled, x, weight)
