# mypy: allow-untyped-defs, allow-incomplete-defs
"""Counters for programs that share a tile.

In: how many tiles a launch has. Out: that many zeros on the device, which are zeros again when the
launch is over.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

COUNTERS = 1 << 22


class Counters:
    """Zeros that count the finished parts of each tile; whoever is last sets its own back to zero.

    Each call takes the next stretch of a long ring, so that calls on several streams and from several
    threads, and CUDA graphs that are replayed at the same time, count apart.
    """

    def __init__(self, device: torch.device) -> None:
        self.ring = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self.position = 0
        self.taking = threading.Lock()

    def take(self, count: int) -> Tensor:
        count = -(-count // 4) * 4  # 16 bytes: kernels are compiled for pointers so aligned
        if count > COUNTERS:
            return torch.zeros(count, dtype=torch.int32, device=self.ring.device)
        with self.taking:
            start = self.position if self.position + count <= COUNTERS else 0
            self.position = start + count
        return self.ring[start : start + count]


_counters: dict[torch.device, Counters] = {}


def take_counters(device: torch.device, count: int) -> Tensor:
    found = _counters.get(device)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)  # the graph's own
        found = _counters.setdefault(device, Counters(device))
    return found.take(count)
