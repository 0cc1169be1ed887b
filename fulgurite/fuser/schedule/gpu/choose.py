"""GPU schedules: how a nest becomes blocks, programs and passes.

In: a nest and what is known of the device. Out: a `GpuSchedule`: the nest with at most three grid loops
and one body loop, and every decision. Code generators only spell it. Decisions depend on sizes and
dtypes alone, never on a clock, so that they are the same every time.

    pointwise   one block of neighbouring points a program; a short loop that chooses is written out
    transpose   square tiles, where reads and writes are contiguous along different loops
    rows        reductions along contiguous memory: a row, or several, held in registers by a program;
                longer rows are walked in blocks, maximum and sum of exponentials in one walk
    columns     reductions across contiguous memory: neighbouring grid points side by side
    walking     where the grid is summed too (weight gradients): a fixed number of programs walks all
                rows, leaves its sums in memory, and a second kernel adds them in a fixed order
"""

from __future__ import annotations

from collections.abc import Callable

from fulgurite.device import Device
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.gpu.base import GpuSchedule, joined, runs, vector_axis
from fulgurite.fuser.schedule.gpu.pointwise import pointwise, tiled
from fulgurite.fuser.schedule.gpu.reductions import (
    MOST_HELD,
    MOST_SUMMED,
    columns,
    finishing,
    rows,
    walking,
)
from fulgurite.fuser.schedule.gpu.unroll import unrolled
from fulgurite.fuser.schedule.online_reduction import replaced_waits

MOST_WALKED = 1 << 20  # bytes of float32 of a row that is walked again, from the second level cache
SIDE_BY_SIDE = 16  # rows across memory that a program has at the least: whole sectors of 32 bytes


def choose_gpu_schedule(nest: Nest, device: Device) -> GpuSchedule:
    if not nest.body and not any(local.reduction for local in nest.locals.values()):
        nest = unrolled(nest, device)
        return tiled(nest) or pointwise(nest, device)
    over_grid = any(x.role in ("colsum", "scalar") for x in nest.locals.values())
    if over_grid:
        return walking(nest, device)
    along, across = (vector_axis(nest, axes) for axes in (nest.body, nest.grid))
    if along is None or (across is not None and runs(nest, along) < runs(nest, across)):
        return columns(nest, device)
    return rows(nest, device)


def row_limit(device: Device) -> Callable[[int, bool, bool], int]:
    """How long rows may be to be walked again, in bytes of float32, and to be added up over rows."""

    def limit(rows: int, summed: bool, across: bool) -> int:
        if summed:
            return 4 * MOST_SUMMED
        together = SIDE_BY_SIDE if across else 1
        # long rows that are few don't fill the device: kernels of their own reduce them in parts
        filled = rows // together >= (device.threads if across else 2 * device.threads)
        return MOST_WALKED if filled else 4 * MOST_HELD // together

    return limit


__all__ = [
    "GpuSchedule",
    "choose_gpu_schedule",
    "finishing",
    "joined",
    "replaced_waits",
    "row_limit",
]
