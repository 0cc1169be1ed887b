"""Code sinking: input-only ops join the region that reads them, or that reads the same inputs."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fulgurite.compile import compile
from fulgurite.executors import sinking
from fulgurite.models.tiny import Layer
from fulgurite.trace.region import Region


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(sinking, "MIN_SHARED_INPUT_BYTES", 0)


def kernels(trace) -> list:
    regions = [node for node in trace.ops if isinstance(node.target, Region)]
    return [kernel for node in regions for kernel in node.target.call.kernels]


def test_activation_is_recomputed_in_the_kernel_of_its_gradient() -> None:
    """dh, gate and up are read once; h, dgate and dup are written once."""
    tokens, width, inner = 64, 128, 512
    weights = [torch.randn(width, inner), torch.randn(width, inner), torch.randn(inner, width)]
    weights = [(w / 16).requires_grad_() for w in weights]
    x = torch.randn(tokens, width)

    def mlp(x, gate, up, down):
        return (F.silu(x @ gate) * (x @ up)) @ down

    compiled = compile(mlp, autotune=False)
    compiled(x, *weights).sum().backward()
    unit = 4 * tokens * inner
    large = [
        k.bytes_moved for k in kernels(compiled.last_trace("backward")) if k.bytes_moved > unit
    ]
    assert large == [6 * unit]


def test_norm_is_recomputed_where_its_gradient_is() -> None:
    """Both norms' regions read the layer's input, and each computes its own norm of it again.

    The second norm reads two parts of its input, two gradients and that of the sum around it, and writes its result
    and a gradient; the first reads its input and two gradients, and writes its result and a gradient.
    """
    tokens, width = 256, 256
    layer = Layer(width, 4, 512).bfloat16()
    x = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    angle = torch.randn(tokens, width // 4, dtype=torch.bfloat16)
    compiled = compile(layer, autotune=False)
    compiled(x, angle, angle).sum().backward()
    norms = [k for k in kernels(compiled.last_trace("backward")) if k.name.startswith("sum_pow")]
    assert [k.bytes_moved // (2 * tokens * width) for k in norms] == [7, 5]


class Averaged(nn.Module):
    """Reads a large buffer before and after a product, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(160, 160))
        self.linear = nn.Linear(160, 160)

    def forward(self, x):
        y = self.linear(self.seen * 2 + x)
        along = (self.seen * 3 + y).sum(0)
        self.seen.mul_(0.5)
        return y, along


def test_buffer_is_read_before_it_is_written() -> None:
    model, x = Averaged(), torch.randn(160, 160)
    other = copy.deepcopy(model)
    compiled = compile(model, autotune=False)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), other(x))
    torch.testing.assert_close(model.seen, other.seen)


def test_rotary_angles_go_with_their_readers() -> None:
    """Positions and angles depend on nothing: the region that reads them first has them, in a kernel of their own."""

    def apply_rotation(x, weight):
        place = torch.arange(x.shape[1], dtype=torch.float32)
        angle = torch.outer(place, 10000.0 ** (-torch.arange(0, 64, 2) / 64)).repeat(1, 2)
        x = x @ weight
        heads = x.unflatten(-1, (8, 64)).transpose(1, 2)
        return heads * angle.cos() + heads.flip(-1) * angle.sin(), heads * angle.sin()

    x, weight = torch.randn(2, 512, 512), torch.randn(512, 512) / 20
    compiled = compile(apply_rotation, autotune=False)
    torch.testing.assert_close(compiled(x, weight), apply_rotation(x, weight), rtol=1e-4, atol=1e-4)
    sizes = [k.bytes_moved for k in kernels(compiled.last_trace("inference"))]
    assert len(sizes) == 2 and min(sizes) == 2 * 512 * 64 * 4, sizes  # cosines and sines, once


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
def test_regions_never_form_a_cycle(seed: int, everything_is_large) -> None:
    torch.manual_seed(seed)
    inputs = [torch.randn(8, 8, dtype=torch.float64) for _ in range(4)]
    program = random_program(seed, inputs)
    found = compile(program, autotune=False)(*inputs)
    for ours, theirs in zip(found, program(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
