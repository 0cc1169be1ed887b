"""Column GPU kernels: reductions across contiguous memory.

In: a nest with a body, and a device. Out: its schedule: neighbouring grid points side by side, the
body from top to bottom.
"""

from __future__ import annotations

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import Analysis, analyze_nest, count_passes
from fulgurite.fuser.schedule.gpu.base import (
    GpuSchedule,
    choose_vector_axis,
    count_points,
    flatten_loops,
    max_itemsize,
    next_power_of_two,
    previous_power_of_two,
)
from fulgurite.fuser.schedule.gpu.rows import can_split
from fulgurite.fuser.schedule.loop_order import arrange_loops
from fulgurite.fuser.schedule.online_reduction import (
    find_online_softmax,
    find_welford,
    mark_softmax_divisions,
    merge_online_passes,
)
from fulgurite.kernels.tuning import fuser_gpu as tuning


def schedule_columns(nest: LoopNest, device: DeviceInfo) -> GpuSchedule:
    nest = arrange_loops(nest, choose_vector_axis(nest, nest.grid))
    nest = mark_softmax_divisions(flatten_loops(flatten_loops(nest, nest.grid[:-1]), nest.body))
    analysis, welford, online = analyze_nest(nest), find_welford(nest), find_online_softmax(nest)
    with_welford = merge_online_passes(nest, analysis, welford)
    (body,) = nest.body
    inner, outer = nest.grid[-1], count_points(nest.grid[:-1])
    height = size_hint(body.size)
    block_width = _choose_width(nest, with_welford, device)
    block_height = max(
        1, min(next_power_of_two(height), tuning.MAX_COLUMN_BLOCK_POINTS // block_width)
    )
    width = size_hint(inner.size)
    # short columns: a program takes more of them, or it has next to nothing to do
    while block_height * block_width < tuning.MIN_COLUMN_BLOCK_POINTS:
        if _underfills(outer, width, 4 * block_width, device):
            break
        block_width *= 2
    block_width = min(block_width, next_power_of_two(width))
    is_looped = not body.size.is_constant or block_height < height
    if is_looped and count_passes(nest, analysis) > 1 and body.size.is_constant:
        if block_width * next_power_of_two(height) <= tuning.MAX_ROW_BLOCK:
            block_height, is_looped = next_power_of_two(height), False
    sizes = {body: block_height, inner: block_width}
    if not is_looped:
        num_warps = block_height * block_width // tuning.ELEMENTS_PER_WARP
        num_warps = max(1, min(tuning.MAX_WARPS, num_warps))
        return GpuSchedule("columns", nest, (body, inner), sizes, num_warps=num_warps)
    passes = count_passes(nest, merge_online_passes(nest, analysis, online | welford))
    tasks = outer * -(-width // block_width)
    per_warp = tuning.WELFORD_ELEMENTS_PER_WARP if welford else tuning.ELEMENTS_PER_WARP
    return GpuSchedule(
        "columns",
        nest,
        (body, inner),
        sizes,
        is_looped=True,
        passes=passes,
        online_softmax=online,
        welford=welford,
        num_splits=_choose_splits(nest, with_welford, tasks, block_height, device),
        num_warps=max(1, min(tuning.MAX_WARPS, block_height * block_width // per_warp)),
        num_stages=tuning.COLUMN_STAGES if passes == 1 else 1,
    )


def _choose_width(nest: LoopNest, analysis: Analysis, device: DeviceInfo) -> int:
    """Columns of a block: a cache line, fewer where SMs lack work and the body can't be split."""
    itemsize, width = max_itemsize(nest), size_hint(nest.grid[-1].size)
    outer = count_points(nest.grid[:-1])
    block = max(tuning.CACHE_LINE_BYTES // itemsize, tuning.MIN_COLUMN_WIDTH)
    block = min(block, next_power_of_two(width))
    if count_passes(nest, analysis) > 1:
        while block * itemsize > tuning.SECTOR_BYTES and _underfills(outer, width, block, device):
            block //= 2
    return block


def _underfills(outer: int, width: int, block_width: int, device: DeviceInfo) -> bool:
    """Do blocks of so many columns leave SMs without work?"""
    return outer * -(-width // block_width) < tuning.MIN_PROGRAMS_PER_SM * device.num_cores


def _choose_splits(
    nest: LoopNest, analysis: Analysis, tasks: int, block_height: int, device: DeviceInfo
) -> int:
    """Splits of the body, so that few columns still fill the device; 0 for no split."""
    if not can_split(nest, analysis):
        return 0
    height = size_hint(nest.body[0].size)
    wanted = device.num_cores * tuning.SPLITS_PER_SM // max(tasks, 1)
    wanted = min(wanted, height // (2 * block_height))
    return previous_power_of_two(wanted) if wanted >= 2 else 0
