"""Row-program CPU kernels: sorts or nested reductions, with what comes before and after them in each row.

Threads split the rows. A thread computes one step of a row after the other, into row buffers that
stay in its cache. Short rows without a sort are computed many at a time, so that SIMD loops are long.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import count_elements
from fulgurite.fuser.ir.expression import Expression, Load
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.loop_nest import Local, LoopNest
from fulgurite.fuser.schedule.cpu.base import CpuSchedule
from fulgurite.kernels.tuning import fuser_cpu as tuning


def why_not(nest: LoopNest) -> str | None:
    return None if nest.is_row_program else "it neither sorts nor has nested reductions"


def make_schedule(nest: LoopNest, device: DeviceInfo) -> CpuSchedule:
    has_sort = any(step.rank is not None for step in nest.locals.values())
    while not has_sort and _can_lengthen_rows(nest):
        nest = lengthen_rows(nest)
    return CpuSchedule("row_program", nest, None)


def _can_lengthen_rows(nest: LoopNest) -> bool:
    """Whether rows are short, and remain short enough with one more loop."""
    if len(nest.grid) < 2 or not all(a.size.is_constant for a in (*nest.body, nest.grid[-1])):
        return False
    longest = max(
        count_elements(tuple(axis.size for axis in (*step.axes, *step.reduced_axes)))
        for step in nest.locals.values()
    )
    added = count_elements((nest.grid[-1].size,))
    is_short = longest < tuning.MIN_ROW_PROGRAM_POINTS
    return is_short and longest * added <= tuning.MAX_ROW_PROGRAM_POINTS


def lengthen_rows(nest: LoopNest) -> LoopNest:
    """Makes the innermost loop of the grid the first loop of every step."""
    *grid, axis = nest.grid
    position = indices.from_atom(axis)

    def read_step(part: Expression) -> Expression | None:
        if isinstance(part, Load) and nest.is_local(part):
            return replace(part, index=(position, *part.index))
        return None

    def change(expression: Expression) -> Expression:
        return rewrite_expression(expression, read_step, lambda index: index)

    def lengthen(step: Local) -> Local:
        return replace(step, expression=change(step.expression), axes=(axis, *step.axes))

    return replace(
        nest,
        grid=tuple(grid),
        body=(axis, *nest.body),
        locals={name: lengthen(step) for name, step in nest.locals.items()},
        stores=tuple(replace(store, value=change(store.value)) for store in nest.stores),
    )
