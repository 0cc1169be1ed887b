"""Tensors in host programs: codes of dtypes and devices in torch's C interface, and allocations."""

from __future__ import annotations

import torch

from fulgurite import host_api
from fulgurite.fuser.runtime.memory_pool import MIN_POOLED_BYTES, allocate
from fulgurite.host.expression import Unsupported
from fulgurite.host.words import Op, StepWriter

DEVICE_TYPES = {"cpu": 0, "cuda": 1}


def dtype_code(dtype: torch.dtype) -> int:
    """torch's number of a dtype."""
    code = host_api.dtype_code(dtype)
    if code is None:
        raise Unsupported(f"torch's C interface has no {dtype}")
    return code


def write_allocation(
    writer: StepWriter,
    slot: int,
    layout: tuple[list[int], list[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Allocate a tensor; a large one on the CPU in the memory pool.

    layout   sizes and strides, as operands
    """
    sizes, strides = layout
    program, pool, function = writer.program, -1, 0
    dtype_object = program.add_object(dtype)
    if device.type == "cuda":
        pool, function = 0, program.add_object(torch._C._dynamo.guards._empty_strided_cuda)
        if not any(operand & 1 for operand in (*sizes, *strides)):
            values = [tuple(operand >> 1 for operand in part) for part in layout]
            objects = [program.add_object(value) for value in values]
            writer.add(Op.ALLOCATE_BY, [slot, function, *objects, dtype_object])
            return
    else:
        pool, function = -(-MIN_POOLED_BYTES // dtype.itemsize), program.add_object(allocate)
    place = [DEVICE_TYPES[device.type], -1 if device.index is None else device.index]
    head = [slot, dtype_code(dtype), *place, pool, function, dtype_object, len(sizes)]
    writer.add(Op.ALLOCATE, [*head, *sizes, *strides])
