"""Which axis becomes SIMD, and the order of the others: shared by the schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fulgurite.fuser.cost import elements, number
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Nest, coalesce, named, order_axes

SHORT = 8  # a loop of fewer steps is not worth a vector


def votes(nest: Nest, axis: Axis) -> float:
    """How many bytes an iteration reads and writes one after the other along this axis.

    What is read or written once a row counts for one in as many iterations as the row has.
    """
    total = 0.0
    row = max(elements(tuple(axis.size for axis in nest.body)), 1)
    for tensor, index, is_store in nest.accesses():
        step = index.coefficient(axis)
        weight = float(tensor.itemsize * (2 if is_store else 1))
        if all(index.coefficient(a) == 0 for a in nest.body):
            weight /= row
        if step is not None and step == 1:
            total += weight
        elif step is not None and step == 0:
            total += 0.25 * weight
    return total


def vector_axis(nest: Nest, axes: Sequence[Axis]) -> Axis | None:
    """The axis along which most accesses are contiguous."""
    if not axes:
        return None
    order = {axis: k for k, axis in enumerate(order_axes(nest, tuple(axes)))}

    def merit(axis: Axis) -> tuple[bool, float, int, int]:
        size = number(axis.size)
        return (size >= SHORT, votes(nest, axis), order[axis], size)

    return max(axes, key=merit)


def arranged(nest: Nest, last: Axis | None) -> Nest:
    """Loops ordered by their steps with `last` innermost in its group, joined and named."""
    grid, body = order_axes(nest, nest.grid), order_axes(nest, nest.body)
    if last is not None:
        if last in grid:
            grid = (*(a for a in grid if a != last), last)
        else:
            body = (*(a for a in body if a != last), last)
    return named(coalesce(replace(nest, grid=grid, body=body)))
