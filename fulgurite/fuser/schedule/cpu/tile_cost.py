"""Whether rows are reduced side by side: estimated cycles of both ways.

In: the nest of a row kernel. Out: whether a column kernel with transposed tiles takes less time.
"""

from __future__ import annotations

from fulgurite.fuser.ir.cost import count_elements, size_hint
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import (
    analyze_nest,
    count_passes,
    find_pass_roots,
    find_required_locals,
)
from fulgurite.fuser.schedule.cpu.base import choose_simd_axis
from fulgurite.fuser.schedule.cpu.tiles import NO_TILES, Tiles, find_tiles
from fulgurite.fuser.schedule.loop_order import arrange_loops
from fulgurite.kernels.tuning import fuser_cpu as tuning


def prefers_tiles(nest: LoopNest) -> bool:
    """Whether rows side by side, in transposed tiles, take less time than one row after the other."""
    roles = {local.role for local in nest.locals.values()}
    if not nest.grid or not nest.body or roles & {"column_reduction", "full_reduction", "finalize"}:
        return False
    side_by_side = arrange_columns(nest)
    tiles = find_tiles(side_by_side)
    if tiles == NO_TILES or size_hint(side_by_side.grid[-1].size) < tuning.MIN_TILED_LANES:
        return False
    return _count_tile_cycles(side_by_side, tiles) < _count_row_cycles(nest)


def arrange_columns(nest: LoopNest) -> LoopNest:
    """The body as in a row kernel, so that reductions have one order; lanes are contiguous."""
    along = choose_simd_axis(nest, nest.body)
    return arrange_loops(nest, choose_simd_axis(nest, nest.grid), along)


def _count_tile_cycles(nest: LoopNest, tiles: Tiles) -> float:
    """Estimated cycles of a row as a lane."""
    points = count_elements(tuple(axis.size for axis in nest.body))
    operations, row_operations = _count_operations(nest)
    transposed = len(tiles.loads) + len(tiles.stores)
    vectors = (points * operations + row_operations) / tuning.VECTOR_LANES
    cycles = vectors * tuning.TILE_OPERATION_CYCLES + tuning.TILE_ROW_CYCLES
    return cycles + points * transposed * tuning.TRANSPOSE_CYCLES


def _count_row_cycles(nest: LoopNest) -> float:
    """Estimated cycles of a row whose points are the lanes."""
    nest = arrange_loops(nest, choose_simd_axis(nest, nest.body))
    body = set(nest.body)
    outer = count_elements(tuple(axis.size for axis in nest.body[:-1]))
    inner, lanes = size_hint(nest.body[-1].size), tuning.VECTOR_LANES
    # whole vectors, one of half the length, and single points
    steps = inner // lanes + (inner % lanes >= lanes // 2) + inner % (lanes // 2)
    operations, row_operations = _count_operations(nest)
    cycles = tuning.ROW_OPERATION_CYCLES * operations * steps
    strides = [i.coefficient(nest.body[-1]) for _, i, _ in nest.accesses() if i.axes() & body]
    across = sum(stride is None or (stride != 0 and stride != 1) for stride in strides)
    cycles += across * inner * tuning.STRIDED_ACCESS_CYCLES
    reductions = sum(local.reduction is not None for local in nest.locals.values())
    if reductions:
        cycles += tuning.FIRST_REDUCTION_CYCLES + (reductions - 1) * tuning.REDUCTION_CYCLES
    return outer * cycles + row_operations * tuning.TILE_OPERATION_CYCLES


def _count_operations(nest: LoopNest) -> tuple[int, int]:
    """Operations and memory accesses of a body point in all passes, and of a row's values."""
    analysis, locals_ = analyze_nest(nest), nest.locals.values()
    points = sum(bool(index.axes() & set(nest.body)) for _, index, _ in nest.accesses())
    for step in range(count_passes(nest, analysis)):
        required = find_required_locals(nest, find_pass_roots(nest, analysis, step))
        points += sum(x.flops for x in required if analysis.in_body[x.name] and not x.reduction)
    points += sum(max(x.flops, 1) for x in locals_ if x.reduction)
    rows = sum(x.flops for x in locals_ if not x.reduction and not analysis.in_body[x.name])
    return points, rows
