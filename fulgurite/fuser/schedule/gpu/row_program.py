"""Row-program GPU kernels: sorts, with what comes before and after them in each row.

In: a nest that is a row program. Out: its schedule: a program holds a few rows, and every value of
them, in registers. All loops of a row are padded to powers of two.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Local, LoopNest
from fulgurite.fuser.schedule.gpu.base import (
    GpuSchedule,
    count_points,
    flatten_loops,
    next_power_of_two,
)
from fulgurite.kernels.tuning import fuser_gpu as tuning


def schedule_row_program(nest: LoopNest, device: DeviceInfo) -> GpuSchedule:
    nest = flatten_loops(nest, nest.grid)
    if not nest.grid:
        nest = replace(nest, grid=(Axis("row", indices.ONE),))
    if not all(axis.size.is_constant for axis in nest.body):
        raise Unsupported("a sort with a loop of dynamic size on a GPU")
    if any(s.rank is not None and s.expression.dtype == torch.int64 for s in nest.locals.values()):
        raise Unsupported("a sort of 64-bit values on a GPU")
    sizes = {axis: next_power_of_two(size_hint(axis.size)) for axis in nest.body}
    points = max((count_block_points(step, sizes) for step in nest.locals.values()), default=1)
    (grid,) = nest.grid
    rows = max(1, tuning.ROW_PROGRAM_POINTS // points)
    while rows > 1 and count_points(nest.grid) < rows * device.num_cores:
        rows //= 2
    sizes[grid] = rows
    num_warps = rows * points // tuning.ROW_PROGRAM_POINTS_PER_WARP
    num_warps = max(1, min(tuning.MAX_ROW_PROGRAM_WARPS, num_warps))
    return GpuSchedule("row_program", nest, (grid,), sizes, num_warps=num_warps)


def count_block_points(step: Local, sizes: dict[Axis, int]) -> int:
    """Points of a step in one row, padded: of an argsort, keys or ranks, whichever are more."""

    def count(axes: tuple[Axis, ...]) -> int:
        total = 1
        for axis in axes:
            total *= sizes[axis]
        return total

    if step.rank is None:
        return count((*step.axes, *step.reduced_axes))
    ranked = step.rank.axes()
    keys = tuple(axis for axis in step.axes if axis not in ranked)
    return max(count(step.axes), count((*keys, *step.reduced_axes)))
