"""Ops that wait for nothing join the region that reads them, or the same inputs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from fulgurite.compile import compile
from fulgurite.executors import deferred
from fulgurite.trace.region import Region


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(deferred, "LEAST_SHARED", 0)


def kernels(trace) -> list:
    regions = [node for node in trace.ops if isinstance(node.target, Region)]
    return [kernel for node in regions for kernel in node.target.call.kernels]


def test_an_activation_is_computed_again_in_the_kernel_of_its_gradient() -> None:
    """dh, gate and up are read once; h, dgate and dup are written once."""
    tokens, width, inner = 64, 128, 512
    weights = [torch.randn(width, inner), torch.randn(width, inner), torch.randn(inner, width)]
    weights = [(w / 16).requires_grad_() for w in weights]
    x = torch.randn(tokens, width)

    def mlp(x, gate, up, down):
        return (F.silu(x @ gate) * (x @ up)) @ down

    compiled = compile(mlp, tune=False)
    compiled(x, *weights).sum().backward()
    unit = 4 * tokens * inner
    large = [k.bytes for k in kernels(compiled.last_trace("backward")) if k.bytes > unit]
    assert large == [6 * unit]


def random_program(seed: int, inputs: list[torch.Tensor]):
    """Elementwise ops and products in any order, over inputs and earlier results; several results."""
    choose = random.Random(seed)
    steps = []
    for _ in range(choose.randint(6, 24)):
        kind = choose.choice(["add", "mul", "sin", "mean", "mm", "mm"])
        steps.append((kind, choose.random(), choose.random(), choose.random()))

    def run(*inputs):
        values = list(inputs)
        for kind, first, second, old in steps:
            # inputs now and then, so that there is always something that waits for nothing
            a = inputs[int(first * len(inputs))] if old < 0.4 else values[int(first * len(values))]
            b = values[int(second * len(values))]
            if kind == "mm":
                values.append(a @ b / 8)
            elif kind == "mean":
                values.append(a - a.mean(-1, keepdim=True) * b)
            elif kind == "sin":
                values.append(a.sin())
            else:
                values.append(a + b if kind == "add" else a * b)
        return tuple(values[-5:])

    return run


@pytest.mark.parametrize("seed", range(30))
def test_regions_never_wait_for_each_other(seed: int, everything_is_large) -> None:
    torch.manual_seed(seed)
    inputs = [torch.randn(8, 8, dtype=torch.float64) for _ in range(4)]
    program = random_program(seed, inputs)
    found = compile(program, tune=False)(*inputs)
    for ours, theirs in zip(found, program(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
