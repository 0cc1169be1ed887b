"""`bench models` tells how far a compiled model is from eager."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fulgurite.bench.models.suite import compare_with_eager


def test_differences_of_loss_and_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0), nn.Linear(6, 1))
    x = torch.randn(2, 4)
    assert compare_with_eager(model, model, (x,)) == {"forward": 0.0, "train": 0.0}
    assert all(p.grad is None for p in model.parameters())

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * model(x)

    found = compare_with_eager(model, doubled, (x,))
    torch.testing.assert_close(list(found.values()), [1.0, 1.0])


def test_a_wrong_gradient_is_seen_where_the_loss_is_right() -> None:
    model = nn.Linear(4, 1)
    x = torch.randn(1, 4)
    held = copy.deepcopy(model).requires_grad_(False)

    def without_bias(x: torch.Tensor) -> torch.Tensor:
        return x @ model.weight.T + held.bias + 0 * model.bias

    found = compare_with_eager(model, without_bias, (x,))
    assert found["forward"] < 1e-6 and found["train"] > 0.1
