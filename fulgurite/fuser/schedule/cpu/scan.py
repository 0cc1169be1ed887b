"""Scanning kernels: running sums, products, extremes along the one body loop, and what is made of them.

Where memory is contiguous along the grid, neighbouring grid points run side by side, each with its own accumulator.
Where it is contiguous along the body, a row is one run; few long rows are cut into parts that threads first
collect and then, knowing what came before, scan.
"""

from __future__ import annotations

from fulgurite.device import Device
from fulgurite.fuser.cost import elements, number
from fulgurite.fuser.ir.loop_nest import Local, Nest
from fulgurite.fuser.schedule.cpu.base import Schedule
from fulgurite.fuser.schedule.cpu.loop_order import arranged, vector_axis
from fulgurite.fuser.schedule.cpu.rows import SPLIT_ELEMENTS

# neighbouring grid points side by side: their accumulators stay in the first level cache
WIDEST = 256
NARROWEST = 16


def accepts(nest: Nest) -> str | None:
    if not scans_of(nest):
        return "it does not scan"
    return None


def scans_of(nest: Nest) -> list[Local]:
    return [local for local in nest.locals.values() if local.role == "scan"]


def independent(nest: Nest) -> bool:
    """Does no scan read another?"""
    names = {local.name for local in scans_of(nest)}
    return not any(names & reach(nest, local) for local in scans_of(nest))


def reach(nest: Nest, local: Local) -> set[str]:
    """The locals that one is made of, directly or not."""
    found: set[str] = set()
    stack = [local.expression]
    while stack:
        for used in nest.references(stack.pop()):
            if used.name not in found:
                found.add(used.name)
                stack.append(used.expression)
    return found


def schedule(nest: Nest, device: Device) -> Schedule:
    vector = vector_axis(nest, nest.axes)
    assert vector is not None, "a scan has an axis"
    across = vector in nest.grid
    if not across and any(axis == vector for axis in nest.body):
        nest = arranged(nest, nest.body[-1])
        rows = elements(tuple(axis.size for axis in nest.grid))
        points = rows * number(nest.body[-1].size)
        split = rows < device.threads and points >= SPLIT_ELEMENTS and independent(nest)
        return Schedule("scan", nest, nest.body[-1], split=split)
    nest = arranged(nest, vector)
    width = number(nest.grid[-1].size)
    outer = elements(tuple(axis.size for axis in nest.grid[:-1]))
    block = WIDEST
    while block >= 2 * NARROWEST and outer * width < block * device.threads * 2:
        block //= 2
    return Schedule("scan", nest, nest.grid[-1], block=block)
