"""The input buffers of a captured step: numbers written on the host in, tensors on the device out.

All inputs of a step lie in one buffer, which is copied at once. On a GPU there are two buffers on the
host, so that the next step is written while the copy of this one may still be under way. On a CPU
host and device share one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

BufferLayout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class HostBuffer:
    """One buffer on the host, and the event after its last copy to a GPU."""

    def __init__(self, size: int, layout: BufferLayout, on_gpu: bool) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        tensors = _split_buffer(self.memory, layout)
        self.arrays: dict[str, np.ndarray] = {name: x.numpy() for name, x in tensors.items()}
        self.copied = torch.cuda.Event() if on_gpu else None


class StepBuffers:
    """`device_inputs` are at the same addresses for all steps."""

    def __init__(self, layout: BufferLayout, device: torch.device) -> None:
        size = sum(_aligned_bytes(shape, dtype) for shape, dtype in layout.values())
        on_gpu = device.type == "cuda"
        self.host_buffers = [HostBuffer(size, layout, on_gpu) for _ in range(2 if on_gpu else 1)]
        memory = self.host_buffers[0].memory
        self.device_memory = memory.to(device)
        self.device_inputs = _split_buffer(self.device_memory, layout)
        self.current = 0

    def begin_write(self) -> dict[str, np.ndarray]:
        """The arrays to write the next step's inputs to; a GPU has copied what they had."""
        self.current = (self.current + 1) % len(self.host_buffers)
        buffer = self.host_buffers[self.current]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer.arrays

    def copy_to_device(self) -> None:
        """Copy all inputs at once, without waiting."""
        buffer = self.host_buffers[self.current]
        if buffer.copied is not None:
            self.device_memory.copy_(buffer.memory, non_blocking=True)
            buffer.copied.record()


def _split_buffer(buffer: Tensor, layout: BufferLayout) -> dict[str, Tensor]:
    """Views of one byte buffer, one tensor after another."""
    tensors, start = {}, 0
    for name, (shape, dtype) in layout.items():
        used = math.prod(shape) * dtype.itemsize
        tensors[name] = buffer[start : start + used].view(dtype).view(shape)
        start += _aligned_bytes(shape, dtype)
    return tensors


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor, rounded up so that the next one is 16-byte aligned."""
    return -(-math.prod(shape) * dtype.itemsize // 16) * 16
