"""Persistent GPU kernels, which also reduce over the grid, and the kernel that combines partials.

In: a nest with reductions over the grid (weight gradients, totals), and a device. Out: a schedule
with a fixed number of programs, each with partial sums of its own over many rows.
`schedule_combine` gives the schedule of the second kernel, which adds the partials in a fixed
order.
"""

from __future__ import annotations

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import analyze_nest, count_passes
from fulgurite.fuser.schedule.gpu.base import (
    GpuSchedule,
    choose_vector_axis,
    count_points,
    flatten_loops,
    max_itemsize,
    next_power_of_two,
    previous_power_of_two,
)
from fulgurite.fuser.schedule.gpu.rows import can_recompute, choose_online_group
from fulgurite.fuser.schedule.loop_order import arrange_loops
from fulgurite.fuser.schedule.online_reduction import (
    find_online_softmax,
    find_welford,
    mark_softmax_divisions,
    merge_online_passes,
)
from fulgurite.kernels.tuning import fuser_gpu as tuning


def schedule_persistent(nest: LoopNest, device: DeviceInfo) -> GpuSchedule:
    nest = arrange_loops(nest, choose_vector_axis(nest, nest.body) if nest.body else None)
    nest = mark_softmax_divisions(flatten_loops(flatten_loops(nest, nest.grid), nest.body))
    (grid,) = nest.grid
    if not nest.body:
        block = tuning.PERSISTENT_POINTWISE_BLOCK
        max_programs = tuning.MAX_PERSISTENT_PROGRAMS_PER_SM * device.num_cores
        programs = max(1, min(max_programs, -(-count_points(nest.grid) // block)))
        return GpuSchedule(
            "persistent",
            nest,
            (grid,),
            {grid: block},
            num_programs=previous_power_of_two(programs),
        )
    (body,) = nest.body
    block = next_power_of_two(size_hint(body.size)) if body.size.is_constant else 0
    max_block = tuning.MAX_GRID_SUM_ROW if _sums_rows(nest) else tuning.MAX_ROW_BLOCK
    if not block or block > max_block:
        return schedule_looped_persistent(nest, device)
    return _schedule_single_block(nest, device, block)


def _sums_rows(nest: LoopNest) -> bool:
    """Does a program hold a sum over rows for every point of a row?"""
    return any(x.role == "column_reduction" for x in nest.locals.values())


def schedule_looped_persistent(nest: LoopNest, device: DeviceInfo) -> GpuSchedule:
    """Long rows, each in a loop over blocks."""
    (body,) = nest.body
    online, welford = find_online_softmax(nest), find_welford(nest)
    merged = merge_online_passes(nest, analyze_nest(nest), online | welford)
    max_programs = tuning.MAX_SCALAR_PARTIALS
    if _sums_rows(nest):
        max_programs = tuning.MAX_PERSISTENT_PROGRAMS_PER_SM * device.num_cores
    return GpuSchedule(
        "persistent",
        nest,
        (body,),
        {body: tuning.PERSISTENT_ROW_BLOCK},
        is_looped=True,
        passes=count_passes(nest, merged),
        online_softmax=online,
        welford=welford,
        num_programs=divide_rows(count_points(nest.grid), max_programs),
        num_warps=tuning.PERSISTENT_ROW_WARPS,
        online_group=choose_online_group(nest, online),
    )


def _schedule_single_block(nest: LoopNest, device: DeviceInfo, block: int) -> GpuSchedule:
    """Rows that fit in a block, several of them where they are short."""
    (grid,), (body,) = nest.grid, nest.body
    count = count_points(nest.grid)
    rows = min(tuning.MIN_ROW_BYTES // (block * max_itemsize(nest)), next_power_of_two(count))
    rows = max(1, rows)
    row_blocks = -(-count // rows)
    low, high = tuning.SHORT_ROW_BYTES
    is_short = low < block * max(_row_reads(nest).values(), default=0) <= high
    if _sums_rows(nest) and rows > 1 and is_short:
        return _schedule_short_rows(nest, device, block, rows)
    if _sums_rows(nest):
        programs, num_stages = choose_persistent_programs(nest, device, rows)
        programs = min(programs, row_blocks)
    else:
        programs, num_stages = divide_rows(row_blocks, tuning.MAX_SCALAR_PARTIALS), 1
    is_long = block > tuning.MAX_REMATERIALIZE_FREE_ROW
    max_warps = tuning.MAX_WARPS if is_long else tuning.MAX_PERSISTENT_WARPS
    num_warps = max(1, min(max_warps, block * rows // tuning.PERSISTENT_ELEMENTS_PER_WARP))
    has_narrow = any(t.itemsize == 2 for t, _, _ in nest.accesses())
    rematerializes = _sums_rows(nest) and is_long and has_narrow and can_recompute(nest)
    return GpuSchedule(
        "persistent",
        nest,
        (body,) if rows == 1 else (grid, body),
        {body: block} if rows == 1 else {grid: rows, body: block},
        passes=count_passes(nest, analyze_nest(nest)) if rematerializes else 1,
        num_programs=programs,
        num_warps=num_warps,
        num_stages=max(num_stages, 3) if rematerializes else num_stages,
        rematerializes=rematerializes,
    )


def _schedule_short_rows(nest: LoopNest, device: DeviceInfo, block: int, rows: int) -> GpuSchedule:
    """Several rows side by side, with sums over rows (norms of heads): not pipelined.

    Values that are loaded into registers keep the layout of their loads: rows of up to a warp's
    accesses lie within a warp, and their reductions need no barrier. Through the shared memory of a
    pipeline, Triton chooses another layout: an element a thread, and all warps in every row. Loads are
    hidden by other programs of the SM instead.
    """
    (grid,), (body,) = nest.grid, nest.body
    access_bytes = tuning.WARP_SIZE * tuning.ACCESS_BYTES  # of a warp
    row_bytes = block * max_itemsize(nest)
    num_warps = max(1, rows * row_bytes // (access_bytes * tuning.SHORT_ROW_ACCESSES))
    values = len(_row_reads(nest)) + sum(x.role == "column_reduction" for x in nest.locals.values())
    values += tuning.MASK_VALUES * (size_hint(body.size) < block)
    values += tuning.SHARED_ROW_VALUES * (row_bytes > access_bytes)
    points_per_thread = block * rows // (num_warps * tuning.WARP_SIZE)
    registers = tuning.BASE_REGISTERS + points_per_thread * values
    resident = tuning.REGISTERS_PER_SM // (registers * num_warps * tuning.WARP_SIZE)
    least, most = tuning.SHORT_ROW_PROGRAMS_PER_SM
    programs_per_sm = max(least, min(resident, most))
    row_blocks = -(-count_points(nest.grid) // rows)
    return GpuSchedule(
        "persistent",
        nest,
        (grid, body),
        {grid: rows, body: block},
        num_programs=divide_rows(row_blocks, programs_per_sm * device.num_cores),
        num_warps=num_warps,
    )


def _row_reads(nest: LoopNest) -> dict[tuple[str, Index], int]:
    """The reads of every point of every row, with the bytes of an element."""
    reads = {(t.name, i): t.itemsize for t, i, stores in nest.accesses() if not stores}
    return {key: size for key, size in reads.items() if set(nest.axes) <= key[1].axes()}


def choose_persistent_programs(nest: LoopNest, device: DeviceInfo, rows: int) -> tuple[int, int]:
    """Programs, and pipeline stages of each: more of both for short rows."""
    row_bytes = max(sum(_row_reads(nest).values()) * rows * count_points(nest.body), 1)
    for limit, programs_per_sm, num_stages in tuning.PERSISTENT_STAGES:
        if row_bytes <= limit:
            if programs_per_sm == 1:
                return device.num_cores, num_stages
            return previous_power_of_two(programs_per_sm * device.num_cores), num_stages
    return device.num_cores, 1


def divide_rows(count: int, max_programs: int) -> int:
    """Programs, at most so many, that have the same number of rows but for the last."""
    rows_per_program = -(-count // max_programs)
    return max(1, -(-count // max(rows_per_program, 1)))


def schedule_combine(nest: LoopNest, partials: Axis) -> GpuSchedule:
    """The small kernel that adds up partials, along the axis `partials`."""
    count = size_hint(partials.size)
    if not nest.grid:
        block = min(next_power_of_two(count), tuning.COMBINE_SCALAR_BLOCK)
        return GpuSchedule(
            "combine",
            nest,
            (partials,),
            {partials: block},
            is_looped=block < count,
            num_warps=tuning.COMBINE_WARPS,
        )
    (grid,) = nest.grid
    width = min(tuning.COMBINE_WIDTH, next_power_of_two(size_hint(grid.size)))
    depth = min(next_power_of_two(count), tuning.COMBINE_DEPTH)
    is_large = width * depth >= tuning.MIN_LARGE_COMBINE
    num_warps = tuning.LARGE_COMBINE_WARPS if is_large else tuning.COMBINE_WARPS
    return GpuSchedule(
        "combine",
        nest,
        (partials, grid),
        {partials: depth, grid: width},
        is_looped=depth < count,
        num_warps=num_warps,
    )
