"""Convolutions of training graphs: channels-last tensors, and weight gradients of our own."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.trace.node_meta import set_fake_value
from fulgurite.transforms import convolutions, measured


@pytest.fixture
def ours_is_faster(monkeypatch):
    """Timings in which our kernels are twice as fast; none is stored."""
    monkeypatch.setattr(measured, "time_calls", lambda _: {"torch": 2.0, "fulgurite": 1.0})
    monkeypatch.setattr(measured, "read_decision", lambda *_: None)
    monkeypatch.setattr(measured, "write_decision", lambda *_: None)


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


@pytest.mark.parametrize("kernel", [3, 7])
def test_depthwise_filters(kernel):
    compiled = check_step(Block(32, kernel=kernel, groups=32), torch.randn(2, 32, 12, 12))
    assert "conv_weight_gradient(" in str(compiled.last_trace("backward"))


LAYERS_1D = {
    "dilated": lambda: nn.Conv1d(6, 20, 3, dilation=2, padding=2),
    "strided": lambda: nn.Conv1d(6, 20, 4, stride=2),
    "grouped": lambda: nn.Conv1d(6, 20, 5, padding="same", groups=2),
    "depthwise": lambda: nn.Sequential(nn.Conv1d(6, 17, 1), nn.Conv1d(17, 17, 3, groups=17)),
    "transposed": lambda: nn.ConvTranspose1d(6, 20, 4, stride=3, padding=1, output_padding=2),
}


@pytest.mark.parametrize("layer", LAYERS_1D)
def test_1d_convolutions(layer, ours_is_faster):
    net = nn.Sequential(LAYERS_1D[layer](), nn.GELU(), nn.LazyConv1d(24, 3), nn.BatchNorm1d(24))
    x = torch.randn(2, 6, 23)
    net(x)
    compiled = check_step(net, x, autotune="auto")
    backward = str(compiled.last_trace("backward"))
    assert "conv_weight_gradient(" in backward and "conv_transpose2d(" in backward
    check_step(net, x)
    check_step(net, x.transpose(1, 2).contiguous().transpose(1, 2), autotune="auto")


class TransposedBlock(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.up = nn.ConvTranspose2d(20, 24, (4, 3), stride=(2, 3), padding=1, **options)
        self.norm, self.last = nn.InstanceNorm2d(24), nn.Conv2d(24, 5, 3)

    def forward(self, x):
        return self.last(nn.functional.hardswish(self.norm(self.up(x))))


@pytest.mark.parametrize("options", [{}, {"output_padding": 1}, {"bias": False, "groups": 4}])
def test_transposed_convolutions(options, ours_is_faster):
    x = torch.randn(2, 20, 7, 6)
    compiled = check_step(TransposedBlock(**options), x, autotune="auto")
    assert "conv_transpose2d(" in str(compiled.last_trace("forward"))
    assert "Python" not in str(compiled.explain()).split("host program")[1].splitlines()[0][30:]
    check_step(TransposedBlock(**options), x)


def test_a_transposed_convolution_with_dilation_and_a_large_output_padding(ours_is_faster):
    net = nn.Sequential(
        nn.ConvTranspose2d(8, 20, 3, dilation=3, output_padding=2), nn.ReLU(), nn.Conv2d(20, 16, 3)
    )
    check_step(net, torch.randn(2, 8, 5, 6), autotune="auto")
    strided = nn.ConvTranspose2d(8, 20, 3, stride=2, dilation=2)
    check_step(nn.Sequential(strided, nn.ReLU()), torch.randn(2, 8, 5, 6), autotune="auto")


def test_slower_convolutions_stay_with_torch(monkeypatch):
    monkeypatch.setattr(measured, "time_calls", lambda _: {"torch": 1.0, "fulgurite": 1.0})
    monkeypatch.setattr(measured, "read_decision", lambda *_: None)
    monkeypatch.setattr(measured, "write_decision", lambda *_: None)
    compiled = check_step(Block(20), torch.randn(2, 20, 9, 9), autotune="auto")
    assert "conv2d(" not in str(compiled.last_trace("forward"))


def test_timing_runs_both_kernels():
    layout = ((2, 8, 1, 30), (240, 1, 240, 8))
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    node = graph.call_function(
        torch.ops.aten.convolution.default,
        (x, weight, None, [1, 1], [0, 1], [1, 1], False, [0, 0], 1),
    )
    with torch._subclasses.FakeTensorMode():
        set_fake_value(x, torch.empty_strided(*layout))
        set_fake_value(weight, torch.empty(20, 8, 1, 3))
        set_fake_value(node, torch.empty(2, 20, 1, 30, memory_format=torch.channels_last))
    found = convolutions._match(node)
    seconds = measured.time_calls(convolutions._compare(node, found))
    assert seconds is None or seconds.keys() == {"torch", "fulgurite"}


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


def test_slices_of_channels_last_tensors():
    """The gradients of concatenated tensors are slices, whose strides no copy has."""

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 5, 3)
            self.mid = nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x):
            y = self.down(x)
            z = nn.functional.elu(nn.functional.group_norm(self.mid(y), 4))
            return self.up(torch.cat([nn.functional.silu(z), nn.functional.elu(y)], 1))

    compiled = check_step(Skip(), torch.randn(2, 3, 8, 8))
    assert str(compiled.last_trace("backward")).count("conv_weight_gradient(") == 3


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
