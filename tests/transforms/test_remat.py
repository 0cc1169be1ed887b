"""What backward may not recompute: values that it compares for equality."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fulgurite

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda y: y * y.amax(-1, keepdim=True),
    "amin": lambda y: y - y.amin(0),
    "max of all": lambda y: y / y.max(),
    "aminmax": lambda y: y * torch.aminmax(y, dim=-1).max[:, None],
    "largest absolute value": lambda y: (
        y / torch.linalg.vector_norm(y, float("inf"), dim=-1)[:, None]
    ),
    "view": lambda y: y * y.reshape(8, -1).amax(-1).repeat_interleave(4)[:, None],
    "in the program": lambda y: torch.where(y == y.amax(-1, keepdim=True), y * 2, y.tanh()),
    "norm": lambda y: y * F.layer_norm(y, (16,)).amax(-1, keepdim=True),
}


@pytest.mark.covering
@pytest.mark.parametrize("remat", ["mincut", "full", "none"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_compared_values_are_saved(name: str, remat: str) -> None:
    """Recomputed by another kernel, no element might equal the maximum: 0 / 0."""
    if name == "aminmax" and torch.__version__ < "2.12":
        pytest.skip("torch has no derivative of aminmax")
    torch.manual_seed(0)

    def program(x: Tensor) -> Tensor:
        return PROGRAMS[name](F.gelu(x * 3).cos())

    x = torch.randn(32, 16, dtype=torch.float64, requires_grad=True)
    compiled = fulgurite.compile(program, remat=remat)
    (actual,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (expected,) = torch.autograd.grad(program(x).square().sum(), x)
    torch.testing.assert_close(actual, expected)
    (record,) = compiled.graphs
    backward = str(record.compiled_graphs["backward"].trace)
    is_recomputed = "aten.cos." in backward or "torch.cos(" in backward
    assert not is_recomputed or name == "norm", backward


def test_other_values_are_recomputed() -> None:
    def program(x: Tensor) -> Tensor:
        return F.gelu(x * 3).cos().exp() * (x > 0)

    compiled = fulgurite.compile(program)
    x = torch.randn(32, 16, requires_grad=True)
    compiled(x).sum().backward()
    (record,) = compiled.graphs
    assert "cos" in str(record.compiled_graphs["backward"].trace)
