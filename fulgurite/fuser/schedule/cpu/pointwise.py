"""Pointwise kernels: every point once, one loop SIMD, the others shared among threads."""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import Device
from fulgurite.fuser.cost import elements
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu.base import Schedule
from fulgurite.fuser.schedule.cpu.loop_order import arranged, vector_axis
from fulgurite.fuser.schedule.cpu.memory_traffic import streamed


def accepts(nest: Nest) -> str | None:
    if nest.body or any(local.reduction for local in nest.locals.values()):
        return "it reduces"
    return None


def schedule(nest: Nest, device: Device) -> Schedule:
    vector = vector_axis(nest, nest.grid)
    nest = arranged(nest, vector)
    if nest.grid:
        nest = replace(nest, grid=nest.grid[:-1], body=nest.grid[-1:])
    rows = elements(tuple(axis.size for axis in nest.grid))
    inner = elements(tuple(axis.size for axis in nest.body))
    alone = rows < 2 * device.threads and inner > rows
    if not nest.body:
        return Schedule("pointwise", nest, None)
    vector = nest.body[-1]
    past = streamed(nest, vector)
    return Schedule("pointwise", nest, vector, inner_parallel=alone, streamed=past)
