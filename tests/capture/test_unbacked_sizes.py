"""Data-dependent sizes: rows chosen by a mask, as in language adapters and expert layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fulgurite


class Adapter(nn.Module):
    """Runs a layer on the rows of one kind: transformers' Xmod."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x, kinds):
        (rows,) = torch.where(kinds == 1)
        chosen = x[rows]
        changed = self.down(torch.relu(self.up(self.norm(chosen)))).view(-1, 6, 8) + chosen
        return x.index_put((rows,), changed.sigmoid())


@pytest.mark.parametrize("autotune", [False, "auto", True])
@pytest.mark.parametrize("grad", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_chosen_by_a_mask(autotune, grad):
    torch.manual_seed(0)
    module = Adapter()
    compiled = fulgurite.compile(module, autotune=autotune)
    for kinds in ([1, 0, 1], [0, 0, 0], [1, 1, 1]):
        x = torch.randn(3, 6, 8)
        with torch.set_grad_enabled(grad):
            ours, eager = (run(x, torch.tensor(kinds)) for run in (compiled, module))
        torch.testing.assert_close(ours, eager)
        if grad:
            wanted = torch.autograd.grad(eager.sum(), list(module.parameters()))
            found = torch.autograd.grad(ours.sum(), list(module.parameters()))
            torch.testing.assert_close(found, wanted)
