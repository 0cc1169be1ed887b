"""Row-program CPU kernels: sorts, with what comes before and after them in each row.

Threads split the rows. A thread computes one step of a row after the other, into row buffers that
stay in its cache.
"""

from __future__ import annotations

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.cpu.base import CpuSchedule


def why_not(nest: LoopNest) -> str | None:
    return None if nest.is_row_program else "it does not sort"


def make_schedule(nest: LoopNest, device: DeviceInfo) -> CpuSchedule:
    return CpuSchedule("row_program", nest, None)
