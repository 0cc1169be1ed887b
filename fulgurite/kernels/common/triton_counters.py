"""Counters for programs that share an output tile (split-K, split-KV).

In: how many tiles a launch has. Out: that many zeros on the device. Each program adds one to the
counter of its tile; the last program merges the partial results and sets the counter back to zero.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

RING_SIZE = 1 << 22


class CounterRing:
    """A long ring of zeros. Each call acquires the next stretch.

    So calls on several streams and threads, and CUDA graphs replayed at the same time, never share
    counters.
    """

    def __init__(self, device: torch.device) -> None:
        self.ring = torch.zeros(RING_SIZE, dtype=torch.int32, device=device)
        self.position = 0
        self.lock = threading.Lock()

    def acquire(self, count: int) -> Tensor:
        count = -(-count // 4) * 4  # 16 bytes: kernels are compiled for pointers aligned to 16
        if count > RING_SIZE:
            return torch.zeros(count, dtype=torch.int32, device=self.ring.device)
        with self.lock:
            start = self.position if self.position + count <= RING_SIZE else 0
            self.position = start + count
        return self.ring[start : start + count]


_rings: dict[torch.device, CounterRing] = {}


def acquire_counters(device: torch.device, count: int) -> Tensor:
    """`count` zeros, from the device's ring."""
    ring = _rings.get(device)
    if ring is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)  # owned by the graph
        ring = _rings.setdefault(device, CounterRing(device))
    return ring.acquire(count)


def is_counters(tensor: Tensor) -> bool:
    """Whether a tensor is part of its device's ring."""
    ring = _rings.get(tensor.device)
    if ring is None:
        return False
    return tensor.untyped_storage().data_ptr() == ring.ring.untyped_storage().data_ptr()
