"""`Kernel`: a generated kernel to inspect and to time.

In: a kernel's source and how to run it. Out: its text, bytes moved, predicted time, why the kernel ends where
it does, and its measured time on buffers of its own.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fulgurite import device, timing
from fulgurite.fuser.codegen.cpp.translation_unit import CppKernelSource, TranslationUnit
from fulgurite.fuser.ir import cost
from fulgurite.fuser.ir.statement import Region, Tensor
from fulgurite.fuser.runtime.compile_triton import (
    ALIGNED,
    INT64_INDICES,
    KernelModule,
    ensure_scratch_allocator,
)
from fulgurite.fuser.schedule.cpu.base import CpuSchedule
from fulgurite.fuser.schedule.gpu.base import GpuSchedule

Library = Callable[[], ctypes.CDLL]  # waits until the library is built


@dataclass(frozen=True, repr=False)
class Kernel:
    """One generated kernel."""

    name: str
    source: str
    schedule: CpuSchedule | GpuSchedule
    ops: tuple[str, ...]
    bytes_moved: int
    flops: int
    predicted_seconds: float  # by the roofline
    reason: str  # why the segment ends where it does
    _measure: Callable[[], float] = field(repr=False, compare=False)

    def __str__(self) -> str:
        size = f"{self.bytes_moved / 2**20:.1f} MiB"
        return f"{self.name}: {len(self.ops)} ops, {size}, {self.schedule}; {self.reason}"

    __repr__ = __str__

    def measure(self) -> float:
        """Seconds of one run, the median of several."""
        return self._measure()

    @property
    def roofline_fraction(self) -> float:
        """Predicted over measured time: 1.0 is the roofline."""
        return self.predicted_seconds / self.measure()


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last one, by size hints."""
    pairs = zip(tensor.sizes, tensor.strides, strict=True)
    last = sum((cost.size_hint(size) - 1) * cost.size_hint(stride) for size, stride in pairs)
    return max(1 + last, 1)


# ---- timing: CPU ---------------------------------------------------------------------------------


def time_cpu_kernel(
    source: CppKernelSource, unit: TranslationUnit, library: Library, region: Region
) -> Callable[[], float]:
    """Return a function that times one kernel."""

    def measure() -> float:
        run = getattr(library(), f"run_{source.name}")
        run.argtypes, run.restype = [ctypes.c_char_p], ctypes.c_int64
        buffers: dict[str, torch.Tensor] = {}
        for name in (*source.reads, *source.writes):
            tensor = region.tensors[name]
            buffers[name] = torch.zeros(_extent(tensor), dtype=tensor.dtype)
        hints = {s.name: cost.atom_hint(s) for kernel in unit.kernels for s in kernel.symbols}
        values = [
            buffers[name].data_ptr() if name in buffers else hints.get(name, 0)
            for name in unit.slots
        ]
        packed = struct.pack(f"{len(values) + 1}q", *values, device.num_cpu_threads())
        return timing.median_times({source.name: lambda: run(packed)}, budget=0.2)[source.name]

    return measure


# ---- timing: GPU ---------------------------------------------------------------------------------


def time_triton_kernel(
    module: KernelModule, names: Sequence[str], device: torch.device
) -> Callable[[], float]:
    """Return a function that times the named kernels of a module, one after the other."""

    def measure() -> float:
        picked = [k for k, kernel in enumerate(module.kernels) if kernel.name in names]
        uses_int64 = module.kernels[0].int64_index
        handles = module.compile(ALIGNED | (INT64_INDICES if uses_int64 else 0))
        buffers: dict[str, torch.Tensor] = {}
        for k in picked:
            for tensor in module.kernels[k].tensors:
                if tensor.name not in buffers:
                    buffers[tensor.name] = _make_buffer(_extent(tensor), tensor.dtype, device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        ensure_scratch_allocator()

        def launch_all() -> None:
            for k in picked:
                kernel = module.kernels[k]
                run, function, metadata = handles[k]
                values = [buffers[t.name].data_ptr() for t in kernel.tensors]
                values += [cost.atom_hint(symbol) for symbol in kernel.symbols]
                grid = [cost.size_hint(n) for n in kernel.grid]
                run(*grid, 1, stream, function, metadata, None, None, None, *values)

        return time_with_events(launch_all)

    return measure


def _make_buffer(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random floats; zeros for integers, which may be indices."""
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.rand(count, device=device).to(dtype)


def time_with_events(call: Callable[[], Any], repeats: int = 20) -> float:
    """Device seconds of one call: the median of several, by CUDA events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]
