"""How much shared memory a GPU kernel will need, before it is compiled.

In: a schedule. Out: an upper estimate in bytes. Triton puts there:

- pipelined loads: with `num_stages` > 1, a buffer per stage for every load in the loop
- layout conversions: a block whose elements move between threads, such as a transposed tile, the
  operand of a scan, or a narrow tensor next to a wide one
- reductions over several warps: a few values per warp

Compiled for an H200 (`metadata.shared`), 60 random kernels (sums over rows, norm gradients, softmax,
transposes, scans, gathers) needed at most as much, and pipelined ones about half to two thirds of it.
"""

from __future__ import annotations

from collections.abc import Collection

from fulgurite.fuser.ir.expression import opmath_dtype
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.schedule.analysis import has_scan
from fulgurite.fuser.schedule.gpu.base import GpuSchedule

BUFFER_ALIGNMENT = 1024  # bytes
REDUCTION_BYTES = 1024  # of a warp


def estimate_shared_bytes(schedule: GpuSchedule) -> int:
    """An upper estimate of the shared memory of a kernel."""
    return _pipelined_bytes(schedule) + _scratch_bytes(schedule)


def _pipelined_bytes(schedule: GpuSchedule) -> int:
    """Buffers of the loads that are in flight."""
    if schedule.num_stages == 1:
        return 0
    loads = {(t.name, i): (t, i) for t, i, stores in schedule.nest.accesses() if not stores}
    total = 0
    for tensor, index in loads.values():
        points = count_block_points(schedule, index.axes())
        if points > 1:
            total += -(-points * tensor.itemsize // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
    return total * schedule.num_stages


def _scratch_bytes(schedule: GpuSchedule) -> int:
    """One block that changes its layout, where that may happen, or the values of reductions."""
    dtypes = {tensor.dtype for tensor, _, _ in schedule.nest.accesses()}
    is_converted = len(schedule.block_axes) > 1 or len({d.itemsize for d in dtypes}) > 1
    reductions = REDUCTION_BYTES * schedule.num_warps
    if not is_converted and not has_scan(schedule.nest):
        return reductions
    widest = max((opmath_dtype(dtype).itemsize for dtype in dtypes), default=4)
    return max(reductions, widest * count_block_points(schedule, schedule.block_axes))


def count_block_points(schedule: GpuSchedule, axes: Collection[Axis]) -> int:
    """Elements of a block along these loops."""
    points = 1
    for axis in schedule.block_axes:
        points *= schedule.block_sizes[axis] if axis in axes else 1
    return points
