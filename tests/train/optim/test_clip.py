"""Clipping: equal to torch's, without a value on the host, and defined for infinite norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.errors import ArgumentError
from fulgurite.train.optim import clip_gradients, local_gradient_norm


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape, dtype in (((3, 4), torch.float32), ((5,), torch.bfloat16), ((0, 2), torch.float32)):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        parameters.append(parameter)
    return [*parameters, nn.Parameter(torch.zeros(2))]  # the last has no gradient


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_equals_torch(max_norm):
    ours, theirs = make_parameters(), make_parameters()
    norm = local_gradient_norm(ours)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-3, atol=0.0)  # torch: bfloat16 norms
    clip_gradients(ours, norm, max_norm)
    for found, wanted in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-2, atol=1e-5)
    assert local_gradient_norm(ours) <= max_norm * 1.01
    assert ours[3].grad is None


def test_a_parameter_given_twice_is_scaled_once():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_gradients([parameter, parameter], torch.tensor(5.0), 1.0)
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("norm", [math.inf, math.nan, 0.0])
def test_infinite_nan_and_zero_norms_change_nothing(norm):
    parameters = make_parameters()
    before = [p.grad.clone() for p in parameters[:3]]
    clip_gradients(parameters, torch.tensor(norm), 1.0)
    for parameter, gradient in zip(parameters, before, strict=False):
        assert torch.equal(parameter.grad, gradient)


def test_no_limit_and_wrong_limits():
    parameters = make_parameters()
    before = parameters[0].grad.clone()
    clip_gradients(parameters, torch.tensor(1e9), 0.0)
    assert torch.equal(parameters[0].grad, before)
    for wrong in (-1.0, math.nan):
        with pytest.raises(ArgumentError, match="max_norm"):
            clip_gradients(parameters, torch.tensor(1.0), wrong)
    assert local_gradient_norm([]) == 0


def test_nothing_is_read_on_the_host():
    class RefuseReads(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            assert op is not torch.ops.aten._local_scalar_dense.default, "a host read"
            return op(*args, **(kwargs or {}))

    parameters = make_parameters()
    norm = local_gradient_norm(parameters)
    with RefuseReads():
        clip_gradients(parameters, norm, 0.5)
