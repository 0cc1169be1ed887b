"""Collectives in symmetric memory: each rank's tensor in, sums or all tensors out, without the host.

    collectives = SymmetricCollectives.create(axis, device)      on all ranks of the axis
    collectives.all_reduce(x)          the sum of all ranks' x
    collectives.all_gather(x)          all ranks' x, concatenated along dimension 0
    collectives.reduce_scatter(x)      the sum of all ranks' x, of which each rank gets its part
    collectives.all_to_all(x)          part w of x goes to rank w; the received parts, by rank
    collectives.check()                raises what the device has recorded; once a step

One-shot: a rank writes its part into the memory of every other one, and sums what it received in the
order of ranks, in float32. So all ranks get the same bits. Nothing is read on the host, and the step
counters are on the device: a CUDA graph may hold these calls. NCCL can't connect ranks that share a
GPU; these can. A one-shot sum sends W - 1 times the tensor, so NCCL has the large messages where there
is NCCL (`accepts`); without it, they are cut into pieces of `chunk_bytes`.

Memory a rank: 2 buffers x W ranks x `chunk_bytes`, and flags.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, RankError
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.parallel.collectives import all_reduce_min
from fulgurite.parallel.mesh import Axis, Mesh
from fulgurite.parallel.symmetric import collective_kernels as kernels
from fulgurite.parallel.symmetric.memory import (
    SymmetricBuffer,
    allocate_symmetric_buffer,
    no_symmetric_memory_reason,
)

MAX_POLLS = {"cuda": 1 << 26, "cpu": 1 << 19}  # of a flag before a rank counts as lost: about 30 s
MAX_PROGRAMS = 32  # all of them must run at once, beside kernels of other streams
REGION_BYTES = 1 << 15  # of a program and a rank
BLOCK_BYTES = 1 << 12  # of one load; 16 bytes of each thread of 8 warps
NUM_WARPS = 8
MAX_SMALL_BYTES = MAX_PROGRAMS * REGION_BYTES  # of a message, where NCCL has the larger ones
SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SymmetricCollectives:
    """The collectives of one axis. All ranks make the same calls in the same order.

    `max_bytes`: the largest message that `accepts` takes; None: any.
    """

    can_capture = True

    def __init__(
        self,
        axis: Axis,
        buffer: SymmetricBuffer,
        max_bytes: int | None = None,
        max_polls: int | None = None,
        region_bytes: int = REGION_BYTES,
    ) -> None:
        self.axis, self.buffer, self.max_bytes = axis, buffer, max_bytes
        self.device = buffer.data.device
        self.max_polls = MAX_POLLS[self.device.type] if max_polls is None else max_polls
        self.region_bytes, self.chunk_bytes = region_bytes, MAX_PROGRAMS * region_bytes
        self.steps = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=self.device)
        self.status = torch.zeros(2, dtype=torch.int32, device=self.device)
        needed = count_bytes(axis.size, region_bytes)
        if buffer.data.numel() < needed:
            raise ArgumentError(
                f"the buffer has only {buffer.data.numel()} bytes",
                where=str(axis),
                next=f"collectives of {axis.size} ranks need {needed}",
            )

    @classmethod
    def create(
        cls, axis: Axis, device: torch.device, max_bytes: int | None = None
    ) -> SymmetricCollectives:
        """Collectives with a buffer of their own; a collective call."""
        buffer = allocate_symmetric_buffer(axis, count_bytes(axis.size, REGION_BYTES), device)
        return cls(axis, buffer, max_bytes)

    def accepts(self, x: Tensor) -> bool:
        """Whether a message goes through symmetric memory; the same on all ranks."""
        is_small = self.max_bytes is None or x.nbytes <= self.max_bytes
        return is_small and x.device == self.device

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._sum(x, out, part_stride=0)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x; this rank's part of dimension 0, which is a multiple of W."""
        x = x.contiguous()
        rows, rest = divmod(x.shape[0], self.axis.size)
        assert rest == 0, f"{x.shape[0]} rows for {self.axis}"
        out = x.new_empty(rows, *x.shape[1:])
        self._sum(x, out, part_stride=out.numel())
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, which are equally large, concatenated along dimension 0."""
        x = x.contiguous()
        out = x.new_empty(self.axis.size * x.shape[0], *x.shape[1:])
        words = torch.int32 if x.nbytes % 4 == 0 else torch.uint8
        self._exchange(x.view(-1).view(words), out.view(-1).view(words), x.nbytes // words.itemsize)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """Part w of dimension 0 to rank w, in W equal parts; the received parts in rank order."""
        x = x.contiguous()
        assert x.shape[0] % self.axis.size == 0, f"{x.shape[0]} rows for {self.axis}"
        out = torch.empty_like(x)
        part_bytes = x.nbytes // self.axis.size
        words = torch.int32 if part_bytes % 4 == 0 else torch.uint8
        part = part_bytes // words.itemsize
        self._exchange(x.view(-1).view(words), out.view(-1).view(words), part, part_stride=part)
        return out

    def check(self) -> None:
        """Raise the error that the device has recorded, if any. Waits for the device."""
        code, index = self.status.tolist()
        if code == kernels.TIMED_OUT.value:
            rank = self.axis.ranks[index]
            raise RankError(
                f"rank {rank} did not answer: its flag never arrived",
                ranks=(rank,),
                where=str(self.axis),
                next="look at the last output of that process; start all ranks again",
            )

    def _sum(self, x: Tensor, out: Tensor, part_stride: int) -> None:
        if x.dtype not in SUMMED_DTYPES:
            raise ArgumentError(
                f"there is no sum of {x.dtype} over ranks in symmetric memory",
                next=f"one of {', '.join(str(dtype) for dtype in SUMMED_DTYPES)}",
            )
        self._exchange(x, out, out.numel(), part_stride, is_sum=True)

    def _exchange(
        self, x: Tensor, out: Tensor, numel: int, part_stride: int = 0, is_sum: bool = False
    ) -> None:
        """Exchange the `numel` elements of each part, as many at a time as the buffer holds."""
        region = self.region_bytes // x.itemsize
        block = min(BLOCK_BYTES, self.region_bytes) // x.itemsize
        chunk, size = MAX_PROGRAMS * region, self.axis.size
        # A small message is spread over all programs.
        count = max(block, min(region, next_power_of_2(cdiv(numel, MAX_PROGRAMS))))
        for offset in range(0, numel, chunk):
            stop = min(offset + chunk, numel)
            kernels.exchange_kernel[(cdiv(stop - offset, count),)](
                x, out, self.buffer.peer_pointers_W, self.steps, self.status,
                offset, stop, numel, part_stride, self.axis.index, self.max_polls,
                COUNT=count, REGION=region, REGION_BYTES=self.region_bytes,
                MAX_PROGRAMS=MAX_PROGRAMS, W=size, W_PADDED=next_power_of_2(size), BLOCK=block,
                IS_SUM=is_sum, num_warps=NUM_WARPS,
            )  # fmt: skip

    def __str__(self) -> str:
        size = math.ceil(self.buffer.data.numel() / 2**20)
        return f"collectives in symmetric memory, {self.axis}, {size} MiB"


def count_bytes(num_ranks: int, region_bytes: int = REGION_BYTES) -> int:
    """Bytes of one rank's buffer: inboxes and flags."""
    slots = 2 * num_ranks * MAX_PROGRAMS
    return slots * (region_bytes + kernels.FLAG_BYTES.value)


def use_symmetric_collectives(mesh: Mesh) -> None:
    """Give the tensor and the context axis collectives in symmetric memory, if their GPUs have it; a
    collective call."""
    mesh.tensor = _add_collectives(mesh.tensor, mesh.device)
    mesh.context = _add_collectives(mesh.context, mesh.device)


def _add_collectives(axis: Axis, device: torch.device) -> Axis:
    """With NCCL they take small messages only."""
    if axis.size == 1 or device.type != "cuda":
        return axis
    own = no_symmetric_memory_reason(axis, device) is None
    if not all_reduce_min(int(own), axis, "agreement on symmetric memory"):
        return axis
    max_bytes = MAX_SMALL_BYTES if axis.has_nccl else None
    collectives = SymmetricCollectives.create(axis, device, max_bytes)
    return replace(axis, device_collectives=collectives)
