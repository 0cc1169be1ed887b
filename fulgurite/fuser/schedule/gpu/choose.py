"""Which GPU schedule a loop nest gets.

In: a loop nest and a device. Out: a `GpuSchedule`: the nest with at most three grid loops and one
body loop, and every decision. Decisions depend on sizes and dtypes alone, never on a clock, so that
they are the same every time.

    pointwise    one block of neighbouring points a program; short loops that select are unrolled
    transpose    square tiles, where loads and stores are contiguous along different axes
    rows         reductions along contiguous memory: a program holds one or several rows in
                 registers; longer rows are iterated in blocks, with online softmax and Welford
    columns      reductions across contiguous memory: neighbouring grid points side by side
    persistent   the grid is reduced too (weight gradients): a fixed number of programs iterates
                 over all rows and stores partials, which a second kernel (`combine`) adds in a
                 fixed order
"""

from __future__ import annotations

from collections.abc import Callable

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.gpu.base import GpuSchedule, choose_vector_axis, contiguous_bytes
from fulgurite.fuser.schedule.gpu.columns import schedule_columns
from fulgurite.fuser.schedule.gpu.persistent import schedule_persistent
from fulgurite.fuser.schedule.gpu.pointwise import schedule_pointwise, schedule_transpose
from fulgurite.fuser.schedule.gpu.row_program import schedule_row_program
from fulgurite.fuser.schedule.gpu.rows import schedule_rows
from fulgurite.fuser.schedule.gpu.shared_memory import estimate_shared_bytes
from fulgurite.fuser.schedule.gpu.smaller import smaller_schedule
from fulgurite.fuser.schedule.gpu.unroll import unroll_select_loops
from fulgurite.kernels.tuning import fuser_gpu as tuning


def choose_gpu_schedule(nest: LoopNest, device: DeviceInfo) -> GpuSchedule:
    """The fastest schedule that the device's shared memory has room for."""
    schedule = _choose_fastest(nest, device)
    while estimate_shared_bytes(schedule) > device.shared_memory_bytes:
        smaller = smaller_schedule(schedule, device)
        if smaller is None:  # the estimate is an upper one: the compiler decides
            break
        schedule = smaller
    return schedule


def _choose_fastest(nest: LoopNest, device: DeviceInfo) -> GpuSchedule:
    if nest.is_row_program:
        return schedule_row_program(nest, device)
    if not nest.body and not any(local.reduction for local in nest.locals.values()):
        if all(store.combine is None for store in nest.stores):
            nest = unroll_select_loops(nest, device)
        return schedule_transpose(nest) or schedule_pointwise(nest, device)
    if any(x.role in ("column_reduction", "full_reduction") for x in nest.locals.values()):
        return schedule_persistent(nest, device)
    along, across = (choose_vector_axis(nest, axes) for axes in (nest.body, nest.grid))
    if along is None:
        return schedule_columns(nest, device)
    if across is not None and contiguous_bytes(nest, along) < contiguous_bytes(nest, across):
        return schedule_columns(nest, device)
    return schedule_rows(nest, device)


def make_row_limit(device: DeviceInfo) -> Callable[[int, bool, bool], int]:
    """The longest row, in float32 bytes, that segmentation may read again or sum over rows."""

    def row_limit(rows: int, summed: bool, across: bool) -> int:
        if summed:
            return 4 * tuning.MAX_GRID_SUM_ROW
        rows_per_program = tuning.MIN_ROWS_SIDE_BY_SIDE if across else 1
        # a few long rows don't fill the device: kernels of their own split the reduction
        programs = rows // rows_per_program
        needed = 1 if across else tuning.MIN_PROGRAMS_PER_SM
        if programs >= needed * device.num_cores:
            return tuning.MAX_ROW_REREAD_BYTES
        return 4 * tuning.MAX_ROW_BLOCK // rows_per_program

    return row_limit
