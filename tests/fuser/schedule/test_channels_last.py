"""Batch norm over channels_last tensors on a GPU: bytes read, and rows per block."""

from __future__ import annotations

import pytest
import torch

from fulgurite.device import DeviceInfo
from fulgurite.fuser.codegen.triton.kernel import write_kernels
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, make_row_limit
from fulgurite.fuser.segment import segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from tests.fuser.support import check_fused, trace

RUNS_ON_TRITON = True

H200 = DeviceInfo("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))
HALF = torch.bfloat16


def batch_norm_relu_backward(g, x, mean, rstd, weight, bias):
    """Gradient of relu(batch_norm(x)); the mask is recomputed from x."""
    centered = (x.float() - mean) * rstd
    relu_grad = torch.where((centered * weight + bias).bfloat16() <= 0, 0.0, g).bfloat16()
    total = relu_grad.float().sum(0)
    weighted_sum = (relu_grad.float() * (x.float() - mean)).sum(0)
    rows = x.shape[0]
    grad = (
        relu_grad.float() - (x.float() - mean) * (weighted_sum / rows * rstd * rstd) - total / rows
    )
    return (grad * rstd * weight).bfloat16(), total, weighted_sum * rstd


def arguments(rows: int, channels: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    large = [torch.randn(rows, channels).to(HALF) for _ in range(2)]
    return (*large, *(torch.rand(channels) + 0.5 for _ in range(4)))


def segment_gradient(rows: int, channels: int):
    region = split_axes(lower_graph(trace(batch_norm_relu_backward, arguments(rows, channels))))
    return region, segment_region(region, make_row_limit(H200))


def test_both_kernels_read_two_tensors() -> None:
    """The first reads g and x for the sums; the second reads g and x and writes the gradient."""
    region, parts = segment_gradient(65536, 64)
    unit = 65536 * 64 * 2
    large = []
    for part in parts:
        members = part.structure.statements
        read = {r.name for f in members.values() for r in f.reads} - members.keys()
        names = [*read, *part.stored]
        large.append(sum(region.tensors[n].dtype.itemsize * 65536 * 64 // unit for n in names
                         if len(region.tensors[n].sizes) == 2))  # fmt: skip
    assert sorted(n for n in large if n) == [2, 3]


@pytest.mark.parametrize("channels", [64, 128, 256, 1024])
def test_blocks_have_many_rows_of_128_bytes(channels: int) -> None:
    """A thread loads values that all rows share once."""
    region, parts = segment_gradient(65536, channels)
    schedule = choose_gpu_schedule(build_loop_nest(region, parts[-1]), H200)
    assert schedule.kind == "pointwise"
    rows, columns = (schedule.block_sizes[axis] for axis in schedule.block_axes)
    assert columns == 64 and rows >= 32
    (stage,) = write_kernels("kernel", schedule, False)
    assert stage.grid[0].constant == 65536 // rows * (channels // 64)


def test_odd_channels_use_flat_blocks() -> None:
    """With 65 channels, a second block of 64 would be nearly empty."""
    region, parts = segment_gradient(65536, 65)
    assert len(choose_gpu_schedule(build_loop_nest(region, parts[-1]), H200).block_axes) == 1


@pytest.mark.parametrize("rows, channels", [(1000, 64), (37, 128), (129, 62), (5, 3)])
def test_values(rows: int, channels: int) -> None:
    check_fused(batch_norm_relu_backward, *arguments(rows, channels))
