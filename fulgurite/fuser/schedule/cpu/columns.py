"""Column CPU kernels: reductions over the body where memory is contiguous along the grid.

Sums over leading or middle dimensions, and norms along them. A block of neighbouring grid points is
computed together, each SIMD lane with its own accumulator, so that every load is contiguous.
Single-pass kernels take full rows, and threads split them. Multi-pass kernels keep expensive values in
a buffer, and pack what they load if it exceeds the L2 cache: the lines of a narrow block of a matrix
fall on few sets of the cache.
"""

from __future__ import annotations

import sys

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import count_elements, size_hint, tensor_bytes
from fulgurite.fuser.ir.expression import Expression, Load, opmath_dtype
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import (
    analyze_nest,
    collect_memory_loads,
    count_passes,
    find_pass_roots,
    is_body_store,
)
from fulgurite.fuser.schedule.cpu.base import CpuSchedule
from fulgurite.fuser.schedule.cpu.memory_traffic import (
    find_contiguous_loads,
    find_nontemporal_stores,
)
from fulgurite.fuser.schedule.cpu.rows import can_split, choose_buffered_locals
from fulgurite.fuser.schedule.cpu.tile_cost import arrange_columns
from fulgurite.fuser.schedule.cpu.tiles import NO_TILES, find_tiles
from fulgurite.kernels.tuning import fuser_cpu as tuning


def why_not(nest: LoopNest) -> str | None:
    if not nest.body:
        return "it does not reduce"
    if not nest.grid:
        return "it reduces everything"
    roles = {local.role for local in nest.locals.values()}
    if roles & {"column_reduction", "full_reduction", "finalize"}:
        return "it reduces over the grid too"
    return None


def make_schedule(nest: LoopNest, device: DeviceInfo) -> CpuSchedule:
    nest = arrange_columns(nest)
    simd_axis = nest.grid[-1]
    analysis = analyze_nest(nest)
    passes = count_passes(nest, analysis)
    width = size_hint(simd_axis.size)
    outer = count_elements(tuple(axis.size for axis in nest.grid[:-1]))
    stores_body = any(is_body_store(nest, store) for store in nest.stores)
    tiles = find_tiles(nest)
    most = _count_accumulated_lanes(nest)
    if passes == 1 and not stores_body and tiles == NO_TILES:
        tasks = outer * -(-width // most)
        if _has_blocks_to_split(nest) and can_split(nest, tasks, device):
            block = min(most, _round_up(width))
            return CpuSchedule("columns", nest, simd_axis, block=block, splits_body=True)
    is_static = simd_axis.size.is_constant
    longest = min(most, _round_up(width)) if is_static else most
    block, packed = longest, False
    buffered: tuple[str, ...] = ()
    if passes > 1:
        # the block of all rows should stay in the L2 cache from pass to pass
        height = max(count_elements(tuple(axis.size for axis in nest.body)), 1)
        room = device.l2_cache_bytes // 2
        roots = [find_pass_roots(nest, analysis, step) for step in range(passes)]
        buffered = choose_buffered_locals(nest, analysis, passes, limit=sys.maxsize)
        buffer_bytes = sum(nest.locals[name].dtype.itemsize for name in buffered)
        load_bytes = sum(x.dtype.itemsize for x in find_packed_loads(nest, roots, buffered))
        limit = min(room, tuning.MAX_PACKED_BYTES)

        def fits(row_bytes: int) -> bool:  # 0: there is nothing to keep
            return 0 < height * row_bytes * tuning.MIN_COLUMN_BLOCK <= limit

        packed = fits(buffer_bytes + load_bytes) and _is_worth_packing(nest, device)
        row_bytes = buffer_bytes + load_bytes if packed else buffer_bytes
        buffered = buffered if fits(row_bytes) else ()
        room = limit // row_bytes if packed or buffered else room // 4
        block = max(tuning.MIN_COLUMN_BLOCK, min(longest, _whole_vectors(room // height)))
    if tiles != NO_TILES:
        # the tiles of a block should stay in the L1 cache
        packed, height = False, max(count_elements(tuple(axis.size for axis in nest.body)), 1)
        row_bytes = tiles.row_bytes + sum(nest.locals[name].dtype.itemsize for name in buffered)
        multiple = device.l1_cache_bytes * 2 // 3 // (height * row_bytes)
        multiple = max(
            multiple // tuning.MIN_COLUMN_BLOCK * tuning.MIN_COLUMN_BLOCK, tuning.MIN_TILED_BLOCK
        )
        block = max(tuning.MIN_COLUMN_BLOCK, min(tuning.MAX_TILED_BLOCK, longest, multiple))
    tasks = tuning.MIN_TASKS_PER_THREAD * device.num_cores if device.num_cores > 1 else 1
    while block >= 2 * tuning.MIN_COLUMN_BLOCK and outer * width < block * tasks:
        block //= 2
    return CpuSchedule(
        "columns",
        nest,
        simd_axis,
        passes=passes,
        block=block,
        buffered_locals=buffered,
        packed=packed,
        tiles=tiles,
        nontemporal_stores=find_nontemporal_stores(nest, simd_axis),
    )


def _count_accumulated_lanes(nest: LoopNest) -> int:
    """The most lanes whose accumulators stay in the L1 cache."""
    sizes = [opmath_dtype(x.dtype).itemsize for x in nest.locals.values() if x.reduction]
    lane_bytes = tuning.REDUCTION_LANES * sum(sizes)
    most = tuning.MAX_COLUMN_LANE_BYTES // max(lane_bytes, 1)
    multiple = most // tuning.MIN_COLUMN_BLOCK * tuning.MIN_COLUMN_BLOCK
    return max(min(multiple, tuning.MAX_COLUMN_BLOCK), tuning.MIN_COLUMN_BLOCK)


def _has_blocks_to_split(nest: LoopNest) -> bool:
    """Whether the body is several blocks of a reduction, each with one result for a column."""
    first, *inner = nest.body
    if not all(axis.size.is_constant for axis in nest.body):
        return False
    if not inner:
        return first.size.constant > tuning.REDUCTION_BLOCK
    is_block = 16 <= inner[0].size.constant <= tuning.REDUCTION_BLOCK
    return len(inner) == 1 and is_block


def find_packed_loads(
    nest: LoopNest, roots: list[list[Expression]], buffered: tuple[str, ...]
) -> list[Load]:
    """Loads along the lanes that more than one pass makes; `roots` are what each pass computes."""
    candidates = find_contiguous_loads(nest, nest.grid[-1], nest.body[-1])
    uses: dict[Load, int] = {}
    available: set[str] = set()
    for pass_roots in roots:
        values = _find_computed_locals(nest, pass_roots, available)
        expressions = [nest.locals[name].expression for name in values]
        for load in collect_memory_loads([*pass_roots, *expressions]):
            uses[load] = uses.get(load, 0) + 1
        available |= {name for name in values if name in buffered}
    return [load for load in candidates if uses.get(load, 0) > 1]


def _find_computed_locals(nest: LoopNest, roots: list[Expression], available: set[str]) -> set[str]:
    """The locals that a pass computes where some are available already."""
    found: set[str] = set()
    stack = list(roots)
    while stack:
        for local in nest.references(stack.pop()):
            if local.name not in available | found and local.reduction is None:
                found.add(local.name)
                stack.append(local.expression)
    return found


def _is_worth_packing(nest: LoopNest, device: DeviceInfo) -> bool:
    """Does the kernel read more than fits in the L2 cache?"""
    tensors = {tensor.name: tensor for tensor, _, is_store in nest.accesses() if not is_store}
    is_static = all(axis.size.is_constant for axis in nest.body)
    return is_static and sum(map(tensor_bytes, tensors.values())) > device.l2_cache_bytes


def _whole_vectors(lanes: int) -> int:
    """As many lanes as whole vectors have, also of bytes."""
    step = next((s for s in (64, 32) if lanes >= s), tuning.MIN_COLUMN_BLOCK)
    return lanes // step * step


def _round_up(width: int) -> int:
    return -(-width // tuning.MIN_COLUMN_BLOCK) * tuning.MIN_COLUMN_BLOCK
