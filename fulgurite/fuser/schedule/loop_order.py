"""The order of loops, and accesses that run across it.

In: a loop nest and the axis that should be innermost. Out: the nest in that order, neighbouring
loops collapsed where every access allows it; and which loads are transposed, contiguous along
another axis.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.expression import Load, Masked, walk
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import LoopNest, collapse_loops, order_axes, rename_loops
from fulgurite.fuser.schedule.analysis import iter_expressions


def arrange_loops(nest: LoopNest, *innermost: Axis | None) -> LoopNest:
    """Loops by descending stride, each of `innermost` last in its group, collapsed and renamed."""
    grid, body = order_axes(nest, nest.grid), order_axes(nest, nest.body)
    for last in innermost:
        if last in grid:
            grid = (*(a for a in grid if a != last), last)
        elif last is not None:
            body = (*(a for a in body if a != last), last)
    return rename_loops(collapse_loops(replace(nest, grid=grid, body=body)))


def merge_contiguous_loops(nest: LoopNest) -> LoopNest:
    """Neighbouring loops that every access runs through as one, before any loop is chosen for SIMD."""
    if nest.is_row_program:
        return nest
    grid, body = order_axes(nest, nest.grid), order_axes(nest, nest.body)
    return collapse_loops(replace(nest, grid=grid, body=body))


def find_transposed_loads(nest: LoopNest, inner: Axis, other: Axis) -> list[Load]:
    """Unmasked loads that are contiguous along `other` and strided along `inner`."""
    found: dict[Load, None] = {}
    masked: set[Load] = set()
    for expression in iter_expressions(nest):
        for part in walk(expression):
            if isinstance(part, Masked):
                masked.update(p for p in walk(part) if isinstance(p, Load))
            if isinstance(part, Load) and part.index:
                index = part.index[0]
                stride, along = index.coefficient(inner), index.coefficient(other)
                if stride is None or along is None or index.indirect_indices():
                    continue
                if along == 1 and stride != 0 and stride != 1:
                    found[part] = None
    return [load for load in found if load not in masked]


def choose_transposed_axis(nest: LoopNest, inner: Axis, min_length: int) -> Axis | None:
    """The grid axis along which most transposed loads are contiguous."""
    best: tuple[int, Axis] | None = None
    for axis in nest.grid:
        if axis == inner or size_hint(axis.size) < min_length:
            continue
        count = len(find_transposed_loads(nest, inner, axis))
        if count and (best is None or count > best[0]):
            best = (count, axis)
    return best[1] if best else None
