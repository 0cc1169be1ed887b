"""Recomputed ReLU masks after batch norms: against float64; what is read and saved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fulgurite.compile import compile
from fulgurite.transforms import relu_backward


class Block(nn.Module):
    """A norm with a ReLU, and the sum of two norms with a ReLU: a residual block."""

    def __init__(self, norm: type[nn.Module], convolution: type[nn.Module], affine: bool) -> None:
        super().__init__()
        self.first, self.second = convolution(8, 16, 3), convolution(16, 16, 1)
        self.shortcut = convolution(8, 16, 3)
        self.norms = nn.ModuleList(norm(16, affine=affine) for _ in range(3))
        for parameter in self.norms.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y)) + self.norms[2](self.shortcut(x))
        return torch.relu(y).square().mean()


def block(affine: bool = True, dims: int = 2) -> Block:
    torch.manual_seed(0)
    kinds = {1: (nn.BatchNorm1d, nn.Conv1d), 2: (nn.BatchNorm2d, nn.Conv2d)}
    return Block(*kinds[dims], affine)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).backward()
    return [parameter.grad.double() for parameter in model.parameters()]


def count_recomputed(compiled) -> int:
    """Number of norms that backward recomputes."""
    (functional,) = [
        t for t in compiled.history if t.name.startswith("backward") and t.stage == "functional"
    ]
    return sum(
        node.target is relu_backward.recompute_batch_norm.overload
        for node in functional.graph.nodes
    )


@pytest.mark.parametrize(
    "dtype, channels_last, affine, dims",
    [
        (torch.float32, True, True, 2),
        (torch.float32, False, False, 2),
        (torch.bfloat16, True, True, 2),
        (torch.float32, False, True, 1),
    ],
)
def test_gradients(dtype, channels_last, affine, dims) -> None:
    model = block(affine, dims).to(dtype)
    x = torch.randn(3, 8, *(9, 7)[:dims]).to(dtype)
    if channels_last:
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    exact = gradients(copy.deepcopy(model).double(), x.double())
    eager = gradients(copy.deepcopy(model), x)
    compiled = compile(model)
    scale = max(float(right.abs().max()) for right in exact)  # some are zero except for rounding
    for ours, theirs, right in zip(gradients(compiled, x), eager, exact, strict=True):
        allowed = 2 * (theirs - right).abs().max() + 1e-6 * scale
        assert (ours - right).abs().max() <= allowed
    assert count_recomputed(compiled) == 3


def test_relu_output_is_not_saved() -> None:
    """Here only its own backward needs it; a convolution would save it for its weight gradient."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(x)).mean()

    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    compiled = compile(Pooled())
    compiled(x).backward()
    outputs = compiled.last_trace("forward").outputs
    large = [o for o in outputs if o is not None and o.meta["val"].numel() == x.numel()]
    assert all(o.op == "placeholder" for o in large), large  # x itself


def test_eval_mode_norm_is_not_recomputed() -> None:
    model = block().eval()
    compiled = compile(model)
    compiled(torch.randn(3, 8, 9, 7)).backward()
    assert count_recomputed(compiled) == 0


def test_remat_none_recomputes_nothing() -> None:
    compiled = compile(block(), remat="none")
    compiled(torch.randn(3, 8, 9, 7)).backward()
    assert count_recomputed(compiled) == 0


def test_nan_and_infinity_propagate() -> None:
    """A channel with NaN gives NaN where eager does."""
    model = block()
    x = torch.randn(3, 8, 9, 7)
    with torch.no_grad():
        model.norms[0].bias[3] = torch.nan
        model.norms[2].weight[1] = torch.inf
    want = gradients(copy.deepcopy(model), x)
    for ours, theirs in zip(gradients(compile(model), x), want, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
