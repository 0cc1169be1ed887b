"""Inference mode inside a compiled program: no capture fails, and no mode stays on."""

from __future__ import annotations

import pytest
import torch

import fulgurite


def view_inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    with torch.inference_mode():
        z = y.detach() * 2
    return y, z.clone()


def gradient_inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        y = x.view(-1) * 2
        with torch.inference_mode(False):
            z = x * 3
        w = x + 1
    return y.clone(), z, w.clone()


def modes_inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        with torch.inference_mode():
            y = x.t() + 1
        y = y + x.t()
        with torch.enable_grad():
            z = x * 5
    return y.clone(), z * x


@pytest.mark.parametrize("program", [view_inside, gradient_inside, modes_inside])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_inference_mode_inside_a_program(program, requires_grad):
    compiled = fulgurite.compile(program, fullgraph=True)
    for _ in range(3):
        x = torch.randn(2, 3, requires_grad=requires_grad)
        expected, found = program(x), compiled(x)
        for one, two in zip(expected, found, strict=True):
            assert torch.equal(one, two) and one.requires_grad == two.requires_grad
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        if requires_grad:
            grads = [torch.autograd.grad(r[0].sum() + r[1].sum(), x) for r in (expected, found)]
            assert torch.equal(grads[0][0], grads[1][0])
