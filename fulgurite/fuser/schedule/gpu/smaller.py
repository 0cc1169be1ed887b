"""The next schedule of a GPU kernel: the same loops with fewer resources of the device.

In: a schedule that needs too much (shared memory, registers, threads) or that can't be compiled. Out: a
smaller one: fewer pipeline stages, then smaller blocks, then rows in a loop over blocks instead of whole
rows. None where nothing is left to make smaller. `choose_gpu_schedule` takes such steps until the estimate
fits the device; a region whose kernel fails nevertheless takes more of them.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.schedule.analysis import analyze_nest, count_passes
from fulgurite.fuser.schedule.gpu.base import GpuSchedule
from fulgurite.fuser.schedule.gpu.persistent import schedule_looped_persistent
from fulgurite.fuser.schedule.gpu.rows import schedule_looped_rows
from fulgurite.fuser.schedule.gpu.shared_memory import count_block_points
from fulgurite.kernels.tuning import fuser_gpu as tuning

KINDS = ("pointwise", "transpose", "rows", "columns", "persistent")  # that can be made smaller
MIN_BLOCK_POINTS = 32  # of a block: one element for each thread of a warp


def smaller_schedule(schedule: GpuSchedule, device: DeviceInfo) -> GpuSchedule | None:
    """The schedule with the next smaller need of resources; None if there is none."""
    if schedule.kind not in KINDS:
        return None
    if schedule.num_stages > 1:
        return replace(schedule, num_stages=schedule.num_stages - 1)
    return _halve_block(schedule) or _loop_over_blocks(schedule, device)


def _halve_block(schedule: GpuSchedule) -> GpuSchedule | None:
    """The schedule with half of its largest block that may be smaller."""
    axes = [axis for axis in schedule.block_axes if _can_halve(schedule, axis)]
    if not axes or count_block_points(schedule, schedule.block_axes) <= MIN_BLOCK_POINTS:
        return None
    largest = max(axes, key=lambda axis: schedule.block_sizes[axis])
    sizes = {a: n // 2 if a == largest else n for a, n in schedule.block_sizes.items()}
    return _limit_warps(replace(schedule, block_sizes=sizes))


def _can_halve(schedule: GpuSchedule, axis: Axis) -> bool:
    """Whether the loop's block may be smaller: not if it must hold the whole loop, or is resident."""
    is_whole = not schedule.is_looped or schedule.resident_blocks > 0
    if axis in schedule.nest.body and is_whole:
        return False
    return schedule.block_sizes[axis] > max(1, schedule.online_group, schedule.peel_width)


def _loop_over_blocks(schedule: GpuSchedule, device: DeviceInfo) -> GpuSchedule | None:
    """Rows in a loop over blocks, if the schedule holds them whole or in part."""
    if not schedule.nest.body or (schedule.is_looped and not schedule.resident_blocks):
        return None
    if schedule.kind == "persistent":
        return schedule_looped_persistent(schedule.nest, device)
    if schedule.kind == "rows":
        looped = schedule_looped_rows(schedule.nest, analyze_nest(schedule.nest))
        return replace(looped, resident_blocks=0, peel_width=0)
    if schedule.kind == "columns":
        (body,) = schedule.nest.body
        points = count_block_points(schedule, schedule.block_axes)
        height = schedule.block_sizes[body] * tuning.MAX_COLUMN_BLOCK_POINTS // points
        if not 1 <= height < schedule.block_sizes[body]:
            return None
        passes = count_passes(schedule.nest, analyze_nest(schedule.nest))
        sizes = {**schedule.block_sizes, body: height}
        return _limit_warps(replace(schedule, block_sizes=sizes, is_looped=True, passes=passes))
    return None


def _limit_warps(schedule: GpuSchedule) -> GpuSchedule:
    """At most as many warps as have an element for each thread."""
    most = max(1, count_block_points(schedule, schedule.block_axes) // tuning.WARP_SIZE)
    return replace(schedule, num_warps=min(schedule.num_warps, most))
