"""Stores of narrow floats, whose casts kernels leave out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.compile import compile


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(2, 8), (16, 8)], ids=str)
def test_running_statistics_in_bfloat16(shape: tuple[int, ...], dynamic: bool) -> None:
    """With dynamic sizes it is a row program, whose stores name steps, so they keep their casts."""
    torch.manual_seed(0)
    inputs = [torch.randn(size).bfloat16() for size in (shape, (8,), (8,))]

    def norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, training=True)

    eager, ours = ([torch.zeros(8).bfloat16(), torch.ones(8).bfloat16()] for _ in range(2))
    compiled = compile(norm, dynamic=dynamic)
    actual, expected = compiled(*inputs, *ours), norm(*inputs, *eager)
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(ours, eager, rtol=0.01, atol=0.01)
