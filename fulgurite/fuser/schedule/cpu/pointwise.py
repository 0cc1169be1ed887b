"""Pointwise CPU kernels: every point once, one SIMD loop, the other loops split among threads."""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import count_elements
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.cpu.base import CpuSchedule, choose_simd_axis
from fulgurite.fuser.schedule.cpu.memory_traffic import find_nontemporal_stores
from fulgurite.fuser.schedule.cpu.row_pieces import split_rows
from fulgurite.fuser.schedule.loop_order import arrange_loops
from fulgurite.kernels.tuning import fuser_cpu as tuning


def why_not(nest: LoopNest) -> str | None:
    if nest.body or any(local.reduction for local in nest.locals.values()):
        return "it reduces"
    return None


def make_schedule(nest: LoopNest, device: DeviceInfo) -> CpuSchedule:
    nest = arrange_loops(nest, choose_simd_axis(nest, nest.grid))
    if nest.grid:
        nest = replace(nest, grid=nest.grid[:-1], body=nest.grid[-1:])
    if not nest.body:
        return CpuSchedule("pointwise", nest, None)
    rows = count_elements(tuple(axis.size for axis in nest.grid))
    row_length = count_elements(tuple(axis.size for axis in nest.body))
    few_rows = rows < tuning.MIN_TASKS_PER_THREAD * device.num_cores and row_length > rows
    simd_axis = nest.body[-1]
    nontemporal = find_nontemporal_stores(nest, simd_axis)
    # staged non-temporal stores save more than splitting a row does, unless positions are looked up
    keeps_rows = few_rows or (nontemporal and not nest.computes_index)
    pieces = () if keeps_rows else split_rows(nest)
    return CpuSchedule(
        "pointwise",
        nest,
        simd_axis,
        parallel_simd_loop=few_rows,
        nontemporal_stores=() if pieces else nontemporal,
        pieces=pieces,
    )
