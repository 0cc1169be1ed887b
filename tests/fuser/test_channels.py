"""Kernels of batch norms over channels that lie side by side: what they read, and how rows go together on a GPU."""

from __future__ import annotations

import pytest
import torch

from fulgurite.device import Device
from fulgurite.fuser.codegen.triton.module import write_stages
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, row_limit
from fulgurite.fuser.segment import segment
from fulgurite.fuser.segment.build_loop_nest import build
from tests.fuser.support import fused, trace

H200 = Device("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))
HALF = torch.bfloat16


def gradient(g, x, mean, rstd, weight, bias):
    """Of a relu behind a batch norm, its mask computed from x: sums over rows, then every point."""
    centred = (x.float() - mean) * rstd
    passed = torch.where((centred * weight + bias).bfloat16() <= 0, 0.0, g).bfloat16()
    total = passed.float().sum(0)
    along = (passed.float() * (x.float() - mean)).sum(0)
    rows = x.shape[0]
    back = passed.float() - (x.float() - mean) * (along / rows * rstd * rstd) - total / rows
    return (back * rstd * weight).bfloat16(), total, along * rstd


def arguments(rows: int, channels: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    large = [torch.randn(rows, channels).to(HALF) for _ in range(2)]
    return (*large, *(torch.rand(channels) + 0.5 for _ in range(4)))


def segments(rows: int, channels: int):
    region = split_axes.refine(lower_graph.read(trace(gradient, arguments(rows, channels))))
    return region, segment(region, row_limit(H200))


def test_both_kernels_read_two_tensors() -> None:
    """g and x for the sums; g and x for the gradient, which is written: nothing lies between them."""
    region, parts = segments(65536, 64)
    unit = 65536 * 64 * 2
    large = []
    for part in parts:
        members = part.shape.facts
        read = {r.name for f in members.values() for r in f.readings} - members.keys()
        names = [*read, *part.stored]
        large.append(sum(region.tensors[n].dtype.itemsize * 65536 * 64 // unit for n in names
                         if len(region.tensors[n].sizes) == 2))  # fmt: skip
    assert sorted(n for n in large if n) == [2, 3]


@pytest.mark.parametrize("channels", [64, 128, 256, 1024])
def test_rows_go_together(channels: int) -> None:
    """A line of 128 bytes of many rows: what rows have in common is read once by a thread."""
    region, parts = segments(65536, channels)
    schedule = choose_gpu_schedule(build(region, parts[-1]), H200)
    assert schedule.kind == "pointwise"
    rows, columns = (schedule.sizes[axis] for axis in schedule.blocks)
    assert columns == 64 and rows >= 32
    (stage,) = write_stages("kernel", schedule, H200, False)
    assert stage.grid[0].constant == 65536 // rows * (channels // 64)


def test_odd_channels_stay_in_one_row_of_points() -> None:
    """Of 65 channels a second block of 64 would be nearly empty."""
    region, parts = segments(65536, 65)
    assert len(choose_gpu_schedule(build(region, parts[-1]), H200).blocks) == 1


@pytest.mark.parametrize("rows, channels", [(1000, 64), (37, 128), (129, 62), (5, 3)])
def test_values(rows: int, channels: int) -> None:
    fused(gradient, *arguments(rows, channels))
