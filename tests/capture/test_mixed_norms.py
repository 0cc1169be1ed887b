"""Norms of narrow floats with float32 parameters equal eager mode's, forward and backward.

torch's rules have the saved statistics in the dtype of the input; its CPU kernels have float32.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import fulgurite
from fulgurite.capture import dynamo_fixes

NORMS = {
    "batch": lambda: nn.BatchNorm1d(4),
    "batch, not affine": lambda: nn.BatchNorm1d(4, affine=False),
    "batch, no statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "batch, evaluated": lambda: nn.BatchNorm1d(4).eval(),
    "layer": lambda: nn.LayerNorm(6),
    "layer, no bias": lambda: nn.LayerNorm((4, 6), bias=False),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
}


def run_with_gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
    return y, *torch.autograd.grad((y.double() * weight).sum(), [x, *model.parameters()])


def check(model, make_input, run):
    """Our errors are at most twice eager's, beside a few roundings; eager sums some in bfloat16."""
    compiled, exact = fulgurite.compile(copy.deepcopy(model)), copy.deepcopy(model).double()
    for _ in range(3):
        x = make_input()
        results = run(model, x), run(compiled, x), run_with_gradients(exact, x.double())
        for eager, ours, reference in zip(*results, strict=True):
            assert ours.dtype == eager.dtype
            bound = 2 * (eager - reference).norm() + 8e-3 * reference.norm() + 1e-3
            assert (ours - reference).norm() <= bound
        torch.testing.assert_close(dict(compiled.named_buffers()), dict(model.named_buffers()))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_gradients(name, dtype):
    torch.manual_seed(0)
    model = NORMS[name]()
    check(model, lambda: torch.randn(5, 4, 6).to(dtype), run_with_gradients)


def test_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3),
        *(nn.BatchNorm1d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.LayerNorm(6)),
        nn.Linear(6, 2),
    )

    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return run_with_gradients(model, x)

    check(model, lambda: torch.randn(16, 3, 8), run)


@pytest.mark.parametrize("name", NORMS)
def test_dtypes_of_fake_tensors(name):
    """Every tensor that an op saves has the dtype of the real one."""
    dynamo_fixes.install()

    def saved_dtypes():
        model = NORMS[name]()
        x = torch.randn(5, 4, 6).to(torch.bfloat16).requires_grad_()
        dtypes: list[torch.dtype] = []
        pack = lambda tensor: dtypes.append(tensor.dtype) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        return dtypes

    expected = saved_dtypes()
    with FakeTensorMode():
        assert saved_dtypes() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_running_statistics_keep_their_dtype(dtype, dynamic):
    """torch's rule gives float32."""

    def norm(x, mean, variance):
        return nn.functional.batch_norm(x, mean, variance, training=True)

    torch.manual_seed(0)
    x = torch.randn(4, 8, 5, 5).to(dtype)
    ours, eager = ([torch.zeros(8, dtype=dtype), torch.ones(8, dtype=dtype)] for _ in range(2))
    y = fulgurite.compile(norm, dynamic=dynamic)(x, *ours)
    exact = [torch.zeros(8).double(), torch.ones(8).double()]
    norm(x, *eager)
    torch.testing.assert_close(y.double(), norm(x.double(), *exact), rtol=8e-3, atol=8e-3)
    for new, old, right in zip(ours, eager, exact, strict=True):
        assert new.dtype == old.dtype
        torch.testing.assert_close(new.double(), right, rtol=8e-3, atol=1e-3)
