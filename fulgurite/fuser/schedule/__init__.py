"""Schedules: a nest in, loops with every decision made out. One file a kernel shape.

`choose_schedule` asks them in order; the first that accepts makes the schedule.
"""

from __future__ import annotations

from types import ModuleType

from fulgurite.device import Device
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu import columns, pointwise, rows, scan, transpose
from fulgurite.fuser.schedule.cpu.base import Schedule

SCHEDULES: tuple[ModuleType, ...] = (scan, transpose, pointwise, rows, columns)


def choose_schedule(nest: Nest, device: Device) -> Schedule:
    reasons = []
    for module in SCHEDULES:
        reason = module.accepts(nest)
        if reason is None:
            return module.schedule(nest, device)  # type: ignore[no-any-return]
        reasons.append(f"{module.__name__.rsplit('.', 1)[1]}: {reason}")
    raise AssertionError(f"no schedule accepts a segment: {'; '.join(reasons)}")
