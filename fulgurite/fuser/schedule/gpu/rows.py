"""Row GPU kernels: reductions along contiguous memory.

In: a nest with a body, and a device. Out: its schedule, by the length of a row: several rows in a
block, one row in a block, a register-resident row, a row in a loop over blocks, a row split among
programs.
"""

from __future__ import annotations

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import Analysis, analyze_nest, count_passes, has_scan
from fulgurite.fuser.schedule.gpu.base import (
    GpuSchedule,
    choose_vector_axis,
    count_points,
    flatten_loops,
    max_itemsize,
    next_power_of_two,
    previous_power_of_two,
)
from fulgurite.fuser.schedule.gpu.peel import choose_peel_width
from fulgurite.fuser.schedule.gpu.register_resident import (
    ResidentBlocks,
    choose_small_blocks,
    count_partly_resident_blocks,
    count_resident_blocks,
)
from fulgurite.fuser.schedule.loop_order import arrange_loops
from fulgurite.fuser.schedule.online_reduction import (
    find_online_softmax,
    find_welford,
    mark_softmax_divisions,
    merge_online_passes,
)
from fulgurite.kernels.tuning import fuser_gpu as tuning


def schedule_rows(nest: LoopNest, device: DeviceInfo) -> GpuSchedule:
    nest = arrange_loops(nest, choose_vector_axis(nest, nest.body))
    nest = mark_softmax_divisions(flatten_loops(flatten_loops(nest, nest.grid), nest.body))
    analysis = analyze_nest(nest)
    (body,) = nest.body
    length, is_static = size_hint(body.size), body.size.is_constant
    split = schedule_split_rows(nest, analysis, device)
    if split is not None:
        return split
    block = next_power_of_two(length) if is_static else 0
    is_single_pass = count_passes(nest, analysis) == 1
    max_block = tuning.MAX_SINGLE_PASS_BLOCK if is_single_pass else tuning.MAX_ROW_BLOCK
    if not is_static or block > min(max_block, tuning.MAX_ROW_BLOCK):
        return schedule_looped_rows(nest, analysis)
    if block > tuning.MAX_WIDENED_ROW and can_recompute(nest):
        resident = schedule_resident_rows(nest, analysis)
        if resident is not None:
            return resident
    rows = 1
    if nest.grid:
        rows = max(1, tuning.MIN_ROW_BYTES // (block * max_itemsize(nest)))
        programs = tuning.MIN_PROGRAMS_PER_SM * device.num_cores
        while rows > 1 and count_points(nest.grid) < rows * programs:
            rows //= 2
    if rows == 1:
        if needs_peeling(nest):
            return schedule_peeled_rows(nest, analysis)
        num_warps = choose_row_warps(nest, length, block)
        return GpuSchedule("rows", nest, (body,), {body: block}, num_warps=num_warps)
    (grid,) = nest.grid
    sizes = {grid: rows, body: block}
    num_warps = choose_row_warps(nest, block * rows, block * rows)
    return GpuSchedule("rows", nest, (grid, body), sizes, num_warps=num_warps)


def schedule_split_rows(
    nest: LoopNest, analysis: Analysis, device: DeviceInfo
) -> GpuSchedule | None:
    """A split reduction, for a few long rows: programs store partials, a second kernel combines."""
    (body,) = nest.body
    welford, rows, length = find_welford(nest), count_points(nest.grid), size_hint(body.size)
    if rows * 2 > device.num_cores or rows * length < tuning.MIN_SPLIT_POINTS:
        return None
    if not can_split(nest, merge_online_passes(nest, analysis, welford)):
        return None
    wanted = min(device.num_cores * tuning.SPLITS_PER_SM // rows, length // tuning.MIN_SPLIT_ROW)
    if wanted < 2:
        return None
    splits = previous_power_of_two(wanted)
    max_block = tuning.WELFORD_SPLIT_ROW_BLOCK if welford else tuning.SPLIT_ROW_BLOCK
    block = min(max_block, next_power_of_two(-(-length // splits)))
    return GpuSchedule(
        "rows",
        nest,
        (body,),
        {body: block},
        is_looped=True,
        welford=welford,
        num_splits=splits,
        num_warps=max(1, block // tuning.SPLIT_ELEMENTS_PER_WARP),
    )


def schedule_looped_rows(nest: LoopNest, analysis: Analysis) -> GpuSchedule:
    """Rows in a loop over blocks: register-resident as far as they fit."""
    (body,) = nest.body
    online, welford = find_online_softmax(nest), find_welford(nest)
    merged = merge_online_passes(nest, analysis, online | welford)
    passes = count_passes(nest, merged)
    resident = schedule_resident_rows(nest, analysis) if passes > 1 else None
    if resident is not None:
        return resident
    # The second pass comes soon after the first: all threads on few rows, so that L2 still holds
    # them, and backwards, because L2 holds the end longest. softmax of 65536 float32 got 82 percent
    # of the copy on an H200 instead of 74, of 131072 bfloat16 76 instead of 70; norms 1 to 8
    # percent more (`benchmarks/sweep_rows.py`).
    block, num_warps = tuning.LOOPED_ROW_BLOCK, tuning.LOOPED_ROW_WARPS
    if passes > 1:
        block, num_warps = tuning.RESIDENT_BLOCK, tuning.RESIDENT_WARPS
    return GpuSchedule(
        "rows",
        nest,
        (body,),
        {body: block},
        is_looped=True,
        passes=passes,
        online_softmax=online,
        welford=welford,
        num_warps=num_warps,
        resident_blocks=count_partly_resident_blocks(
            nest, merged, passes, bool(online), bool(welford)
        ),
        alternates_direction=passes > 1 and body.size.is_constant and not has_scan(nest),
        online_group=choose_online_group(nest, online),
    )


def choose_online_group(nest: LoopNest, online: dict[str, str]) -> int:
    """Elements that share one running maximum and sum: those of a thread's access."""
    return max(tuning.ACCESS_BYTES // max_itemsize(nest), 1) if online else 1


def schedule_resident_rows(nest: LoopNest, analysis: Analysis) -> GpuSchedule | None:
    """A row that is loaded once, except for at most one block, and stays in registers."""
    (body,) = nest.body
    passes = count_passes(nest, analysis)
    count = count_resident_blocks(nest, analysis, passes)
    if not count:
        return None
    peel_width = choose_peel_width(nest, passes, count)
    blocks = ResidentBlocks(tuning.RESIDENT_BLOCK, tuning.RESIDENT_WARPS, peel_width, count)
    if peel_width and not reads_shared_vector(nest):
        blocks = choose_small_blocks(nest, analysis, passes)
    return GpuSchedule(
        "rows",
        nest,
        (body,),
        {body: blocks.block},
        is_looped=True,
        passes=passes,
        num_warps=blocks.num_warps,
        resident_blocks=blocks.count,
        peel_width=blocks.peel_width,
    )


def reads_shared_vector(nest: LoopNest) -> bool:
    """Is anything loaded along a row that all rows share, such as weights?"""
    (body,) = nest.body
    return any(
        body in index.axes() and not set(nest.axes) <= index.axes()
        for _, index, _ in nest.accesses()
    )


def needs_peeling(nest: LoopNest) -> bool:
    """Is a row of 16-bit elements unaligned, and cheap enough to recompute in every pass?"""
    sizes = [t.itemsize for t, index, _ in nest.accesses() if set(nest.axes) <= index.axes()]
    return min(sizes, default=4) == 2 and can_recompute(nest) and choose_peel_width(nest, 1) > 0


def can_recompute(nest: LoopNest) -> bool:
    """May values of a row be computed again? Not where memory changes meanwhile, or for a scan."""
    written = {t.name for t, _, stores in nest.accesses() if stores}
    is_updated = any(t.name in written for t, _, stores in nest.accesses() if not stores)
    flops = sum(x.flops for x in nest.locals.values())
    return flops <= tuning.MAX_RECOMPUTE_FLOPS and not is_updated and not has_scan(nest)


def schedule_peeled_rows(nest: LoopNest, analysis: Analysis) -> GpuSchedule:
    """A row in one aligned block, with its edges in another."""
    (body,) = nest.body
    passes, length = count_passes(nest, analysis), size_hint(body.size)
    peel_width = choose_peel_width(nest, passes)
    block = next_power_of_two(length // peel_width * peel_width)
    return GpuSchedule(
        "rows",
        nest,
        (body,),
        {body: block},
        is_looped=True,
        passes=passes,
        num_warps=choose_row_warps(nest, length, block),
        resident_blocks=1,
        peel_width=peel_width,
    )


def choose_row_warps(nest: LoopNest, elements: int, block: int) -> int:
    """About 32 elements a thread, fewer where its registers can't hold all that is loaded."""
    body = set(nest.body)
    reads = {(t.name, i) for t, i, stores in nest.accesses() if not stores and body & i.axes()}
    num_warps = previous_power_of_two(elements // tuning.ELEMENTS_PER_WARP)
    num_warps = max(1, min(tuning.MAX_WARPS, num_warps))
    while num_warps < tuning.MAX_ROW_WARPS:
        values = block // (tuning.WARP_SIZE * num_warps) * len(reads)
        if values <= tuning.MAX_VALUES_PER_THREAD:
            break
        num_warps *= 2
    return num_warps


def can_split(nest: LoopNest, analysis: Analysis) -> bool:
    """Whether programs can reduce parts of the body independently: one pass, no scans."""
    return not has_scan(nest) and count_passes(nest, analysis) == 1
