"""Symmetric memory between processes on a CPU: every rank sees what every other rank writes."""

from __future__ import annotations

import torch

from fulgurite.parallel import Mesh
from fulgurite.parallel.symmetric.memory import SHARED_MEMORY, allocate_symmetric_buffer


def write_and_read(count: int) -> tuple[list[int], list[str]]:
    """Each rank writes its number into all buffers at its own place; the buffer of this rank."""
    with Mesh(count, 1, count, timeout=60) as mesh:
        buffer = allocate_symmetric_buffer(mesh.expert, 4096, mesh.device)
        assert not buffer.data.any(), "a new buffer is zero"
        assert buffer.peer_pointers_W[mesh.expert.index] == buffer.data.data_ptr()
        torch.distributed.barrier()
        for peer in buffer.owner:
            peer[mesh.rank] = mesh.rank + 1
        torch.distributed.barrier()
        return buffer.data[:count].tolist(), [
            path.name for path in SHARED_MEMORY.glob("fulgurite-*")
        ]


def test_ranks_write_into_each_other(ranks):
    before = {path.name for path in SHARED_MEMORY.glob("fulgurite-*")}
    for found, names in ranks(3).run(write_and_read, 3):
        assert found == [1, 2, 3]
        assert before.issuperset(names)  # nothing is left behind, also if a rank is killed now
