"""Scan CPU kernels: running sums, products and extrema along the one body loop.

Where memory is contiguous along the grid, neighbouring grid points run side by side in SIMD lanes,
each with its own accumulator. Where it is contiguous along the body, a row is one scan. A few long
rows are split among threads: each reduces its chunk, and then scans it starting from the prefix of
the chunks before.
"""

from __future__ import annotations

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import count_elements, size_hint
from fulgurite.fuser.ir.loop_nest import Local, LoopNest
from fulgurite.fuser.schedule.cpu.base import CpuSchedule, choose_simd_axis
from fulgurite.fuser.schedule.loop_order import arrange_loops
from fulgurite.kernels.tuning import fuser_cpu as tuning


def why_not(nest: LoopNest) -> str | None:
    if not find_scans(nest):
        return "it does not scan"
    return None


def find_scans(nest: LoopNest) -> list[Local]:
    return [local for local in nest.locals.values() if local.role == "scan"]


def are_scans_independent(nest: LoopNest) -> bool:
    """Does no scan read another?"""
    names = {local.name for local in find_scans(nest)}
    return not any(names & _find_inputs(nest, local) for local in find_scans(nest))


def _adds_exponentials(nest: LoopNest) -> bool:
    """Is there a scan whose chunks, combined, differ from one chain of operations?"""
    return any(local.reduction == "logsumexp" for local in find_scans(nest))


def _find_inputs(nest: LoopNest, local: Local) -> set[str]:
    """The locals that one is computed from, directly or not."""
    found: set[str] = set()
    stack = [local.expression]
    while stack:
        for used in nest.references(stack.pop()):
            if used.name not in found:
                found.add(used.name)
                stack.append(used.expression)
    return found


def make_schedule(nest: LoopNest, device: DeviceInfo) -> CpuSchedule:
    simd_axis = choose_simd_axis(nest, nest.axes)
    assert simd_axis is not None, "a scan has an axis"
    if simd_axis in nest.body:
        nest = arrange_loops(nest, nest.body[-1])
        rows = count_elements(tuple(axis.size for axis in nest.grid))
        points = rows * size_hint(nest.body[-1].size)
        is_large = rows < device.num_cores and points >= tuning.MIN_SPLIT_POINTS
        splits_body = is_large and are_scans_independent(nest) and not _adds_exponentials(nest)
        return CpuSchedule("scan", nest, nest.body[-1], splits_body=splits_body)
    nest = arrange_loops(nest, simd_axis)
    points = count_elements(tuple(axis.size for axis in nest.grid))
    block = tuning.MAX_SCAN_BLOCK
    tasks = tuning.MIN_TASKS_PER_THREAD * device.num_cores
    while block >= 2 * tuning.MIN_SCAN_BLOCK and points < block * tasks:
        block //= 2
    return CpuSchedule("scan", nest, nest.grid[-1], block=block)
