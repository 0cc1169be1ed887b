"""In-place writes through views of `as_strided` of a view."""

from __future__ import annotations

import pytest
import torch

import fulgurite


def write_row(x):
    y = x.view(6, 4).as_strided((3, 2), (4, 1), 2)
    y.add_(1)
    y[1].mul_(3)
    return x * 1, y * 1


def write_row_at_own_offset(x):
    y = x[1].as_strided((2, 2), (4, 1))
    y[0].add_(100)
    return x * 1, y * 1


def write_column(x):
    y = torch.as_strided(x[1], size=(2, 2), stride=(4, 1), storage_offset=13)
    y.t()[0].add_(100)
    return x * 1, y * 1


def write_to_a_new_tensor(x):
    z = x * 2
    y = z[0].t().as_strided((2, 2), (3, 1), 1)
    y[1].fill_(7)
    return z, y * 1


def write_windows(x):
    x[1].unfold(-1, 2, 3)[0].mul_(2)
    return x * 1


@pytest.mark.covering
@pytest.mark.parametrize(
    "f", [write_row, write_row_at_own_offset, write_column, write_to_a_new_tensor, write_windows]
)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_writes_through_a_view(f, dynamic, grad):
    compiled = fulgurite.compile(f, dynamic=dynamic, fullgraph=True)
    for _ in range(2):
        leaf = torch.arange(24.0).reshape(2, 3, 4).requires_grad_(grad)
        ours, eager = leaf * 1, leaf * 1
        found, expected = compiled(ours), f(eager)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours, eager)
        if grad:
            results = [sum((t.sin()).sum() for t in flatten(value)) for value in (found, expected)]
            gradients = [torch.autograd.grad(result, leaf, retain_graph=True) for result in results]
            torch.testing.assert_close(*gradients)


def flatten(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.vmap(lambda row: row.sin() * row.sum())(x),
        lambda x: torch.vmap(lambda row: row.clone().add_(row.expand(2, 3)[0]))(x),
        lambda x: torch.func.grad(lambda y: (y**2).sum())(x),
        lambda x: torch.func.hessian(lambda y: (y**3).sum())(x[0]),
    ],
)
def test_tensors_of_torch_func_have_no_storage(f):
    x = torch.randn(4, 3)
    torch.testing.assert_close(fulgurite.compile(f)(x), f(x))
