"""The bias of a convolution as an op of its own: the same results, strides and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.transforms import convolution_bias


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(convolution_bias, "adds_bias_separately", lambda value: True)


CASES = [
    (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 5, 6)),
    (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 5, 6)),
    (nn.Conv1d(3, 5, 2), (2, 3, 7)),
    (nn.Conv3d(2, 3, 2), (1, 2, 3, 4, 5)),
    (nn.ConvTranspose2d(3, 4, 2, stride=2), (2, 3, 4, 4)),
    (nn.Conv2d(3, 4, 3), (3, 5, 6)),
]


@pytest.mark.parametrize(("module", "shape"), CASES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("channels_last", [False, True])
def test_bias_is_added_by_an_op_of_its_own(any_device, module, shape, channels_last):
    torch.manual_seed(0)
    x = torch.randn(shape)
    if channels_last:
        if len(shape) != 4:
            pytest.skip("channels last has four dimensions")
        x = x.to(memory_format=torch.channels_last)
    compiled = fulgurite.compile(nn.Sequential(module, nn.GELU()))
    found = []
    for run in (nn.Sequential(module, nn.GELU()), compiled):
        module.zero_grad()
        given = x.detach().requires_grad_()
        result = run(given)
        result.sin().sum().backward()
        found.append([result.detach(), given.grad, *(p.grad.clone() for p in module.parameters())])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
        assert ours.stride() == eager.stride()
    assert any(trace.stage == "split_convolution_bias" for trace in compiled.history)


def test_convolutions_without_bias_and_on_cpus_are_left_alone(monkeypatch):
    stages = []
    for module in (nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(3, 4, 3)):
        compiled = fulgurite.compile(module)
        compiled(torch.randn(1, 3, 5, 5))
        stages += [trace.stage for trace in compiled.history]
    assert "split_convolution_bias" not in stages


@pytest.mark.gpu
def test_bias_fuses_on_a_gpu():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GELU()).to("cuda", torch.bfloat16)
    x = torch.randn(2, 8, 9, 9, device="cuda", dtype=torch.bfloat16)
    compiled = fulgurite.compile(module)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), rtol=2e-2, atol=2e-2)
    assert "convolution" in str(compiled.last_trace())
