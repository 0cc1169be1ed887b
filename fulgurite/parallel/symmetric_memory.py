"""Symmetric memory: a size in, one buffer a rank out, and each rank's address of every buffer.

    buffer = allocate_symmetric_buffer(axis, num_bytes, device)    on all ranks of the axis
    kernel[grid](buffer.peer_pointers_W, ...)                      reads and writes any rank's buffer

A backend maps the buffers of all ranks into each process. There is one for each device type:

    cuda   torch's symmetric memory: peer access over NVLink, or ranks that share a GPU
    cpu    shared memory of the operating system, for kernels in Triton's interpreter

Buffers are zero before any rank sees them. `allocate_local_buffers` has all ranks in one process, for
tests and for benchmarks on one GPU.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.parallel.mesh import Axis

SHARED_MEMORY = Path("/dev/shm")
NAME_BYTES = 16


@dataclass(frozen=True, eq=False)
class SymmetricBuffer:
    """One rank's buffer, and the addresses of all ranks' buffers, on the device."""

    data: Tensor
    peer_pointers_W: Tensor
    owner: object = None  # keeps the memory of the addresses alive


def allocate_symmetric_buffer(axis: Axis, num_bytes: int, device: torch.device) -> SymmetricBuffer:
    """One buffer a process, mapped by all ranks of the axis; a collective call."""
    if axis.group is None:
        return allocate_local_buffers(1, num_bytes, device)[0]
    if device.type not in BACKENDS:
        raise ArgumentError(
            f"there is no symmetric memory for {device.type}", next=f"one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[device.type](axis, num_bytes, device)


def allocate_local_buffers(
    num_ranks: int, num_bytes: int, device: torch.device | str
) -> list[SymmetricBuffer]:
    """The buffers of all ranks in one process."""
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
    return [SymmetricBuffer(buffer, pointers, buffers) for buffer in buffers]


def _allocate_on_gpu(axis: Axis, num_bytes: int, device: torch.device) -> SymmetricBuffer:
    assert axis.group is not None, "a single rank has a local buffer"
    buffer = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
    buffer.zero_()
    handle = symm_mem.rendezvous(buffer, axis.group)
    torch.cuda.synchronize(device)
    handle.barrier()  # all flags are zero before anybody reads one
    views = [handle.get_buffer(rank, buffer.shape, buffer.dtype) for rank in range(axis.size)]
    pointers = torch.tensor([view.data_ptr() for view in views], device=device)
    return SymmetricBuffer(buffer, pointers, (handle, views))


def _allocate_in_shared_memory(axis: Axis, num_bytes: int, device: torch.device) -> SymmetricBuffer:
    """Files of the memory file system. Each has a name only until every rank has mapped it."""
    name_B = torch.tensor(list(secrets.token_bytes(NAME_BYTES)), dtype=torch.uint8)
    dist.broadcast(name_B, axis.ranks[0], axis.group)
    name = bytes(name_B.tolist()).hex()
    paths = [SHARED_MEMORY / f"fulgurite-{name}-{rank}" for rank in axis.ranks]
    own = paths[axis.index]
    try:
        own.touch(mode=0o600, exist_ok=False)
        mapped = _map_file(own, num_bytes)  # the file gets its size here, all zeros
        dist.barrier(axis.group)
        buffers = [mapped if path == own else _map_file(path, num_bytes) for path in paths]
        dist.barrier(axis.group)
    finally:
        own.unlink(missing_ok=True)
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return SymmetricBuffer(mapped, pointers, buffers)


def _map_file(path: Path, num_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


BACKENDS: dict[str, Callable[[Axis, int, torch.device], SymmetricBuffer]] = {
    "cuda": _allocate_on_gpu,
    "cpu": _allocate_in_shared_memory,
}
