"""Symmetric memory: a size in, one buffer a rank out, and each rank's address of every buffer.

    buffer = allocate_symmetric_buffer(axis, num_bytes, device)    on all ranks of the axis
    kernel[grid](buffer.peer_pointers_W, ...)                      reads and writes any rank's buffer

A backend allocates the buffers and moves bytes between them. `BACKENDS` has them by name:

    torch    torch's symmetric memory: GPUs with peer access over NVLink, or ranks that share a GPU
    shared   shared memory of the operating system: CPU ranks, kernels in Triton's interpreter
    local    all ranks in one process: a single rank, tests, benchmarks on one GPU

Another backend is one file: a class with the methods of `SymmetricBackend`, and a row in `BACKENDS`. One
whose ranks can't address each other's memory (NVSHMEM across a network) sets `peer_pointers_W` to zero
for these ranks; one_sided.py then still works, kernels that write to addresses don't.

Buffers are zero before any rank sees them.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from fulgurite.errors import ArgumentError, RankError
from fulgurite.kernels.common import triton_one_sided as kernels
from fulgurite.kernels.common.triton_import import HAS_TRITON, INTERPRETED
from fulgurite.kernels.integer_math import cdiv
from fulgurite.parallel.mesh import Axis

SHARED_MEMORY = Path("/dev/shm")
SHARED_GPU_ENV = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
NAME_BYTES = 16
PUT_BLOCK = 1024  # elements of a program
SPIN_POLLS = 1000  # of the host before it sleeps between polls
POLL_INTERVAL = 50e-6  # seconds


def no_symmetric_memory_reason(axis: Axis, device: torch.device) -> str | None:
    """Why the ranks of an axis have no symmetric memory; None if they have."""
    if axis.spans_nodes:
        return "the axis spans several nodes, and ranks write into each other's memory"
    if device.type == "meta":
        return None  # a planned GPU, which reaches the others of its node
    if not HAS_TRITON:
        return "its kernels need Triton"
    if device.type == "cpu":
        return None if INTERPRETED else "kernels run on a CPU only with TRITON_INTERPRET=1"
    if axis.size == 1:
        return None
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", axis.size))
    if count < local and os.environ.get(SHARED_GPU_ENV) != "1":
        return f"{local} ranks share {count} GPUs, and {SHARED_GPU_ENV} is not 1"
    others = [index for index in range(min(count, local)) if index != device.index]
    blocked = [i for i in others if not torch.cuda.can_device_access_peer(device.index or 0, i)]
    if blocked:
        return f"{device} has no peer access to GPU {', '.join(map(str, blocked))}"
    return None


@dataclass(frozen=True, eq=False)
class SymmetricBuffer:
    """One rank's buffer, and the addresses of all ranks' buffers, on the device."""

    data: Tensor
    peer_pointers_W: Tensor
    owner: object = None  # keeps the memory of the addresses alive
    peers: tuple[Tensor, ...] = ()  # the buffers of all ranks, as this process sees them


class FlagWait(NamedTuple):
    """Wait until the int32 at byte `offset` is `value` or later; `source`: who will set it."""

    rank: int
    source: int
    offset: int
    value: int
    max_polls: int


class SymmetricBackend(Protocol):
    """Allocates symmetric buffers and runs one-sided operations on them.

    Ranks are indices of the axis, offsets are bytes. Operations of a GPU are ordered by its current
    stream and don't wait for the host.
    """

    @property
    def name(self) -> str: ...

    def unavailable_reason(self, axis: Axis, device: torch.device) -> str | None:
        """Why ranks of the axis can't share memory on this device; None: they can."""
        ...

    def allocate(self, axis: Axis, num_bytes: int, device: torch.device) -> SymmetricBuffer:
        """One buffer of zeros a process; a collective call."""
        ...

    def put(self, buffer: SymmetricBuffer, source: Tensor, rank: int, offset: int) -> None:
        """Copy a contiguous tensor into the buffer of a rank."""
        ...

    def signal(self, buffer: SymmetricBuffer, rank: int, offset: int, value: int) -> None:
        """Set a flag in the buffer of a rank, after all earlier puts to it."""
        ...

    def wait(self, buffer: SymmetricBuffer, flag: FlagWait, status: Tensor) -> None:
        """Wait for a flag of this rank. A GPU writes a timeout to `status`; the host raises it."""
        ...


def allocate_symmetric_buffer(
    axis: Axis, num_bytes: int, device: torch.device, backend: SymmetricBackend | None = None
) -> SymmetricBuffer:
    """One buffer a process, mapped by all ranks of the axis; a collective call."""
    chosen = choose_backend(axis, device) if backend is None else backend
    return chosen.allocate(axis, num_bytes, device)


def choose_backend(axis: Axis, device: torch.device) -> SymmetricBackend:
    """The first backend that works for the axis; ArgumentError with all reasons if there is none."""
    reasons = []
    for name, backend in BACKENDS.items():
        reason = backend.unavailable_reason(axis, device)
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise ArgumentError(
        f"there is no symmetric memory for {axis} on {device.type}",
        reason="; ".join(reasons),
        next="use transport='hierarchical' or 'all_to_all'",
    )


def allocate_local_buffers(
    num_ranks: int, num_bytes: int, device: torch.device | str
) -> list[SymmetricBuffer]:
    """The buffers of all ranks in one process."""
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    return [_make_buffer(buffers, rank, None) for rank in range(num_ranks)]


class AddressableMemory:
    """Operations on buffers that this process has mapped: kernels on a GPU, copies on a CPU."""

    def put(self, buffer: SymmetricBuffer, source: Tensor, rank: int, offset: int) -> None:
        data = source.contiguous().view(-1).view(torch.uint8)
        if not data.numel():
            return
        if data.device.type == "cpu":
            buffer.peers[rank][offset : offset + data.numel()] = data
            return
        is_aligned = not (data.numel() % 4 or offset % 4 or data.data_ptr() % 4)
        words = data.view(torch.int32) if is_aligned else data
        grid = (cdiv(words.numel(), PUT_BLOCK),)
        kernels.put_kernel[grid](
            buffer.peer_pointers_W, words, rank, offset, words.numel(), BLOCK=PUT_BLOCK
        )

    def signal(self, buffer: SymmetricBuffer, rank: int, offset: int, value: int) -> None:
        if buffer.data.device.type == "cpu":
            _fence()  # puts are visible before the flag
            _flag(buffer.peers[rank], offset).fill_(value)
        else:
            kernels.signal_kernel[(1,)](buffer.peer_pointers_W, rank, offset, value, num_warps=1)

    def wait(self, buffer: SymmetricBuffer, flag: FlagWait, status: Tensor) -> None:
        if buffer.data.device.type == "cpu":
            _poll_on_host(buffer, flag)
        else:
            kernels.wait_kernel[(1,)](
                buffer.peer_pointers_W, status, flag.rank, flag.source, flag.offset, flag.value,
                flag.max_polls, num_warps=1,
            )  # fmt: skip


class TorchSymmetricMemory(AddressableMemory):
    """torch's symmetric memory on GPUs."""

    name = "torch"

    def unavailable_reason(self, axis: Axis, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it needs CUDA and not {device.type}"
        if axis.spans_nodes:
            return "ranks on other nodes have memory of their own"
        return "there is one rank only" if axis.group is None else None

    def allocate(self, axis: Axis, num_bytes: int, device: torch.device) -> SymmetricBuffer:
        assert axis.group is not None, "a single rank has a local buffer"
        buffer = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        buffer.zero_()
        handle = symm_mem.rendezvous(buffer, axis.group)
        torch.cuda.synchronize(device)
        handle.barrier()  # all flags are zero before anybody reads one
        views = [handle.get_buffer(rank, buffer.shape, buffer.dtype) for rank in range(axis.size)]
        pointers = torch.tensor([view.data_ptr() for view in views], device=device)
        return SymmetricBuffer(buffer, pointers, (handle, views), tuple(views))


class SharedMemory(AddressableMemory):
    """Files of the memory file system. Each has a name only until every rank has mapped it."""

    name = "shared"

    def unavailable_reason(self, axis: Axis, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it needs a CPU and not {device.type}"
        if not SHARED_MEMORY.is_dir():
            return f"there is no {SHARED_MEMORY}"
        return "there is one rank only" if axis.group is None else None

    def allocate(self, axis: Axis, num_bytes: int, device: torch.device) -> SymmetricBuffer:
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
        return _make_buffer(buffers, axis.index, buffers)


class LocalMemory(AddressableMemory):
    """Memory of this process, for a single rank."""

    name = "local"

    def unavailable_reason(self, axis: Axis, device: torch.device) -> str | None:
        return None if axis.group is None else f"{axis.size} ranks have processes of their own"

    def allocate(self, axis: Axis, num_bytes: int, device: torch.device) -> SymmetricBuffer:
        return allocate_local_buffers(1, num_bytes, device)[0]


def _make_buffer(buffers: list[Tensor], index: int, owner: object) -> SymmetricBuffer:
    pointers = torch.tensor([one.data_ptr() for one in buffers], device=buffers[0].device)
    return SymmetricBuffer(buffers[index], pointers, owner or buffers, tuple(buffers))


def _map_file(path: Path, num_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def _flag(buffer: Tensor, offset: int) -> Tensor:
    return buffer[offset : offset + 4].view(torch.int32)


def _fence() -> None:
    """A full memory barrier on CPUs with weak ordering: that of a lock."""
    with threading.Lock():
        pass


def _poll_on_host(buffer: SymmetricBuffer, flag: FlagWait) -> None:
    own = _flag(buffer.data, flag.offset)
    for poll in range(flag.max_polls):
        if (int(own) - flag.value) % 2**32 < 2**31:  # `value` or later, also after an overflow
            _fence()
            return
        if poll > SPIN_POLLS:
            time.sleep(POLL_INTERVAL)
    raise RankError(
        f"rank {flag.source} did not answer: its signal {flag.value} never arrived",
        ranks=(flag.source,),
        where=f"the flag at byte {flag.offset} is {int(own)}",
        next="look at the last output of that process; start all ranks again",
    )


BACKENDS: dict[str, SymmetricBackend] = {
    "local": LocalMemory(),
    "torch": TorchSymmetricMemory(),
    "shared": SharedMemory(),
}
