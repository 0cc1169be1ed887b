"""Pointwise GPU kernels: blocks of neighbouring points, and square tiles for transposed accesses.

In: a nest without reductions, and a device. Out: its schedule.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.gpu.base import (
    GpuSchedule,
    choose_vector_axis,
    count_points,
    flatten_loops,
    max_itemsize,
    next_power_of_two,
)
from fulgurite.fuser.schedule.loop_order import arrange_loops, choose_transposed_axis
from fulgurite.kernels.tuning import fuser_gpu as tuning


def schedule_pointwise(nest: LoopNest, device: DeviceInfo) -> GpuSchedule:
    """A block of neighbouring points: one or two accesses of 16 bytes a thread."""
    nest = arrange_loops(nest, choose_vector_axis(nest, nest.grid))
    points = count_points(nest.grid)
    if not nest.grid:
        return GpuSchedule("pointwise", nest, num_warps=1)
    multi_row = schedule_multi_row(nest, device)
    if multi_row is not None:
        return multi_row
    vector_width = _vector_width(nest)
    block = choose_pointwise_block(nest, points, device)
    num_warps = choose_pointwise_warps(nest, block)
    inner = nest.grid[-1]
    if len(nest.grid) > 1:
        size = inner.size.constant if inner.size.is_constant else 0
        dividing = choose_dividing_block(size, block, vector_width)
        nest = flatten_loops(nest, nest.grid[:-1] if dividing else nest.grid)
        if dividing and dividing < block:  # a program of a short row would be over at once
            row, inner = nest.grid
            sizes = {row: block // dividing, inner: dividing}
            return GpuSchedule("pointwise", nest, (row, inner), sizes, num_warps=num_warps)
    inner = nest.grid[-1]
    return GpuSchedule("pointwise", nest, (inner,), {inner: block}, num_warps=num_warps)


def choose_pointwise_block(nest: LoopNest, points: int, device: DeviceInfo) -> int:
    """Neighbouring points of a program, if there are so many points in all."""
    # two accesses of a thread are in flight; one where there are many loads anyway
    accesses = 2 if count_full_reads(nest) < tuning.MANY_READS else 1
    block = tuning.POINTWISE_THREADS * _vector_width(nest) * accesses
    programs = tuning.MIN_PROGRAMS_PER_SM * device.num_cores
    while block > tuning.MIN_POINTWISE_BLOCK and points < block * programs:
        block //= 2
    return block


def choose_pointwise_warps(nest: LoopNest, block: int) -> int:
    num_warps = block // _vector_width(nest) // tuning.WARP_SIZE
    return max(min(num_warps, tuning.MAX_POINTWISE_WARPS), 1)


def _vector_width(nest: LoopNest) -> int:
    """Elements of one access of a thread."""
    return max(tuning.ACCESS_BYTES // max_itemsize(nest), 1)


def schedule_multi_row(nest: LoopNest, device: DeviceInfo) -> GpuSchedule | None:
    """Several rows a program, where all rows read the same vectors: statistics and weights.

    A thread then loads these once for all its rows. Alone, a row of 256 channels in bfloat16 is 512
    bytes, and what it shares with the others (a mean, a deviation, a weight, a bias) 3 KiB more
    from the cache.
    """
    *outer, inner = nest.grid
    if not outer or not inner.size.is_constant:
        return None
    reads = {(t.name, i): t.itemsize for t, i, stores in nest.accesses() if not stores}
    shared_bytes = sum(size for (_, i), size in reads.items() if i.axes() == {inner})
    full = [t.itemsize for t, i, _ in nest.accesses() if set(nest.grid) <= i.axes()]
    if shared_bytes < tuning.MIN_SHARED_BYTES or not full:
        return None
    itemsize = max(full)
    # a cache line a row; with more elements than threads Triton would go through shared memory
    width = min(tuning.CACHE_LINE_BYTES // itemsize, tuning.MAX_MULTI_ROW_WIDTH)
    if -inner.size.constant % width * tuning.MULTI_ROW_WASTE > inner.size.constant:
        return None
    # four accesses of 16 bytes a thread and tensor are in flight; two where there are many tensors
    accesses = 4 if count_full_reads(nest) < tuning.MANY_READS else 2
    rows = tuning.POINTWISE_THREADS * tuning.ACCESS_BYTES // itemsize // width * accesses
    programs = tuning.MIN_MULTI_ROW_PROGRAMS_PER_SM * device.num_cores
    while rows > 1 and count_points(nest.grid) < rows * width * programs:
        rows //= 2
    if rows == 1:
        return None
    nest = flatten_loops(nest, tuple(outer))
    row, inner = nest.grid
    return GpuSchedule("pointwise", nest, (row, inner), {row: rows, inner: width})


def choose_dividing_block(size: int, block: int, vector_width: int) -> int:
    """A block that divides the innermost loop, nearly; 0 where none does.

    Else all loops are flattened into one. A position in the innermost loop is then a remainder,
    which keeps accesses wide only where its size is even at least.
    """
    if not size:
        return 0
    for candidate in (block, block // 2):
        is_large = candidate == block or candidate >= tuning.MIN_DIVIDING_BLOCK
        if size % candidate == 0 and is_large:
            return candidate
    is_wide = size % min(vector_width, 2) == 0
    for candidate in (block, block // 2, block // 4):
        waste = -size % candidate
        if waste * tuning.DIVIDING_WASTE <= size:
            return candidate
        if not is_wide and waste * tuning.NARROW_DIVIDING_WASTE <= size:
            return candidate
    return 0


def count_full_reads(nest: LoopNest) -> int:
    """Different loads at a point, of at least a quarter of the kernel's points."""
    reads = {(t.name, index) for t, index, stores in nest.accesses() if not stores}
    points = count_points(nest.axes)
    return sum(count_points(tuple(index.axes())) * 4 > points for _, index in reads)


def schedule_transpose(nest: LoopNest) -> GpuSchedule | None:
    """Square tiles, where some load is contiguous along another axis than the store."""
    if count_points(nest.grid) < tuning.MIN_TRANSPOSE_POINTS:
        return None
    min_length = tuning.MIN_TRANSPOSE_LENGTH
    inner = choose_vector_axis(nest, nest.grid)
    if inner is None or size_hint(inner.size) < min_length:
        return None
    if choose_transposed_axis(nest, inner, min_length) is None:
        return None
    nest = arrange_loops(nest, inner)
    inner = nest.grid[-1]
    other = choose_transposed_axis(nest, inner, min_length)
    if other is None:
        return None
    outer = tuple(a for a in nest.grid if a not in (inner, other))
    nest = flatten_loops(replace(nest, grid=(*outer, other, inner)), outer)
    *_, other, inner = nest.grid
    side = min(tuning.MAX_TRANSPOSE_TILE, tuning.TRANSPOSE_TILE_BYTES // max_itemsize(nest))
    side = max(tuning.MIN_TRANSPOSE_TILE, side)
    sizes = {a: min(side, next_power_of_two(size_hint(a.size))) for a in (other, inner)}
    num_warps = sizes[other] * sizes[inner] // tuning.ELEMENTS_PER_WARP
    num_warps = max(1, min(tuning.MAX_TRANSPOSE_WARPS, num_warps))
    return GpuSchedule("transpose", nest, (other, inner), sizes, num_warps=num_warps)
