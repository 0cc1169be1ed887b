"""Transposed convolutions and gradients of convolutions, against float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from fulgurite.kernels.conv import gradients, ops, packing
from fulgurite.kernels.conv.activations import ACTIVATIONS, apply_activation
from tests.kernels.conv.test_packed_conv import PARAMETERS, check, make_input


def channels_last(x, rng):
    return x.to(memory_format=torch.channels_last) if rng.random() < 0.5 else x


@pytest.mark.parametrize("seed", range(40))
def test_random_transposed_convolutions(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    groups = rng.choice([1, 1, 2, 3])
    channels, rows = groups * rng.choice([1, 3, 16, 17, 40]), rng.choice([1, 5, 16, 20, 70])
    kernel = [rng.choice([1, 2, 3, 4, 5]) for _ in range(2)]
    stride = [rng.choice([1, 2, 3]) for _ in range(2)]
    dilation = [rng.choice([1, 2]) if step == 1 else 1 for step in stride]
    padding = [rng.choice([0, 1, min(2, k)]) for k in kernel]
    extra = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    x = make_input(rng, rng.choice([1, 2]), channels, rng.randint(4, 9), rng.randint(4, 12))
    weight = channels_last(torch.randn(channels, rows, *kernel), rng)
    bias = torch.randn(groups * rows) if rng.random() < 0.6 else None
    scale = torch.rand(groups * rows) + 0.5 if bias is not None and rng.random() < 0.5 else None
    activation = rng.choice(list(ACTIVATIONS))

    def expected(x, weight, bias, residual, scale):
        out = F.conv_transpose2d(x, weight, None, stride, padding, extra, groups, dilation)
        out = out if scale is None else out * scale[:, None, None]
        out = out if bias is None else out + bias[:, None, None]
        out = out if residual is None else out + residual
        return apply_activation(out, activation, PARAMETERS.get(activation, []))

    shape = F.conv_transpose2d(x, weight, None, stride, padding, extra, groups, dilation).shape
    residual = torch.randn(shape) if rng.random() < 0.4 else None
    packed = gradients.pack_transposed_weight(weight, groups, stride)
    torch.testing.assert_close(
        packed, packing.pack_transposed(weight, groups, stride), rtol=0, atol=0
    )
    arguments = (
        x, packed, None if bias is None else ops.pack_bias(bias, scale, groups), residual,
        list(shape[2:]), [groups * rows, *kernel], stride, padding, dilation, groups,
        activation, PARAMETERS.get(activation, []), scale is not None,
    )  # fmt: skip
    values = (x, weight, bias, residual, scale)
    reference = expected(*(None if v is None else v.double() for v in values))
    eager = expected(*values)
    result = gradients.packed_conv_transpose(*arguments)
    assert result.is_contiguous(memory_format=torch.channels_last)
    check(result, reference, eager)
    check(gradients._reference_transpose(*arguments), reference, eager)


@pytest.mark.parametrize("seed", range(40))
def test_random_weight_gradients(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kernel = [rng.choice([1, 2, 3, 5, 7]) for _ in range(2)]
    stride, padding, dilation = (
        [rng.choice(options) for _ in range(2)] for options in ([1, 2, 3], [0, 1, 3], [1, 1, 2])
    )
    groups = rng.choice([1, 1, 16, 17, 40])
    channels = rng.choice([1, 3, 16, 20, 33]) if groups == 1 else groups
    rows = rng.choice([1, 6, 16, 21, 70]) if groups == 1 else groups
    x = make_input(rng, rng.choice([1, 3]), channels, rng.randint(14, 30), rng.randint(14, 30))
    shape = [rows, channels // groups, *kernel]
    out = F.conv2d(x, torch.zeros(shape), None, stride, padding, dilation, groups)
    gradient = channels_last(torch.randn_like(out), rng)
    arguments = (stride, padding, dilation, groups)
    result = gradients.conv_weight_gradient(gradient, x, kernel, *arguments)
    eager = torch.nn.grad.conv2d_weight(x, shape, gradient, *arguments)
    reference = torch.nn.grad.conv2d_weight(x.double(), shape, gradient.double(), *arguments)
    assert result.is_contiguous()
    check(result, reference, eager)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shape", [(20, 5, 3, 2), (64, 16, 1, 1), (33, 7, 4), (48, 10)])
def test_native_packing_is_that_of_torch(shape, groups):
    weight = torch.randn(groups * shape[0], *shape[1:])
    for given in (weight, weight.transpose(0, 1).contiguous().transpose(0, 1)):
        packed = ops.pack_weight(given, groups)
        torch.testing.assert_close(packed, packing.pack_weight(given, groups), rtol=0, atol=0)


def test_operators_have_true_fake_rules():
    x, gradient = torch.randn(2, 3, 9, 8), torch.randn(2, 20, 5, 4)
    geometry = ([2, 2], [1, 1], [1, 1])
    weight = torch.randn(3, 20, 3, 3)
    torch.library.opcheck(gradients.pack_transposed_weight.overload, (weight, 1, [2, 2]))
    torch.library.opcheck(
        gradients.conv_weight_gradient.overload, (gradient, x, [3, 3], *geometry, 1)
    )
    packed = gradients.pack_transposed_weight(weight, 1, [2, 2])
    torch.library.opcheck(
        gradients.packed_conv_transpose.overload,
        (x, packed, None, None, [17, 15], [20, 3, 3], *geometry, 1, "relu", [], False),
    )
