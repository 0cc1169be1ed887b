"""Row CPU kernels: reductions along contiguous memory, with the SIMD loop inside the body.

Sums, norms, softmax, cross entropy. Each grid point is a row. Its reductions are made in passes
over the row, which stays in cache. Sums over the grid (weight gradients) are accumulated per thread
and combined.
"""

from __future__ import annotations

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import count_elements, size_hint
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import (
    Analysis,
    analyze_nest,
    count_passes,
    find_pass_roots,
    find_required_locals,
)
from fulgurite.fuser.schedule.cpu.base import (
    CpuSchedule,
    choose_simd_axis,
    contiguous_bytes_per_iteration,
)
from fulgurite.fuser.schedule.cpu.memory_traffic import (
    choose_prefetch_pass,
    find_nontemporal_stores,
)
from fulgurite.fuser.schedule.cpu.tile_cost import prefers_tiles
from fulgurite.fuser.schedule.loop_order import arrange_loops
from fulgurite.kernels.tuning import fuser_cpu as tuning


def why_not(nest: LoopNest) -> str | None:
    if not nest.body:
        return "it does not reduce"
    roles = {local.role for local in nest.locals.values()}
    reduces_grid = bool(roles & {"column_reduction", "full_reduction"})
    simd_axis = choose_simd_axis(nest, nest.axes)
    if simd_axis in nest.grid and not reduces_grid:
        assert simd_axis is not None, "an axis of the grid"
        body_axis = choose_simd_axis(nest, nest.body)
        across = contiguous_bytes_per_iteration(nest, simd_axis)
        if body_axis is None or contiguous_bytes_per_iteration(nest, body_axis) < across:
            return "memory is contiguous along the grid, not along the body"
    if not reduces_grid and prefers_tiles(nest):
        return "its rows are faster side by side"
    return None


def make_schedule(nest: LoopNest, device: DeviceInfo) -> CpuSchedule:
    nest = arrange_loops(nest, choose_simd_axis(nest, nest.body))
    simd_axis = nest.body[-1]
    analysis = analyze_nest(nest)
    passes = count_passes(nest, analysis)
    splits_body = can_split(nest, count_elements(tuple(a.size for a in nest.grid)), device)
    roots = [find_pass_roots(nest, analysis, step) for step in range(passes)]
    buffered = () if splits_body else choose_buffered_locals(nest, analysis, passes)
    return CpuSchedule(
        "rows",
        nest,
        simd_axis,
        passes=passes,
        splits_body=splits_body,
        buffered_locals=buffered,
        nontemporal_stores=find_nontemporal_stores(nest, simd_axis),
        prefetch_pass=None if splits_body else choose_prefetch_pass(nest, roots, buffered, device),
    )


def can_split(nest: LoopNest, tasks: int, device: DeviceInfo) -> bool:
    """Whether threads can split the body and should: few tasks, much work each, only row reductions."""
    points = count_elements(tuple(axis.size for axis in nest.axes))
    is_static = all(axis.size.is_constant for axis in nest.axes)
    # a block of a reduction has one partial result: rows in many short runs would have as many
    is_long = nest.body[-1].size.is_constant and (
        len(nest.body) == 1 or nest.body[-1].size.constant >= tuning.MIN_SPLIT_RUN
    )
    fills_device = tasks >= tuning.MIN_TASKS_PER_THREAD * device.num_cores
    if fills_device or points < tuning.MIN_SPLIT_POINTS or not is_static or not is_long:
        return False
    reductions = [x for x in nest.locals.values() if x.reduction]
    return all(x.role == "row_reduction" for x in reductions)


def choose_buffered_locals(
    nest: LoopNest, analysis: Analysis, passes: int, limit: int | None = None
) -> tuple[str, ...]:
    """Expensive values that several passes use, up to `limit` bytes (None: the default limit)."""
    room = tuning.MAX_ROW_BUFFER_BYTES if limit is None else limit
    if passes < 2 or not all(axis.size.is_constant for axis in nest.body):
        return ()
    uses: dict[str, set[int]] = {}
    for step in range(passes):
        for local in find_required_locals(nest, find_pass_roots(nest, analysis, step)):
            uses.setdefault(local.name, set()).add(step)
    points = 1
    for axis in nest.body:
        points *= size_hint(axis.size)
    buffered: list[str] = []
    for name, steps in uses.items():
        local = nest.locals[name]
        size = points * local.dtype.itemsize
        is_expensive = local.reduction is None and local.flops >= tuning.MIN_BUFFERED_FLOPS
        is_body_value = analysis.in_body[name] and not analysis.after_grid[name]
        if len(steps) > 1 and is_expensive and is_body_value and size <= room:
            buffered.append(name)
            room -= size
    return tuple(buffered)
