"""Channels in pairs (interleaved rotations): points are taken as they lie in memory, on a GPU too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.device import Device
from fulgurite.fuser.codegen.triton.module import write_stages
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, row_limit
from fulgurite.fuser.segment import segment
from fulgurite.fuser.segment.build_loop_nest import build
from tests.fuser.support import fused, trace

H200 = Device("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))


def turned(x: Tensor, cos: Tensor, sin: Tensor, first: int) -> Tensor:
    """The channels from `first` on turned in pairs of neighbours, those before as they are."""
    pairs = x[..., first:].float()
    a, b = pairs[..., 0::2], pairs[..., 1::2]
    both = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((x[..., :first], both.to(x.dtype)), -1)


def arguments(rows: int, heads: int, channels: int, first: int, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x = torch.randn(rows, heads, channels).to(dtype)
    angles = [torch.randn(rows, 1, (channels - first) // 2) for _ in range(2)]
    return x, *angles


@pytest.mark.parametrize(
    "rows, heads, channels, first", [(3, 5, 24, 16), (1, 1, 6, 4), (7, 2, 34, 2)]
)
def test_turned_in_pairs(rows: int, heads: int, channels: int, first: int) -> None:
    given = arguments(rows, heads, channels, first, torch.float32)
    fused(lambda x, cos, sin: turned(x, cos, sin, first), *given)


def test_gradients_of_pairs() -> None:
    def back(g, cos, sin):
        x = torch.zeros_like(g, requires_grad=True)
        return torch.autograd.grad(turned(x, cos, sin, 8), x, g)[0]

    g, cos, sin = arguments(3, 4, 20, 8, torch.float32)
    with torch.enable_grad():
        want = back(g, cos, sin)

    def by_hand(g, cos, sin):
        a, b = g[..., 8::2], g[..., 9::2]
        both = torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)
        return torch.cat((g[..., :8], both), -1)

    torch.testing.assert_close(by_hand(g, cos, sin), want)
    fused(by_hand, g, cos, sin)


def test_points_are_taken_as_they_lie() -> None:
    """The store, and the read of what is not turned, are sixteen bytes a thread: both are at the point itself."""
    given = arguments(2048, 128, 192, 128)
    region = split_axes.refine(
        lower_graph.read(trace(lambda x, cos, sin: turned(x, cos, sin, 128), given))
    )
    (part,) = segment(region, row_limit(H200))
    schedule = choose_gpu_schedule(build(region, part), H200)
    (stage,) = write_stages("pairs", schedule, H200, False)
    point = schedule.nest.grid[-1].name
    assert f"_out + {point}," in stage.text
    assert f"({point} % 192) < 128" in stage.text
