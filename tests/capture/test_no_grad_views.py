"""Views that a program makes without gradients and returns: nothing flows through them, as in eager mode."""

from __future__ import annotations

import pytest
import torch

import fulgurite

Tensors = tuple[torch.Tensor, ...]


def views_of_an_input(x: torch.Tensor) -> Tensors:
    with torch.no_grad():
        return x[0], x.view(-1), x.t()[:, 1:]


def views_of_an_intermediate(x: torch.Tensor) -> Tensors:
    y = x * 2
    with torch.no_grad():
        row = y[0]
    return row, y.sin()


def base_and_view(x: torch.Tensor) -> Tensors:
    y = x * 2
    torch.set_grad_enabled(False)
    row = y.select(0, 1)
    torch.set_grad_enabled(True)
    return row, y, y.view(-1)


def inference_mode(x: torch.Tensor) -> Tensors:
    y = x.exp()
    with torch.inference_mode():
        row = y[1]
    return row.clone(), y


def view_with_gradients_inside(x: torch.Tensor) -> Tensors:
    with torch.no_grad():
        row = x[0]
        with torch.enable_grad():
            other = x[1]
    return row, other, other


def views_that_are_the_input(x: torch.Tensor) -> Tensors:
    """In eager mode these ops return their input."""
    with torch.no_grad():
        return x.contiguous(), x.to(x.dtype), x.squeeze(-1).detach(), x.expand_as(x)


PROGRAMS = [
    *(views_of_an_input, views_of_an_intermediate, base_and_view, inference_mode),
    *(view_with_gradients_inside, views_that_are_the_input),
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_no_gradient_flows_through_views_made_without_gradients(program, dynamic):
    compiled = fulgurite.compile(program, fullgraph=True, dynamic=dynamic)
    for rows in (2, 3, 4):
        inputs = [torch.randn(rows, rows, requires_grad=True) for _ in range(2)]
        inputs[1].data.copy_(inputs[0].data)
        for function, x in zip((program, compiled), inputs, strict=True):
            sum((r.square().sum() for r in function(x)), x.sum() * 0).backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


@pytest.mark.parametrize("is_view", [False, True])
def test_an_op_that_returns_its_input_passes_a_gradient(is_view):
    compiled = fulgurite.compile(lambda x: (x.contiguous(), x.flatten()))
    for size in (4, 5, 6):
        leaf = torch.randn(size + 1)[1:] if is_view else torch.randn(size)
        x = leaf.requires_grad_()
        results = compiled(x)
        assert all(result is x for result in results)
        sum(result.sum() for result in results).backward()
        assert torch.equal(x.grad, torch.full((size,), 2.0))


def test_views_made_without_gradients_share_the_memory_of_their_base():
    compiled = fulgurite.compile(views_of_an_input)
    x = torch.randn(3, 3, requires_grad=True)
    for view in compiled(x):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert view.grad_fn is None
