"""Elementwise GPU kernels: blocks of neighbouring points, and tiles where reads and writes are turned."""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import Device
from fulgurite.fuser.cost import number
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu.loop_order import arranged
from fulgurite.fuser.schedule.cpu.transpose import turned_axis
from fulgurite.fuser.schedule.gpu.base import (
    GpuSchedule,
    joined,
    length,
    power_above,
    vector_axis,
    widest,
)

SMALLEST_TILED = 1 << 14  # points; a smaller transposition stays in the caches
MANY_READS = 3
SMALLEST_BLOCK = 512  # elements; smaller ones are not made only to fit
SHARED_BYTES = 8  # a point, of values that all rows have in common, from where on rows go together
LINE = 128  # bytes of memory that are fetched together
MOST_ACROSS = 64  # elements of a row that are a program's, where it has several rows


def pointwise(nest: Nest, device: Device) -> GpuSchedule:
    """A block of neighbouring points: 16 bytes a thread and access, more where there is much."""
    nest = arranged(nest, vector_axis(nest, nest.grid))
    points = length(nest.grid)
    if not nest.grid:
        return GpuSchedule("pointwise", nest, warps=1)
    together = several_rows(nest, device)
    if together is not None:
        return together
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


def several_rows(nest: Nest, device: Device) -> GpuSchedule | None:
    """Rows side by side, where much is read that is the same in all of them: statistics and weights of channels.

    A thread then reads them once for all its rows. Alone, a row of 256 channels in bfloat16 is 512 bytes, and
    what it shares with the others (a mean, a deviation, a weight, a bias) 3 KiB more from the cache.
    """
    *outer, inner = nest.grid
    if not outer or not inner.size.is_constant:
        return None
    reads = {(t.name, i): t.itemsize for t, i, stores in nest.accesses() if not stores}
    shared = sum(size for (_, i), size in reads.items() if i.axes() == {inner})
    whole = max(
        (t.itemsize for t, i, _ in nest.accesses() if set(nest.grid) <= i.axes()), default=0
    )
    if shared < SHARED_BYTES or not whole:
        return None
    # a line of memory a row; more elements than threads, and Triton would turn everything in shared memory
    across = min(LINE // whole, MOST_ACROSS)
    if -inner.size.constant % across * 16 > inner.size.constant:
        return None
    # four accesses of 16 bytes a thread and tensor are under way; two where tensors are many
    rows = 128 * 16 // whole // across * (4 if read_accesses(nest) < MANY_READS else 2)
    while rows > 1 and length(nest.grid) < rows * across * device.threads * 4:
        rows //= 2
    if rows == 1:
        return None
    nest = joined(nest, tuple(outer))
    row, inner = nest.grid
    return GpuSchedule("pointwise", nest, (row, inner), {row: rows, inner: across})


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
