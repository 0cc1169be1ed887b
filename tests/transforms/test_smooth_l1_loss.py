"""The gradient of the smooth L1 loss is eager's, also where an input is NaN or infinite."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite


@pytest.mark.covering
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradient(reduction, dtype):
    numbers = [0.0, -0.0, 0.25, -0.5, 0.5, 3.0, -7.0, torch.inf, -torch.inf, torch.nan, 1.5]
    target = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, torch.nan]).to(dtype)

    def gradient(function):
        x = torch.tensor(numbers, dtype=dtype, requires_grad=True)
        loss = function(x.clone(), target)
        return torch.autograd.grad(loss, x, torch.ones_like(loss))[0]

    def loss(x, target):
        return F.smooth_l1_loss(x, target, reduction=reduction, beta=0.5)

    found = gradient(fulgurite.compile(loss))
    torch.testing.assert_close(found, gradient(loss), equal_nan=True)
