"""The elementwise backward of the negative log likelihood against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fulgurite.compile import compile
from fulgurite.trace.cost import is_view
from fulgurite.trace.region import Region

SHAPES = [((7, 11), (7,)), ((11,), ()), ((3, 5, 4, 2), (3, 4, 2)), ((0, 5), (0,)), ((1, 1), (1,))]


@pytest.mark.covering
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes, target_sizes", SHAPES)
def test_gradient(sizes, target_sizes, weighted, reduction) -> None:
    torch.manual_seed(0)
    classes = sizes[0] if len(sizes) == 1 else sizes[1]
    x = torch.randn(sizes, dtype=torch.float64)
    target = torch.randint(0, classes, target_sizes)
    if target.numel() > 1:
        target.view(-1)[0] = 2 if classes > 2 else 0  # ignored
    weight = torch.rand(classes, dtype=torch.float64) if weighted else None

    def gradient(function) -> torch.Tensor:
        given = x.clone().requires_grad_()
        result = function(given, target, weight)
        result.backward(torch.full_like(result, 0.5))
        return given.grad

    def loss(x, target, weight):
        logs = F.log_softmax(x, 0 if x.dim() == 1 else 1)
        return F.nll_loss(logs, target, weight, ignore_index=2, reduction=reduction)

    torch.testing.assert_close(gradient(compile(loss)), gradient(loss), equal_nan=True)


def test_cross_entropy_backward_has_only_generated_kernels() -> None:
    """One read of the log-softmax, one write of the gradient."""
    x = torch.randn(64, 1000, requires_grad=True)
    target = torch.randint(0, 1000, (64,))
    compiled = compile(lambda x, t: F.cross_entropy(x, t), autotune=False)
    compiled(x, target).backward()
    calls = [node for node in compiled.last_trace("backward").ops if not is_view(node)]
    assert all(isinstance(node.target, Region) for node in calls)
    kernels = [kernel for node in calls for kernel in node.target.call.kernels]
    assert sum(kernel.bytes_moved for kernel in kernels) < 2.1 * 4 * x.numel()


def test_infinite_gradient_does_not_spread() -> None:
    """Other classes stay zero; zero times infinity would be NaN."""
    logs = torch.randn(3, 4).requires_grad_()
    run = compile(lambda x, t: F.nll_loss(x, t, reduction="none"))
    run(logs, torch.tensor([0, 1, 2])).backward(torch.full((3,), torch.inf))
    assert int(logs.grad.isinf().sum()) == 3 and not bool(logs.grad.isnan().any())
