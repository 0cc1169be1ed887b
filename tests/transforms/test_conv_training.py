"""Convolutions of training graphs: channels-last tensors, and weight gradients of our own."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import fulgurite


class Block(nn.Module):
    def __init__(self, channels, kernel=3, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=groups)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


def train(function, module, x):
    """The result of a step, and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    out = function(x)
    # not by `backward`, which copies a gradient to the strides of its parameter
    gradients = torch.autograd.grad(out.square().mean(), [x, *module.parameters()])
    return [out.detach(), *gradients, *module.buffers()]


def check_step(module, x, **options):
    """Values against float64, strides against eager mode; returns the compiled module."""
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    compiled = fulgurite.compile(module, **options)
    for _ in range(2):  # the second step is a host program's
        results = train(compiled, module, x)
        expected, reference = train(eager, eager, x), train(exact, exact, x.double())
    for ours, theirs, true in zip(results, expected, reference, strict=True):
        if not ours.is_floating_point():
            continue
        assert ours.stride() == theirs.stride()
        # a batch norm makes the gradient of the bias before it zero
        atol = max(1e-4 * float(true.abs().max()), 1e-6)
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=atol)
    return compiled


@pytest.mark.parametrize("is_channels_last", [False, True])
def test_a_training_step_of_convolutions(is_channels_last):
    net = nn.Sequential(
        nn.Conv2d(3, 20, 3, stride=2), Block(20), nn.MaxPool2d(2), nn.Conv2d(20, 32, 1), Block(32)
    )
    x = torch.randn(2, 3, 23, 20)
    if is_channels_last:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    compiled = check_step(net, x)
    backward = str(compiled.last_trace("backward"))
    assert backward.count("conv_weight_gradient(") == 4
    forward = str(compiled.last_trace("forward"))
    copies = set(re.findall(r"\bclone_default\w*(?= =|,? [\w, ]*=)", forward))
    assert len(copies) <= 2  # the input and the result: nothing between is copied


def test_depthwise_filters_with_many_taps():
    compiled = check_step(Block(32, kernel=7, groups=32), torch.randn(2, 32, 12, 12))
    assert "conv_weight_gradient(" in str(compiled.last_trace("backward"))
    compiled = check_step(Block(32, kernel=3, groups=32), torch.randn(2, 32, 12, 12))
    assert "conv_weight_gradient(" not in str(compiled.last_trace("backward"))


@pytest.mark.parametrize("shape", [(2, 1, 9, 8), (2, 1, 9, 4), (1, 1, 4, 9)])
@pytest.mark.parametrize("groups", [1, 4])
def test_strides_of_dimensions_of_size_one(shape, groups):
    check_step(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 1, groups=groups)), torch.randn(shape)
    )
    check_step(nn.Conv2d(4, 1, 3), torch.randn(shape).expand(-1, 4, -1, -1))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_result_that_is_a_convolution(remat):
    """Its tangent is copied to channels last: in backward, whatever forward saves."""
    net = nn.Sequential(nn.Conv2d(8, 24, 3), nn.ReLU(), nn.Conv2d(24, 20, 3))
    compiled = check_step(net, torch.randn(2, 8, 14, 15), remat=remat)
    assert "conv_weight_gradient(" in str(compiled.last_trace("backward"))


def test_saved_bytes_are_explained_for_a_result_that_is_a_convolution():
    compiled = check_step(nn.Conv2d(8, 24, 3), torch.randn(2, 8, 14, 15))
    assert "saved" in str(compiled.explain())


@pytest.mark.parametrize("activation", [nn.ELU, nn.Hardswish, nn.ReLU6, nn.Softplus])
def test_operands_of_several_layouts(activation):
    """torch's fake rules of these gradients predict the layout of another operand than its kernels."""
    norm = nn.InstanceNorm2d(16, affine=True)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), norm, activation(), nn.Conv2d(16, 16, 3))
    compiled = check_step(net, torch.randn(2, 3, 9, 8))
    for graph in compiled.graphs:
        assert not graph.fallbacks
    check_step(net, torch.randn(2, 3, 9, 8), executors=["torch"])


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_padding_by_name(padding):
    net = nn.Sequential(nn.Conv2d(8, 24, 3, padding=padding), nn.ReLU())
    compiled = check_step(net, torch.randn(2, 8, 9, 9))
    assert "conv_weight_gradient(" in str(compiled.last_trace("backward"))


def test_frozen_weights_have_no_gradient():
    net = nn.Sequential(Block(16), Block(16))
    net[0].conv.weight.requires_grad_(False)
    compiled = fulgurite.compile(net)
    compiled(torch.randn(2, 16, 9, 9)).sum().backward()
    assert net[0].conv.weight.grad is None
    assert str(compiled.last_trace("backward")).count("conv_weight_gradient(") == 1


def test_the_gradient_of_a_channels_last_layer_norm():
    """The traced gradient of the weight had other strides than our kernel writes."""

    class Downsample(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = nn.LayerNorm(16), nn.Conv2d(16, 24, 2, 2)

        def forward(self, x):
            return self.conv(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    check_step(Downsample(), torch.randn(2, 16, 8, 8))
