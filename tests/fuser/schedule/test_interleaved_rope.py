"""Interleaved RoPE (channel pairs): points are accessed contiguously, on a GPU too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.device import DeviceInfo
from fulgurite.fuser.codegen.triton.kernel import write_kernels
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, make_row_limit
from fulgurite.fuser.segment import segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from tests.fuser.support import check_fused, trace

H200 = DeviceInfo("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, first: int) -> Tensor:
    """Rotates the channels from `first` on, in pairs of neighbors, and keeps those before."""
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
def test_interleaved_rope(rows: int, heads: int, channels: int, first: int) -> None:
    given = arguments(rows, heads, channels, first, torch.float32)
    check_fused(lambda x, cos, sin: apply_rope(x, cos, sin, first), *given)


def test_interleaved_rope_backward() -> None:
    def backward(g, cos, sin):
        x = torch.zeros_like(g, requires_grad=True)
        return torch.autograd.grad(apply_rope(x, cos, sin, 8), x, g)[0]

    g, cos, sin = arguments(3, 4, 20, 8, torch.float32)
    with torch.enable_grad():
        want = backward(g, cos, sin)

    def by_hand(g, cos, sin):
        a, b = g[..., 8::2], g[..., 9::2]
        both = torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)
        return torch.cat((g[..., :8], both), -1)

    torch.testing.assert_close(by_hand(g, cos, sin), want)
    check_fused(by_hand, g, cos, sin)


def test_stores_and_copies_are_contiguous() -> None:
    """The store, and the load of unrotated channels, are 16 bytes per thread."""
    given = arguments(2048, 128, 192, 128)
    region = split_axes(lower_graph(trace(lambda x, cos, sin: apply_rope(x, cos, sin, 128), given)))
    (part,) = segment_region(region, make_row_limit(H200))
    schedule = choose_gpu_schedule(build_loop_nest(region, part), H200)
    (stage,) = write_kernels("pairs", schedule, False)
    point = schedule.nest.grid[-1].name
    assert f"_out + {point}," in stage.text
    assert f"({point} % 192) < 128" in stage.text
