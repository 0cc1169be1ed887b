"""Convolutions as GEMMs: values, gradients, strides, and which are left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fulgurite
from fulgurite.capture import convolution_gemm
from fulgurite.capture.convolution_gemm import convolve_groups, convolve_patches


@pytest.fixture
def any_device(monkeypatch):
    """Rewrite CPU graphs in float32, too."""
    monkeypatch.setattr(convolution_gemm, "is_faster_as_gemm", lambda x: True)


def is_rewritten(compiled) -> bool:
    nodes = compiled.graphs[0].captured.graph.nodes
    return any(node.target in (convolve_patches, convolve_groups) for node in nodes)


def check(module: nn.Module, x: torch.Tensor) -> bool:
    """Compare results, strides and gradients with eager. Returns whether the convolution was replaced."""
    compiled = fulgurite.compile(module)
    found = []
    for run in (module, compiled):
        module.zero_grad()
        given = x.detach().requires_grad_()
        result = run(given)
        result.sin().sum().backward()
        gradients = [p.grad.clone() for p in module.parameters()]
        found.append([result.detach(), given.grad, *gradients])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert found[0][0].stride() == found[1][0].stride()
    return is_rewritten(compiled)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(3, 8, 4, stride=4), (2, 3, 16, 20)),
        (nn.Conv2d(3, 8, (2, 5), stride=(2, 5), bias=False), (1, 3, 7, 13)),  # pixels are left over
        (nn.Conv2d(1, 1, 3, stride=3), (3, 1, 3, 3)),
        (nn.Conv1d(5, 7, 2, stride=2, padding="valid"), (2, 5, 9)),
        (nn.Conv3d(2, 4, (1, 2, 2), stride=(1, 2, 2)), (2, 2, 3, 4, 6)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else None,
)
def test_separate_patches_are_a_gemm(any_device, module, shape):
    torch.manual_seed(0)
    assert check(module, torch.randn(shape))


def test_channels_last_results_keep_their_strides(any_device):
    torch.manual_seed(0)
    module = nn.Conv2d(4, 8, 2, stride=2).to(memory_format=torch.channels_last)
    assert check(module, torch.randn(2, 4, 6, 8).to(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 8, 3, stride=2),
        nn.Conv2d(4, 8, 2, stride=2, padding=1),
        nn.Conv2d(4, 8, 2, stride=2, dilation=2),
        nn.Conv2d(4, 8, 2, stride=2, groups=2),
        nn.Conv2d(4, 8, 1),
    ],
)
def test_other_convolutions_stay(any_device, module):
    torch.manual_seed(0)
    assert not check(module, torch.randn(2, 4, 9, 9))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding", "taps"), [(1, 8, 16), (2, 3, 17), (3, 0, 20)])
def test_grouped_convolutions_with_long_kernels_are_a_gemm(any_device, bias, stride, padding, taps):
    torch.manual_seed(0)
    module = nn.Conv1d(32, 48, taps, stride, padding, groups=4, bias=bias)
    compiled = fulgurite.compile(module)
    for batch in (2, 3):
        x = torch.randn(batch, 32, 41)
        with torch.no_grad():
            ours, eager = compiled(x), module(x)
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
        assert ours.stride() == eager.stride()
    assert is_rewritten(compiled)


def test_grouped_convolutions_in_training_and_short_ones_stay(any_device):
    torch.manual_seed(0)
    assert not check(nn.Conv1d(32, 32, 16, groups=4, padding=8), torch.randn(2, 32, 24))
    compiled = fulgurite.compile(nn.Conv1d(32, 32, 3, groups=4))
    with torch.no_grad():
        compiled(torch.randn(2, 32, 24))
    assert not is_rewritten(compiled)


def test_convolutions_on_a_cpu_stay():
    compiled = fulgurite.compile(nn.Conv2d(3, 4, 2, stride=2))
    compiled(torch.randn(1, 3, 4, 4))
    assert not is_rewritten(compiled)


def test_a_changing_batch_size(any_device):
    weight, bias = torch.randn(4, 3, 2, 2), torch.randn(4)
    compiled = fulgurite.compile(lambda x: F.conv2d(x, weight, bias, stride=2).relu())
    for batch in (2, 3, 5, 1):
        x = torch.randn(batch, 3, 6, 4)
        wanted = F.conv2d(x, weight, bias, stride=2).relu()
        torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 3, 224, 224), (3, 3, 65, 50)])
def test_patch_embedding_on_a_gpu(shape):
    torch.manual_seed(0)
    module = nn.Conv2d(3, 64, 16, stride=16).to("cuda", torch.bfloat16)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    compiled = fulgurite.compile(module)
    with torch.no_grad():
        ours, exact = compiled(x), module.float()(x.float())
    assert is_rewritten(compiled)
    torch.testing.assert_close(ours.float(), exact, rtol=2e-2, atol=2e-2)
