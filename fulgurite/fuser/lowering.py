"""Lower a graph to kernels: C++ on the CPU, Triton on a GPU. Regions with GEMMs go through `gemm/`.

In: a region as an fx graph, and its device. Out: a `FusedRegion`. Both targets share the IR and its passes;
the limit of a row's bytes, the schedules and the code differ.

    fx graph → frontend: IR → split_axes → segments → loop nests → schedules → source → runtime
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from fulgurite import device as devices
from fulgurite import native
from fulgurite.device import DeviceInfo
from fulgurite.fuser.codegen.cpp.translation_unit import write_kernel, write_translation_unit
from fulgurite.fuser.codegen.triton.horizontal import fuse_horizontally
from fulgurite.fuser.codegen.triton.kernel import write_kernels
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir import cost
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.ir.statement import Region
from fulgurite.fuser.runtime.autotune import neighbor_schedules, pick_fastest
from fulgurite.fuser.runtime.compile_triton import (
    KernelModule,
    build_kernel_module,
    is_interpreted,
)
from fulgurite.fuser.runtime.cpu_region import FusedRegion
from fulgurite.fuser.runtime.kernel import Kernel, time_cpu_kernel, time_triton_kernel
from fulgurite.fuser.runtime.triton_region import TritonRegion, needs_int64_indices
from fulgurite.fuser.schedule.cpu.choose import choose_cpu_schedule
from fulgurite.fuser.schedule.gpu.base import GpuSchedule
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, make_row_limit
from fulgurite.fuser.schedule.gpu.smaller import smaller_schedule
from fulgurite.fuser.segment import Segment
from fulgurite.fuser.segment.choose_slices import segment_with_slices
from fulgurite.fuser.segment.inplace import store_in_place
from fulgurite.fuser.segment.scatter_nest import with_initial_nests
from fulgurite.fuser.segment.store_in_slices import store_in_slices
from fulgurite.trace.op_names import name_from_ops

MAX_PROGRAMS = (2**31 - 1, 2**16 - 1)  # of a grid's first and second dimension
MAX_ATTEMPTS = 6  # schedules of one kernel that are tried before torch runs its region
# What schedules see in Triton's interpreter, where nothing is timed: an H200.
INTERPRETER_DEVICE = DeviceInfo(
    "interpreter", 4, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,)
)


def lower_to_kernels(
    module: fx.GraphModule,
    device: torch.device,
    use_triton: bool = False,
    autotune: bool = False,
) -> FusedRegion:
    """Lower a graph without GEMMs.

    use_triton   Triton kernels for CPU tensors too, in Triton's interpreter
    autotune     time several schedules of each GPU kernel
    """
    if use_triton or device.type == "cuda":
        return lower_triton(lower_graph(module, uses_atomics=True), device, autotune)
    return lower_cpu(lower_graph(module, corrects_means=True))


def name_kernel(segment: Segment, number: int) -> str:
    """A name from the most specific ops of a segment."""
    ops = [s.statement.origin for s in segment.structure.statements.values()]
    return f"{name_from_ops(ops)}_{number}"


def _segment_flops(segment: Segment) -> int:
    return sum(s.flops * s.elements for s in segment.structure.statements.values())


def _segment_ops(segment: Segment) -> tuple[str, ...]:
    return tuple(s.statement.origin for s in segment.structure.statements.values())


def _count_bytes(region: Region, nest: LoopNest, touched: Iterable[str]) -> int:
    """Bytes that a kernel reads and writes. An indexed store touches an element a point.

    Of a buffer with slices, a kernel touches its own.
    """
    points = cost.count_elements(tuple(axis.size for axis in nest.axes))
    stored = {s.tensor.name: points * s.tensor.itemsize for s in nest.stores if s.combine}
    for name in {place.buffer for place in region.slices.values()}:
        accessed = {index for tensor, index, _ in nest.accesses() if tensor.name == name}
        loops = [tuple(axis.size for axis in index.axes()) for index in accessed]
        stored[name] = region.tensors[name].itemsize * sum(map(cost.count_elements, loops))
    sizes = ((name, cost.tensor_bytes(region.tensors[name])) for name in touched)
    return sum(min(size, stored.get(name, size)) for name, size in sizes)


# ---- CPU -----------------------------------------------------------------------------------------


def lower_cpu(region: Region) -> FusedRegion:
    """Lower a region of the IR to C++ kernels in one library."""
    device_info = devices.cpu_info()
    cut = segment_with_slices(region, device_info.l2_cache_bytes, device_info)
    region, nests = store_in_place(cut.region, cut.nests)
    segments, nests = with_initial_nests(cut.segments, store_in_slices(region, nests))
    schedules = [choose_cpu_schedule(nest, device_info) for nest in nests]
    sources = [
        write_kernel(name_kernel(segment, number), schedule)
        for number, (segment, schedule) in enumerate(zip(segments, schedules, strict=True))
    ]
    unit = write_translation_unit(sources, region.tensors)
    library = native.start_build(unit.source) if sources else None
    kernels = []
    for segment, source, schedule in zip(segments, sources, schedules, strict=True):
        assert library is not None, "a kernel without a library"
        touched = (*source.reads, *source.writes, *source.updates)
        bytes_moved = _count_bytes(region, schedule.nest, touched)
        flops = _segment_flops(segment)
        kernels.append(
            Kernel(
                name=source.name,
                source=source.text,
                schedule=schedule,
                ops=_segment_ops(segment),
                bytes_moved=bytes_moved,
                flops=flops,
                predicted_seconds=cost.predict_seconds(device_info, bytes_moved, flops),
                reason=segment.reason,
                _measure=time_cpu_kernel(source, unit, library, region),
            )
        )
    return FusedRegion(region, unit, tuple(kernels), library)


# ---- GPU -----------------------------------------------------------------------------------------


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def with_index(device: torch.device) -> torch.device:
    """The device with its index: "cuda" is the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def gpu_info(device: torch.device) -> DeviceInfo:
    """What schedules know of a GPU, or of Triton's interpreter."""
    return devices.cuda_info(device.index or 0) if device.type == "cuda" else INTERPRETER_DEVICE


@dataclass(frozen=True)
class _ScheduledKernel:
    name: str
    segment: Segment
    schedule: GpuSchedule
    attempts: int = 1  # schedules tried so far

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the kernel and of those that combine its partial results."""
        return (self.name, f"{self.name}_combine", f"{self.name}_combine_all")

    def with_smaller_schedule(self, device: DeviceInfo) -> _ScheduledKernel | None:
        """The kernel with its next schedule; None if there is none, or too many have failed."""
        smaller = smaller_schedule(self.schedule, device)
        if smaller is None or self.attempts == MAX_ATTEMPTS:
            return None
        return replace(self, schedule=smaller, attempts=self.attempts + 1)


def lower_triton(region: Region, device: torch.device, autotune: bool = False) -> TritonRegion:
    """Lower a region of the IR to Triton kernels; `autotune` times several schedules."""
    device = with_index(device)
    assert device.type == "cuda" or is_interpreted(), "CPU tensors need TRITON_INTERPRET=1"
    device_info = gpu_info(device)
    cut = segment_with_slices(region, make_row_limit(device_info), device_info)
    region, nests = store_in_place(cut.region, cut.nests)
    segments, nests = with_initial_nests(cut.segments, store_in_slices(region, nests))
    use_int64 = bool(needs_int64_indices(region))
    scheduled = []
    for number, (segment, nest) in enumerate(zip(segments, nests, strict=True)):
        name, schedule = name_kernel(segment, number), choose_gpu_schedule(nest, device_info)
        if autotune and not is_interpreted() and not nest.computes_index:
            schedule = pick_fastest(
                neighbor_schedules(schedule),
                lambda s, name=name: build_kernel_module(write_kernels(name, s, use_int64)),  # type: ignore[misc]
                device,
                device_info.name,
            )
        scheduled.append(_ScheduledKernel(name, segment, schedule))
    return _build_triton_region(region, scheduled, device)


def _build_triton_region(
    region: Region, scheduled: list[_ScheduledKernel], device: torch.device, fuses: bool = True
) -> TritonRegion:
    """The region with the kernels of these schedules; `fuses`: several kernels in one launch."""
    int64_indices, device_info = needs_int64_indices(region), gpu_info(device)

    @functools.cache
    def write(use_int64: bool, is_aligned: bool = True) -> KernelModule:
        sources = [write_kernels(k.name, k.schedule, use_int64) for k in scheduled]
        if not fuses:
            return build_kernel_module([source for own in sources for source in own])
        schedules = [kernel.schedule for kernel in scheduled]
        return build_kernel_module(fuse_horizontally(schedules, sources, device_info, use_int64))

    def reschedule(failed: str) -> TritonRegion | None:
        """The region with the next schedule of a kernel."""
        if any(source.name == failed and source.fused for source in kernel_module.kernels):
            return _build_triton_region(region, scheduled, device, fuses=False)
        for number, kernel in enumerate(scheduled):
            if failed in kernel.source_names:
                smaller = kernel.with_smaller_schedule(device_info)
                if smaller is None:
                    return None
                others = [*scheduled[:number], smaller, *scheduled[number + 1 :]]
                return _build_triton_region(region, others, device, fuses)
        return None

    kernel_module = write(bool(int64_indices), True)
    for source in kernel_module.kernels:
        for programs, limit in zip(source.grid, MAX_PROGRAMS, strict=True):
            if programs.is_constant and programs.constant > limit:
                raise Unsupported(f"a kernel of {programs.constant} programs")
    kernels = tuple(
        _describe_kernel(region, kernel_module, own, device_info, device)
        for own in _kernels_of_launches(kernel_module, scheduled)
    )
    return TritonRegion(region, write, kernels, device, int64_indices, reschedule)


def _decline_to_measure() -> float:
    """Not a number: on made-up inputs a computed index may be out of range, a device-side assert."""
    return math.nan


def _kernels_of_launches(
    kernel_module: KernelModule, scheduled: list[_ScheduledKernel]
) -> list[list[_ScheduledKernel]]:
    """The kernels in the order they run; those that run in one launch together."""
    by_name = {name: kernel for kernel in scheduled for name in kernel.source_names}
    found: dict[str, list[_ScheduledKernel]] = {}
    for source in kernel_module.kernels:
        own = [by_name[name] for name in source.fused or (source.name,)]
        found.setdefault(own[0].name, own)
    return list(found.values())


def _describe_kernel(
    region: Region,
    kernel_module: KernelModule,
    own: list[_ScheduledKernel],
    device_info: DeviceInfo,
    device: torch.device,
) -> Kernel:
    """A kernel with those that combine its partial results, or several kernels in one launch."""
    kernel, names = own[0], {name for each in own for name in each.source_names}
    sources = [s for s in kernel_module.kernels if s.name in names or names & {*s.fused}]
    touched = dict.fromkeys(t.name for s in sources for t in s.tensors if t not in s.partials)
    tensors = [*touched, *(update for source in sources for update in source.updates)]
    known = [name for name in tensors if name in region.tensors]
    bytes_moved = _count_bytes(region, kernel.schedule.nest, known)
    flops = sum(_segment_flops(each.segment) for each in own)
    return Kernel(
        name=sources[0].name,
        source="\n\n\n".join(source.text for source in sources),
        schedule=kernel.schedule,
        ops=tuple(op for each in own for op in _segment_ops(each.segment)),
        bytes_moved=bytes_moved,
        flops=flops,
        predicted_seconds=cost.predict_seconds(device_info, bytes_moved, flops),
        reason=kernel.segment.reason if len(own) == 1 else f"{len(own)} kernels of one form",
        _measure=_decline_to_measure
        if any(each.schedule.nest.computes_index for each in own)
        else time_triton_kernel(kernel_module, [s.name for s in sources], device),
    )
