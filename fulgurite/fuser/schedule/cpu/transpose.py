"""Transposing kernels: what is read is contiguous along another axis than what is written.

Both axes are walked in square tiles. A tile of each turned input is first read along its own
contiguous axis, every cache line whole, into a small buffer, and then used the other way round.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import Device
from fulgurite.fuser.cost import elements, number
from fulgurite.fuser.ir.expression import Guard, Load, walk
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu.base import Schedule
from fulgurite.fuser.schedule.cpu.loop_order import arranged, vector_axis
from fulgurite.fuser.schedule.cpu.memory_traffic import streamed

TILE = 64
SMALLEST = 16  # an axis shorter than this is not worth tiling
SMALLEST_KERNEL = 1 << 14  # points; less than that stays in the first level cache


def accepts(nest: Nest) -> str | None:
    if nest.body or any(local.reduction for local in nest.locals.values()):
        return "it reduces"
    if elements(tuple(axis.size for axis in nest.grid)) < SMALLEST_KERNEL:
        return "it is small"
    vector = vector_axis(nest, nest.grid)
    if vector is None or number(vector.size) < SMALLEST:
        return "no axis is long"
    if turned_axis(nest, vector) is None:
        return "every access is contiguous along one axis"
    return None


def turned_loads(nest: Nest, vector: Axis, other: Axis) -> list[Load]:
    """Loads contiguous along `other` that step through memory along the SIMD axis."""
    found: dict[Load, None] = {}
    guarded: set[Load] = set()
    expressions = [local.expression for local in nest.locals.values()]
    expressions += [store.value for store in nest.stores]
    for expression in expressions:
        for part in walk(expression):
            if isinstance(part, Guard):
                guarded.update(p for p in walk(part) if isinstance(p, Load))
            if isinstance(part, Load) and part.index:
                index = part.index[0]
                step, along = index.coefficient(vector), index.coefficient(other)
                if step is None or along is None or index.loaded():
                    continue
                if along == 1 and step != 0 and step != 1:
                    found[part] = None
    return [load for load in found if load not in guarded]


def turned_axis(nest: Nest, vector: Axis) -> Axis | None:
    """The axis along which most turned loads are contiguous."""
    best: tuple[int, Axis] | None = None
    for axis in nest.grid:
        if axis == vector or number(axis.size) < SMALLEST:
            continue
        count = len(turned_loads(nest, vector, axis))
        if count and (best is None or count > best[0]):
            best = (count, axis)
    return best[1] if best else None


def schedule(nest: Nest, device: Device) -> Schedule:
    nest = arranged(nest, vector_axis(nest, nest.grid))
    vector = nest.grid[-1]
    other = turned_axis(nest, vector)
    assert other is not None, "joining loops changed which accesses are turned"
    outer = tuple(axis for axis in nest.grid if axis not in (vector, other))
    nest = replace(nest, grid=outer, body=(other, vector))
    return Schedule("transpose", nest, vector, block=TILE, streamed=streamed(nest, vector))
