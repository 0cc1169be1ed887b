"""Which CPU schedule a loop nest gets: the first kernel shape that accepts it.

In: a loop nest and a device. Out: a `CpuSchedule`. A shape is a module with two functions:

    why_not(nest)             the reason why the shape does not fit, None where it does
    make_schedule(nest, device)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.cpu import (
    columns,
    pointwise,
    row_program,
    rows,
    scan,
    scatter,
    transpose,
)
from fulgurite.fuser.schedule.cpu.base import CpuSchedule
from fulgurite.fuser.schedule.cpu.tables import hoist_tables
from fulgurite.fuser.schedule.loop_order import merge_contiguous_loops


class KernelShape(NamedTuple):
    name: str
    why_not: Callable[[LoopNest], str | None]
    make_schedule: Callable[[LoopNest, DeviceInfo], CpuSchedule]


KERNEL_SHAPES = (
    KernelShape("row_program", row_program.why_not, row_program.make_schedule),
    KernelShape("scatter", scatter.why_not, scatter.make_schedule),
    KernelShape("scan", scan.why_not, scan.make_schedule),
    KernelShape("transpose", transpose.why_not, transpose.make_schedule),
    KernelShape("pointwise", pointwise.why_not, pointwise.make_schedule),
    KernelShape("rows", rows.why_not, rows.make_schedule),
    KernelShape("columns", columns.why_not, columns.make_schedule),
)


def choose_cpu_schedule(nest: LoopNest, device: DeviceInfo) -> CpuSchedule:
    nest = merge_contiguous_loops(hoist_tables(nest))
    reasons = []
    for shape in KERNEL_SHAPES:
        reason = shape.why_not(nest)
        if reason is None:
            return shape.make_schedule(nest, device)
        reasons.append(f"{shape.name}: {reason}")
    raise AssertionError(f"no CPU schedule accepts the loop nest: {'; '.join(reasons)}")
