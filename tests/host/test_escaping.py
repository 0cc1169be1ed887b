"""Which views leave a host program alone, so that autograd need not know their base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite.host.escaping import find_escaping, find_sole_views
from fulgurite.trace.steps import StepList


def one_view(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return ((x @ w).t().reshape(2, 2, 4),)


def view_and_copy(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    product = x @ w
    return product.t(), product.exp()


def two_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    product = x @ w
    return product.t(), product.view(-1)


def base_and_view(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    product = x @ w
    return product, product.t()


def view_of_an_input(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x.t(), x @ w


def written_view(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    view = (x @ w).t()
    view.add_(1)
    return (view,)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (one_view, True),
        (view_and_copy, True),
        (two_views, False),
        (base_and_view, False),
        (view_of_an_input, False),
        (written_view, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_sole_views(function: Callable[..., Any], expected: bool) -> None:
    module = make_fx(function)(torch.randn(4, 4), torch.randn(4, 4))
    steps = StepList(module)
    assert isinstance(steps.outputs, list | tuple)
    first = steps.outputs[0]
    assert first in find_escaping(steps)
    assert (first in find_sole_views(steps)) == expected
