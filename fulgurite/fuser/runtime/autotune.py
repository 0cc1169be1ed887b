"""Autotune generated GPU kernels: `autotune=True`.

In: candidate schedules of one kernel, the heuristic's choice first. Out: the fastest. Candidates are
compiled in parallel and timed on the device. The choice is cached for this device, this Triton and this
kernel's text. `neighbor_schedules` are the candidates of pointwise and reduction kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from fulgurite import cache
from fulgurite.fuser.ir.errors import KernelBuildError, Unsupported
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.runtime.compile_triton import (
    ALIGNED,
    INT64_INDICES,
    KernelModule,
    triton_version,
)
from fulgurite.fuser.runtime.kernel import time_triton_kernel
from fulgurite.fuser.schedule.gpu.base import GpuSchedule

MAX_CANDIDATES = 24
MAX_WARPS = 32
ELEMENTS_PER_THREAD = (4, 64)  # of a block, at least and at most
FACTORS = (1.0, 0.5, 2.0)

Schedule = TypeVar("Schedule", bound=GpuSchedule)


def pick_fastest(
    candidates: Sequence[Schedule],
    write: Callable[[Schedule], KernelModule],
    device: torch.device,
    device_name: str,
) -> Schedule:
    """The fastest candidate, or what an earlier call found."""
    distinct = {str(schedule): schedule for schedule in reversed(candidates)}
    first = write(candidates[0])
    key = cache.digest("autotuned schedule", device_name, triton_version(), first.text)
    cached = cache.read_text("decisions", key)
    if cached in distinct:
        return distinct[cached]
    modules = {name: write(schedule) for name, schedule in distinct.items()}
    for module in modules.values():
        uses_int64 = module.kernels[0].int64_index
        # all at once; the measurement finds them compiled
        module.start_compile(ALIGNED | (INT64_INDICES if uses_int64 else 0))
    seconds = {name: _measure(module, device) for name, module in modules.items()}
    fastest = min(seconds, key=lambda name: seconds[name])
    if seconds[fastest] == float("inf"):
        raise Unsupported("a kernel that exceeds the device's shared memory or registers")
    cache.write_text("decisions", key, fastest)
    return distinct[fastest]


def _measure(module: KernelModule, device: torch.device) -> float:
    """Seconds of one run; infinite if the kernel can't be built or the device lacks the resources."""
    try:
        return time_triton_kernel(module, [kernel.name for kernel in module.kernels], device)()
    except KernelBuildError:
        return float("inf")


# ---- candidates ----------------------------------------------------------------------------------


def neighbor_schedules(schedule: GpuSchedule) -> list[GpuSchedule]:
    """The schedule, and those with half or twice its numbers, the fewest changes first."""
    has_loop = schedule.is_looped or schedule.num_programs > 0
    axis = resizable_axis(schedule)
    choices = itertools.product(
        FACTORS,
        FACTORS if axis is not None else (1.0,),
        FACTORS if schedule.num_programs or schedule.num_splits else (1.0,),
        (schedule.num_stages, 1, 2, 3, 4) if has_loop else (schedule.num_stages,),
    )
    found = {str(schedule): (0, schedule)}
    for warps, size, programs, num_stages in choices:
        sizes = {a: int(n * size) if a == axis else n for a, n in schedule.block_sizes.items()}
        neighbor = replace(
            schedule,
            num_warps=int(schedule.num_warps * warps),
            block_sizes=sizes,
            num_programs=int(schedule.num_programs * programs),
            num_splits=int(schedule.num_splits * programs),
            num_stages=num_stages,
        )
        changes = sum(factor != 1 for factor in (warps, size, programs))
        changes += num_stages != schedule.num_stages
        if is_valid(neighbor, schedule):
            found.setdefault(str(neighbor), (changes, neighbor))
    ranked = sorted(found.values(), key=lambda pair: pair[0])
    return [neighbor for _, neighbor in ranked][:MAX_CANDIDATES]


def resizable_axis(schedule: GpuSchedule) -> Axis | None:
    """The axis whose block may grow and shrink; a register-resident row may not."""
    is_resident = schedule.resident_blocks or not schedule.is_looped
    resident = schedule.nest.body if is_resident else ()
    return next((axis for axis in schedule.block_axes if axis not in resident), None)


def is_valid(schedule: GpuSchedule, start: GpuSchedule) -> bool:
    if not 1 <= schedule.num_warps <= MAX_WARPS or (start.num_splits and schedule.num_splits < 2):
        return False
    if start.num_programs and schedule.num_programs < 1:
        return False
    points = 1
    for axis in schedule.block_axes:
        points *= schedule.block_sizes[axis]
    low, high = ELEMENTS_PER_THREAD
    is_nonempty = min(schedule.block_sizes.values(), default=1) >= 1
    return is_nonempty and low <= points // (32 * schedule.num_warps) <= high
