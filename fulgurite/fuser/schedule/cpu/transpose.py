"""Transposing CPU kernels: loads are contiguous along another axis than stores.

Both axes are iterated in square tiles. A tile of each transposed input is first loaded along its
own contiguous axis, every cache line whole, into a small buffer, and then read in transposed order.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import count_elements, size_hint
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.cpu.base import CpuSchedule, choose_simd_axis
from fulgurite.fuser.schedule.cpu.memory_traffic import find_nontemporal_stores
from fulgurite.fuser.schedule.loop_order import arrange_loops, choose_transposed_axis
from fulgurite.kernels.tuning import fuser_cpu as tuning


def why_not(nest: LoopNest) -> str | None:
    if nest.body or any(local.reduction for local in nest.locals.values()):
        return "it reduces"
    if count_elements(tuple(axis.size for axis in nest.grid)) < tuning.MIN_TRANSPOSE_POINTS:
        return "it is small"
    simd_axis = _choose_inner_axis(nest)
    if simd_axis is None or size_hint(simd_axis.size) < tuning.MIN_TRANSPOSE_LENGTH:
        return "no axis is long"
    if choose_transposed_axis(nest, simd_axis, tuning.MIN_TRANSPOSE_LENGTH) is None:
        return "every access is contiguous along one axis"
    return None


def make_schedule(nest: LoopNest, device: DeviceInfo) -> CpuSchedule:
    nest = arrange_loops(nest, _choose_inner_axis(nest))
    simd_axis = nest.grid[-1]
    other = choose_transposed_axis(nest, simd_axis, tuning.MIN_TRANSPOSE_LENGTH)
    assert other is not None, "collapsing loops changed which accesses are transposed"
    outer = tuple(axis for axis in nest.grid if axis not in (simd_axis, other))
    nest = replace(nest, grid=outer, body=(other, simd_axis))
    return CpuSchedule(
        "transpose",
        nest,
        simd_axis,
        block=tuning.TRANSPOSE_TILE,
        nontemporal_stores=find_nontemporal_stores(nest, simd_axis),
    )


def _choose_inner_axis(nest: LoopNest) -> Axis | None:
    """The axis along which all stores are contiguous, as loads go through buffers; else as for any kernel."""
    indices = [index for _, index, is_store in nest.accesses() if is_store]
    for axis in nest.grid:
        if indices and all(index.coefficient(axis) == 1 for index in indices):
            return axis
    return choose_simd_axis(nest, nest.grid)
