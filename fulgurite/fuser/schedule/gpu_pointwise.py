"""Elementwise GPU kernels: blocks of neighbouring points, and tiles where reads and writes are turned."""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import Device

from ..cost import number
from ..nest import Nest
from .choose import arranged
from .gpu_base import GpuSchedule, joined, length, power_above, vector_axis, widest
from .transpose import turned_axis

SMALLEST_TILED = 1 << 14  # points; a smaller transposition stays in the caches
MANY_READS = 3
SMALLEST_BLOCK = 512  # elements; smaller ones are not made only to fit


def pointwise(nest: Nest, device: Device) -> GpuSchedule:
    """A block of neighbouring points: 16 bytes a thread and access, more where there is much."""
    nest = arranged(nest, vector_axis(nest, nest.grid))
    points = length(nest.grid)
    if not nest.grid:
        return GpuSchedule("pointwise", nest, warps=1)
    lane = max(16 // widest(nest), 1)
    # two accesses of 16 bytes a thread are under way; one where there are many of them anyway
    block = 128 * lane * (2 if read_accesses(nest) < MANY_READS else 1)
    while block > 32 and points < block * device.threads * 2:
        block //= 2
    inner = nest.grid[-1]
    if len(nest.grid) > 1:
        size = inner.size.constant if inner.size.is_constant else 0
        fitting = fitting_block(size, block, lane)
        block = fitting or block
        nest = joined(nest, nest.grid[:-1] if fitting else nest.grid)
    inner = nest.grid[-1]
    warps = max(min(block // lane // 32, 4), 1)
    return GpuSchedule("pointwise", nest, (inner,), {inner: block}, warps=warps)


def fitting_block(size: int, block: int, lane: int) -> int:
    """A block of which whole numbers make up the innermost loop, nearly; 0 where none does.

    Else all loops become one, and a position in the innermost a remainder of it, which keeps accesses wide
    where its size is even at least.
    """
    if not size:
        return 0
    for near in (block, block // 2):
        if size % near == 0 and (near == block or near >= SMALLEST_BLOCK):
            return near
    wide = size % min(lane, 2) == 0
    for near in (block, block // 2, block // 4):
        waste = -size % near
        if waste * 32 <= size or (not wide and waste * 8 <= size):
            return near
    return 0


def read_accesses(nest: Nest) -> int:
    """Different reads at a point, of a whole tensor's size."""
    reads = {(t.name, index) for t, index, stores in nest.accesses() if not stores}
    return sum(length(tuple(index.axes())) * 4 > length(nest.axes) for _, index in reads)


def tiled(nest: Nest) -> GpuSchedule | None:
    """Square tiles where some read is contiguous along another loop than the write."""
    if length(nest.grid) < SMALLEST_TILED:
        return None
    vector = vector_axis(nest, nest.grid)
    if vector is None or number(vector.size) < 16 or turned_axis(nest, vector) is None:
        return None
    nest = arranged(nest, vector)
    vector = nest.grid[-1]
    other = turned_axis(nest, vector)
    if other is None:
        return None
    outer = tuple(a for a in nest.grid if a not in (vector, other))
    nest = replace(nest, grid=(*outer, other, vector))
    nest = joined(nest, outer)
    *_, other, vector = nest.grid
    side = max(32, min(128, 256 // widest(nest)))
    sizes = {a: min(side, power_above(number(a.size))) for a in (other, vector)}
    warps = max(1, min(8, sizes[other] * sizes[vector] // 1024))
    return GpuSchedule("transpose", nest, (other, vector), sizes, warps=warps)
