"""Stores of narrow floats, whose casts kernels leave out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.compile import compile


def test_a_row_program_that_stores_running_statistics_in_bfloat16() -> None:
    """Its stores name steps, so they keep their casts."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 8, 6, 6), torch.randn(8), torch.randn(8)
    inputs = [tensor.bfloat16() for tensor in (x, weight, bias)]

    def norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x * 2, mean, var, weight, bias, training=True))

    eager, ours = ([torch.zeros(8).bfloat16(), torch.ones(8).bfloat16()] for _ in range(2))
    torch.testing.assert_close(
        compile(norm)(*inputs, *ours), norm(*inputs, *eager), rtol=0.02, atol=0.02
    )
    torch.testing.assert_close(ours, eager, rtol=0.01, atol=0.01)
