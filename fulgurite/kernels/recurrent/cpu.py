"""Calls of the C++ kernel of recurrent layers (`include/recurrent.h`).

In: float32 tensors on the CPU. Out: new tensors, or `NotImplemented` where the kernel does not support them.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.errors import FulguriteError
from fulgurite.kernels.common.cpu_library import build_translation_unit
from fulgurite.kernels.conv.cpu import HEADERS
from fulgurite.kernels.conv.packing import panel_vectors
from fulgurite.native import find_compiler

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # as recurrent.h numbers them
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def start_build() -> None:
    """Start to compile the kernel, or find it in the cache, in the background."""
    native.start_build(_source())


@functools.cache
def _source() -> str:
    return build_translation_unit(*HEADERS, "recurrent.h")


@functools.cache
def _load_kernel() -> replay.NativeKernel:
    return replay.NativeKernel(native.load(_source()), "recurrence", "recurrence", _no_memory)


def _no_memory(status: int) -> Exception:
    return FulguriteError("a recurrent layer found no memory for its gates", next="free memory")


def recurrence(
    gates: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    hidden: Tensor,
    memory: Tensor | None,
    cell: str,
) -> Any:
    """`fulgurite::recurrence`."""
    tensors = (*gates, *weights, *biases, hidden)
    if any(tensor.dtype != torch.float32 for tensor in tensors) or find_compiler() is None:
        return NotImplemented
    gates = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in gates]
    if any(tensor.stride() != gates[0].stride() for tensor in gates):
        gates = [tensor.contiguous() for tensor in gates]
    steps, batch = gates[0].shape[:2]
    size = hidden.shape[2]
    out = torch.empty(steps, batch, len(gates) * size)
    # the kernel updates the states in place
    state = hidden.clone(memory_format=torch.contiguous_format)
    last = torch.empty(0) if memory is None else memory.clone(memory_format=torch.contiguous_format)
    numbers = [
        *(CELLS.index(cell), steps, batch, size, GATES[cell], panel_vectors(GATES[cell] * size)),
        *(*gates[0].stride()[:2], *out.stride()[:2], device.num_cpu_threads(), len(gates)),
    ]
    for k, gate in enumerate(gates):
        numbers += [gate.data_ptr(), weights[k].data_ptr()]
        numbers += [biases[k].data_ptr() if biases else 0, out.data_ptr() + 4 * k * size]
        numbers += [state[k].data_ptr(), 0 if memory is None else last[k].data_ptr()]
    packed = struct.pack(f"{len(numbers)}q", *numbers)
    _load_kernel()(packed, (*gates, *weights, *biases, out, state, last))
    return out, state, last
