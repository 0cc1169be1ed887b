"""A generated kernel for people to look at: its text, what it moves, why it ends, and its time."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fulgurite import device, timing
from fulgurite.fuser import cost
from fulgurite.fuser.codegen.cpp.translation_unit import KernelText, Unit
from fulgurite.fuser.ir.statement import Region
from fulgurite.fuser.schedule.cpu.base import Schedule
from fulgurite.fuser.schedule.gpu.choose import GpuSchedule

Library = Callable[[], ctypes.CDLL]  # waits until it is built


@dataclass(frozen=True, repr=False)
class Kernel:
    """One generated kernel, for people to look at."""

    name: str
    source: str
    schedule: Schedule | GpuSchedule
    ops: tuple[str, ...]
    bytes: int
    flops: int
    predicted: float  # seconds
    reason: str  # why the segment ends where it does
    _measure: Callable[[], float] = field(repr=False, compare=False)

    def __str__(self) -> str:
        size = f"{self.bytes / 2**20:.1f} MiB"
        return f"{self.name}: {len(self.ops)} ops, {size}, {self.schedule}; {self.reason}"

    __repr__ = __str__

    def measure(self) -> float:
        """Seconds of a run on memory of this kernel's own, the median of several."""
        return self._measure()

    @property
    def of_limit(self) -> float:
        """Predicted over measured: 1.0 is the roofline."""
        return self.predicted / self.measure()


def measured(text: KernelText, unit: Unit, library: Library, region: Region) -> Callable[[], float]:
    """A function that times one kernel on buffers of its own."""

    def measure() -> float:
        run = getattr(library(), f"only_{text.name}")
        run.argtypes, run.restype = [ctypes.c_char_p], ctypes.c_int64
        tensors = region.tensors
        buffers: dict[str, torch.Tensor] = {}
        for name in (*text.reads, *text.writes):
            tensor = tensors[name]
            reach = 1 + sum(
                (cost.number(size) - 1) * cost.number(stride)
                for size, stride in zip(tensor.sizes, tensor.strides, strict=True)
            )
            buffers[name] = torch.zeros(max(reach, 1), dtype=tensor.dtype)
        values = []
        for name in unit.slots:
            values.append(buffers[name].data_ptr() if name in buffers else cost.ASSUMED_SIZE)
        packed = struct.pack(f"{len(values) + 1}q", *values, device.cpu_threads())
        return timing.compare({text.name: lambda: run(packed)}, budget=0.2)[text.name]

    return measure
