"""One-sided communication: put, signal and wait between the ranks of an axis.

    memory = OneSidedMemory.create(axis, num_bytes, device)      on all ranks of the axis
    memory.put(x, rank=1, offset=0)       the bytes of x, into the memory of rank 1
    memory.signal(rank=1, value=step)     tells rank 1 that all puts to it before are there
    memory.wait(rank=0, value=step)       until rank 0 has signalled `step` or a later number
    memory.data                           what others have put here
    memory.check()                        raises what the device has recorded; once a step

The receiver takes no part in a put, and nobody answers. Signals are growing numbers, for example the
step, and are never reset. Whoever reuses memory signals back that it has been read. Each rank has one
signal for each other rank and channel, so channels are independent of each other.

On a GPU the calls are kernels in the current stream: the host never waits, and a CUDA graph can hold
them. A signal that does not arrive ends the wait after `max_polls`, and `check` raises. On a CPU the host
copies and polls, and `wait` raises itself.

The same operations inside a Triton kernel: `put`, `signal`, `wait_signal` and `record_timeout`, which
take `memory.buffer.peer_pointers_W` and the byte offsets `data_offset` and `signal_offset(...)`.

    @triton.jit
    def send_kernel(peers_ptr, x_ptr, peer, flag, step, count, BLOCK: tl.constexpr):
        put(peers_ptr, peer, 0, x_ptr, count, BLOCK)
        signal(peers_ptr, peer, flag, step)

Memory and operations come from a backend (memory.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, RankError
from fulgurite.kernels.common.triton_one_sided import (
    TIMED_OUT,
    put,
    record_timeout,
    signal,
    wait_signal,
)
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.symmetric.memory import (
    FlagWait,
    SymmetricBackend,
    SymmetricBuffer,
    choose_backend,
)

ALIGNMENT = 16  # bytes
SIGNAL_BYTES = 4
MAX_POLLS = {"cuda": 1 << 26, "cpu": 1 << 19}  # about 30 s on an H200; about 50 s on a CPU


class OneSidedMemory:
    """Memory of each rank that all ranks of an axis can write to.

    `data_offset` is the first byte of the data in the buffer; the signals follow the data.
    """

    data_offset = 0

    def __init__(
        self,
        axis: Axis,
        buffer: SymmetricBuffer,
        backend: SymmetricBackend,
        channels: int = 1,
        max_polls: int | None = None,
    ) -> None:
        self.axis, self.buffer, self.backend, self.channels = axis, buffer, backend, channels
        device = buffer.data.device
        self.max_polls = MAX_POLLS[device.type] if max_polls is None else max_polls
        self.num_bytes = buffer.data.numel() - count_signal_bytes(axis.size, channels)
        self.status = torch.zeros(2, dtype=torch.int32, device=device)
        if self.num_bytes < 0:
            raise ArgumentError(
                f"the buffer has only {buffer.data.numel()} bytes",
                where=str(axis),
                next=f"{channels} x {axis.size} signals need "
                f"{count_signal_bytes(axis.size, channels)}, and the data come on top",
            )

    @classmethod
    def create(
        cls,
        axis: Axis,
        num_bytes: int,
        device: torch.device,
        channels: int = 1,
        backend: SymmetricBackend | None = None,
    ) -> OneSidedMemory:
        """`num_bytes` of data on each rank, rounded up to 16; a collective call."""
        backend = choose_backend(axis, device) if backend is None else backend
        aligned = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        total = aligned + count_signal_bytes(axis.size, channels)
        return cls(axis, backend.allocate(axis, total, device), backend, channels)

    @property
    def data(self) -> Tensor:
        """This rank's memory, [num_bytes] of uint8."""
        return self.buffer.data[: self.num_bytes]

    def signal_offset(self, source: int, channel: int = 0) -> int:
        """The byte offset of the flag that rank `source` sets."""
        return self.num_bytes + (channel * self.axis.size + source) * SIGNAL_BYTES

    def put(self, x: Tensor, rank: int, offset: int = 0) -> None:
        """Copy the bytes of a tensor into the memory of a rank, from byte `offset` on."""
        self._check_rank(rank)
        if offset < 0 or offset + x.nbytes > self.num_bytes:
            raise ArgumentError(
                f"bytes {offset} to {offset + x.nbytes} are not in a memory of {self.num_bytes}",
                where=str(self.axis),
                next="create it with as many bytes as the largest put ends at",
            )
        if x.device != self.buffer.data.device:
            raise ArgumentError(
                f"a tensor on {x.device} can't be put into memory on {self.buffer.data.device}",
                next="move it there first",
            )
        self.backend.put(self.buffer, x.detach(), rank, self.data_offset + offset)

    def signal(self, rank: int, value: int, channel: int = 0) -> None:
        """Tell a rank that all earlier puts to it are there; `value` is above the last one."""
        self._check_rank(rank, channel)
        offset = self.signal_offset(self.axis.index, channel)
        self.backend.signal(self.buffer, rank, offset, value)

    def wait(self, rank: int, value: int, channel: int = 0) -> None:
        """Wait until a rank has signalled `value` or a later number."""
        self._check_rank(rank, channel)
        offset = self.signal_offset(rank, channel)
        flag = FlagWait(self.axis.index, rank, offset, value, self.max_polls)
        self.backend.wait(self.buffer, flag, self.status)

    def check(self) -> None:
        """Raise the error that the device has recorded, if any. Waits for the device."""
        code, index = self.status.tolist()
        if code == TIMED_OUT.value:
            rank = self.axis.ranks[index]
            raise RankError(
                f"rank {rank} did not answer: its signal never arrived",
                ranks=(rank,),
                where=str(self.axis),
                next="look at the last output of that process; start all ranks again",
            )

    def _check_rank(self, rank: int, channel: int = 0) -> None:
        if not (0 <= rank < self.axis.size and 0 <= channel < self.channels):
            raise ArgumentError(
                f"rank {rank}, channel {channel}",
                where=f"{self.axis.size} ranks, {self.channels} channels",
                next="ranks are indices of the axis",
            )


def count_signal_bytes(num_ranks: int, channels: int) -> int:
    """Bytes of the signals of one rank."""
    return -(-num_ranks * channels * SIGNAL_BYTES // ALIGNMENT) * ALIGNMENT


__all__ = [
    "OneSidedMemory",
    "count_signal_bytes",
    "put",
    "record_timeout",
    "signal",
    "wait_signal",
]
