"""Convolutions and linears with packed weights, against float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from fulgurite.kernels.conv import cpu, ops, packing
from fulgurite.kernels.conv.activations import ACTIVATIONS, apply_activation

PARAMETERS = {"clamp": [-0.5, 0.5], "leaky_relu": [0.1], "elu": [1.3]}


def check(result, reference, eager):
    """Our error is at most twice eager's, with room for results that eager gets exactly right."""
    error, allowed = (result - reference).abs().max(), (eager - reference).abs().max()
    assert error <= 2 * allowed + 1e-5 * reference.abs().max().clamp(min=1)


def packed_conv(x, weight, bias, residual, geometry, groups, activation="none", scale=None):
    stride, padding, dilation = geometry
    bias_groups = packing.bias_groups(weight.shape[0], x.shape[1], groups)
    return ops.packed_conv(
        x, ops.pack_weight(weight, groups),
        None if bias is None else ops.pack_bias(bias, scale, bias_groups), residual,
        [weight.shape[0], *weight.shape[2:]], stride, padding, dilation, groups,
        activation, PARAMETERS.get(activation, []), scale is not None,
    )  # fmt: skip


def expected(x, weight, bias, residual, geometry, groups, activation="none", scale=None):
    stride, padding, dilation = geometry
    out = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    out = out if scale is None else out * scale[:, None, None]
    out = out if bias is None else out + bias[:, None, None]
    out = out if residual is None else out + residual
    return apply_activation(out, activation, PARAMETERS.get(activation, []))


def make_input(rng, batch, channels, height, width):
    """An input in one of the layouts that a program may have."""
    layout = rng.choice(["contiguous", "channels_last", "strided", "sliced channels"])
    if layout == "channels_last":
        return torch.randn(batch, channels, height, width).to(memory_format=torch.channels_last)
    if layout == "strided":
        return torch.randn(batch, channels, height, 2 * width)[..., ::2]
    if layout == "sliced channels":
        rows = torch.randn(batch, height, width, channels + 3)
        return rows.permute(0, 3, 1, 2)[:, 1 : channels + 1]
    return torch.randn(batch, channels, height, width)


@pytest.mark.parametrize("seed", range(60))
def test_random_convolutions(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    if rng.random() < 0.3:
        groups = channels = out_channels = rng.choice([16, 17, 24, 40, 96])
    else:
        groups = rng.choice([1, 1, 1, 2])
        channels = groups * rng.choice([1, 3, 5, 16, 17, 24, 64, 100])
        out_channels = groups * rng.choice([1, 7, 16, 20, 33, 64, 80, 130])
    kernel = [rng.choice([1, 2, 3, 5, 7]), rng.choice([1, 3, 5, 7])]
    geometry = [
        [rng.choice(options) for _ in range(2)] for options in ([1, 2, 3], [0, 1, 3], [1, 1, 2])
    ]
    stride, padding, dilation = geometry
    least = [d * (k - 1) + 1 - 2 * p for k, p, d in zip(kernel, padding, dilation, strict=True)]
    sizes = [max(low, 1) + rng.randint(0, 15) for low in least]
    x = make_input(rng, rng.choice([1, 2, 3]), channels, *sizes)
    weight = torch.randn(out_channels, channels // groups, *kernel)
    bias = torch.randn(out_channels) if rng.random() < 0.6 else None
    activation = rng.choice(list(ACTIVATIONS))
    shape = F.conv2d(x, weight, None, stride, padding, dilation, groups).shape
    residual = torch.randn(shape) if rng.random() < 0.4 else None
    scale = torch.rand(out_channels) + 0.5 if bias is not None and rng.random() < 0.5 else None
    result = packed_conv(x, weight, bias, residual, geometry, groups, activation, scale)
    doubles = [None if t is None else t.double() for t in (x, weight, bias, residual)]
    wide = None if scale is None else scale.double()
    check(
        result,
        expected(*doubles, geometry, groups, activation, wide),
        expected(x, weight, bias, residual, geometry, groups, activation, scale),
    )
    assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 33, 100])
@pytest.mark.parametrize("depth", [1, 16, 65, 300])
@pytest.mark.parametrize("features", [1, 16, 33, 100, 200])
def test_linears(rows, depth, features):
    x = torch.randn(depth, rows).t() if rows == 5 else torch.randn(rows, depth)
    weight, bias = torch.randn(features, depth), torch.randn(features)
    packed = ops.pack_weight(weight, 1), ops.pack_bias(bias, None, 1)
    result = ops.packed_linear(x, *packed, None, features, "gelu", [])
    reference = F.gelu(F.linear(x.double(), weight.double(), bias.double()))
    check(result, reference, F.gelu(F.linear(x, weight, bias)))


def test_a_long_sum_rounds_no_more_than_eager():
    x, weight = torch.randn(4, 8192), torch.randn(64, 8192)
    result = ops.packed_linear(x, ops.pack_weight(weight, 1), None, None, 64, "none", [])
    reference = x.double() @ weight.double().t()
    check(result, reference, x @ weight.t())
    assert (result - reference).abs().max() < 1e-3


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads, monkeypatch):
    x, weight = torch.randn(2, 32, 20, 20), torch.randn(48, 32, 3, 3)
    geometry = ([1, 1], [1, 1], [1, 1])
    monkeypatch.setenv("FULGURITE_NUM_THREADS", "1")
    one = packed_conv(x, weight, None, None, geometry, 1)
    monkeypatch.setenv("FULGURITE_NUM_THREADS", str(threads))
    assert torch.equal(packed_conv(x, weight, None, None, geometry, 1), one)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_special_values(value, activation):
    x, weight = torch.full((3, 20), value), torch.eye(20)
    result = ops.packed_linear(
        x, ops.pack_weight(weight, 1), None, None, 20, activation, PARAMETERS.get(activation, [])
    )
    eager = apply_activation(F.linear(x, weight), activation, PARAMETERS.get(activation, []))
    torch.testing.assert_close(result, eager, equal_nan=True)


def test_no_pixels():
    x, weight = torch.randn(0, 3, 8, 8), torch.randn(16, 3, 3, 3)
    out = packed_conv(x, weight, None, None, ([1, 1], [1, 1], [1, 1]), 1)
    assert out.shape == (0, 16, 8, 8)
    empty = ops.packed_linear(
        torch.randn(0, 8), ops.pack_weight(torch.randn(4, 8), 1), None, None, 4, "none", []
    )
    assert empty.shape == (0, 4)


def test_other_dtypes_run_the_reference():
    x, weight = torch.randn(2, 5, 9, 9, dtype=torch.float64), torch.randn(16, 5, 3, 3)
    geometry = ([1, 1], [0, 0], [1, 1])
    assert (
        cpu.packed_conv(x, weight, None, None, [16, 3, 3], *geometry, 1, "none", [], False)
        is NotImplemented
    )


@pytest.mark.parametrize(
    ("shape", "groups"), [((33, 5, 3, 2), 1), ((34, 4, 1, 1), 2), ((40, 1, 3, 3), 40)]
)
def test_packing_is_reversible(shape, groups):
    weight = torch.randn(shape)
    packed = ops.pack_weight(weight, groups)
    assert packed.shape == torch.ops.fulgurite.pack_weight(weight.to("meta"), groups).shape
    unpacked = ops.unpack_weight(packed, [shape[0], *shape[2:]], shape[1], groups)
    assert torch.equal(unpacked, weight)
