"""Convolutions that pack their weight at each call, and gradients of inputs, against float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from fulgurite.kernels.conv import cpu, dense
from tests.kernels.conv.test_gradients import channels_last
from tests.kernels.conv.test_packed_conv import check, make_input


def make_geometry(rng):
    stride = [rng.choice([1, 2, 3]) for _ in range(2)]
    dilation = [rng.choice([1, 2]) if step == 1 else 1 for step in stride]
    kernel = [rng.choice([1, 2, 3, 4, 5, 7]) for _ in range(2)]
    padding = [rng.choice([0, 1, k // 2, d * (k - 1) + 1]) for k, d in zip(kernel, dilation)]
    return kernel, stride, padding, dilation


def make_weight(rng, *shape):
    """A weight in one of the layouts that a program may have, at the end of its memory or not."""
    weight = channels_last(torch.randn(shape), rng)
    if rng.random() < 0.3:
        weight = torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return weight[: shape[0]]


def to_double(*tensors):
    return [None if tensor is None else tensor.double() for tensor in tensors]


@pytest.mark.parametrize("seed", range(40))
def test_random_convolutions_and_gradients_of_their_inputs(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kernel, *geometry = make_geometry(rng)
    groups = rng.choice([1, 1, 1, 2, 16, 17, 40])
    channels, rows = (groups * rng.choice([1, 3, 16, 17, 40] if groups < 3 else [1]) for _ in "ab")
    x = make_input(rng, rng.choice([1, 3]), channels, rng.randint(13, 18), rng.randint(13, 20))
    weight = make_weight(rng, rows, channels // groups, *kernel)
    bias = torch.randn(2 * rows)[::2] if rng.random() < 0.5 else None
    result = dense.conv2d(x, weight, bias, *geometry, groups)
    eager = F.conv2d(x, weight, bias, *geometry, groups)
    check(result, F.conv2d(*to_double(x, weight, bias), *geometry, groups), eager)
    assert result.is_contiguous(memory_format=torch.channels_last)
    reference = dense._reference_conv(x, weight, bias, *geometry, groups)
    torch.testing.assert_close(reference, eager)

    gradient, size = channels_last(torch.randn_like(eager), rng), list(x.shape[2:])
    result = dense.conv_transpose2d(gradient, weight, None, size, *geometry, groups)
    eager = torch.nn.grad.conv2d_input(x.shape, weight, gradient, *geometry, groups)
    doubles = to_double(weight, gradient)
    check(result, torch.nn.grad.conv2d_input(x.shape, *doubles, *geometry, groups), eager)
    assert result.is_contiguous(memory_format=torch.channels_last)
    arguments = (gradient, weight, None, size, *geometry, groups)
    torch.testing.assert_close(dense._reference_transpose(*arguments), eager, rtol=1e-4, atol=1e-3)


def test_operators_have_true_fake_rules():
    x, weight = torch.randn(2, 3, 9, 8), torch.randn(20, 3, 3, 3)
    geometry = ([2, 2], [1, 1], [1, 1], 1)
    torch.library.opcheck(dense.conv2d.overload, (x, weight, torch.randn(20), *geometry))
    gradient = torch.randn(2, 20, 5, 4)
    torch.library.opcheck(
        dense.conv_transpose2d.overload, (gradient, weight, None, [9, 8], *geometry)
    )


def test_other_dtypes_run_the_reference():
    x, weight = torch.randn(2, 3, 9, 8).double(), torch.randn(20, 3, 3, 3).double()
    geometry = ([2, 2], [1, 1], [1, 1], 1)
    assert cpu.conv2d(x, weight, None, *geometry) is NotImplemented
    assert cpu.conv_transpose2d(x, weight, None, [17, 15], *geometry) is NotImplemented


@pytest.mark.parametrize("threads", [2, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads, monkeypatch):
    x, weight = torch.randn(2, 96, 20, 20), torch.randn(112, 96, 3, 3)
    results = []
    for count in (1, threads):
        monkeypatch.setenv("FULGURITE_NUM_THREADS", str(count))
        results.append(dense.conv2d(x, weight, None, [1, 1], [1, 1], [1, 1], 1))
    assert torch.equal(*results)
