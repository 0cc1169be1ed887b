"""Pointwise CPU kernels: every point once, one SIMD loop, the other loops split among threads."""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import count_elements
from fulgurite.fuser.ir.expression import Load, Masked, walk
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import iter_expressions
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
    nontemporal = () if pieces else nontemporal
    return CpuSchedule(
        "pointwise",
        nest,
        simd_axis,
        pads_tail=not (pieces or few_rows or nontemporal) and _is_worth_padding(nest),
        parallel_simd_loop=few_rows,
        nontemporal_stores=nontemporal,
        pieces=pieces,
    )


def _is_worth_padding(nest: LoopNest) -> bool:
    """Whether points behind the last vector cost more than loading and storing them as a vector."""
    (axis,) = nest.body
    if not axis.size.is_constant or any(store.combine is not None for store in nest.stores):
        return False
    loads = find_tail_loads(nest)
    strides = [(i.coefficient(axis), s) for _, i, s in nest.accesses()]
    along = [is_store for stride, is_store in strides if stride is not None and stride == 1]
    invariant = sum(stride is not None and stride == 0 and not s for stride, s in strides)
    if loads is None or len(along) + invariant < len(strides):
        return False
    single_points = axis.size.constant % (tuning.VECTOR_LANES // 2)
    flops = sum(local.flops for local in nest.locals.values())
    copies = len(loads) + sum(along)
    return single_points * (flops + len(along)) > flops + copies * tuning.TAIL_COPY_OPERATIONS


def find_tail_loads(nest: LoopNest) -> list[Load] | None:
    """The loads along the rows; None if some are masked or looked up."""
    found: dict[Load, None] = {}
    for expression in iter_expressions(nest):
        for part in walk(expression):
            if isinstance(part, Masked):
                return None
            if isinstance(part, Load) and part.index and not nest.is_local(part):
                if part.index[0].indirect_indices():
                    return None
                if part.index[0].coefficient(nest.body[-1]) == 1:
                    found[part] = None
    return list(found)
