"""GPUs by name and clusters by shape: `h200` and `8x2` in, memory and speeds out. None is needed here.

Memory is what torch reports of the card, GiB; speeds are of datasheets, GB/s: of the memory, to a GPU of
the same node, and to another node (one 400 Gbit/s port a GPU where cards come in such nodes).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fulgurite.errors import ArgumentError

MOST = 1_000_000  # GPUs in all


@dataclass(frozen=True)
class GPU:
    """What a plan has to know of a card."""

    name: str
    memory: float
    bandwidth: float
    link: float
    network: float


GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("b200", 178.4, 8000, 900, 50),
        GPU("h200", 139.8, 4800, 450, 50),
        GPU("h100", 79.1, 3350, 450, 50),
        GPU("a100", 79.2, 2039, 300, 25),
        GPU("mi300x", 191.5, 5300, 448, 50),
        GPU("l40s", 44.4, 864, 32, 25),
        GPU("rtx-5090", 31.4, 1792, 64, 1.25),
        GPU("rtx-4090", 23.6, 1008, 32, 1.25),
        GPU("l4", 22.0, 300, 32, 3),
        GPU("t4", 14.6, 320, 16, 3),
    )
}


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines of `per_node` GPUs each."""

    gpu: GPU
    per_node: int
    nodes: int

    @property
    def count(self) -> int:
        return self.per_node * self.nodes

    def __str__(self) -> str:
        cards = f"{self.count} × {self.gpu.name}" if self.count > 1 else self.gpu.name
        return cards + (f", {self.nodes} nodes of {self.per_node}" if self.nodes > 1 else "")


def read_cluster(text: str, name: str = "h200", memory: float | None = None) -> Cluster:
    """`8` GPUs in one node, or `8x2`: two nodes of eight. `memory` in GiB, where it differs."""
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip().lower())
    per_node, nodes = (int(found[1]), int(found[2] or 1)) if found else (0, 0)
    if not 1 <= per_node * nodes <= MOST:
        raise ArgumentError(
            f"--gpus {text} is no number of GPUs",
            next=f"8, or 8x2 for two nodes of eight; at most {MOST:,} in all",
        )
    if name.lower() not in GPUS:
        raise ArgumentError(f"no figures for the GPU {name!r}", next=f"one of {', '.join(GPUS)}")
    gpu = GPUS[name.lower()]
    if memory is not None:
        if not 0 < memory < 1e6:
            raise ArgumentError(f"--memory {memory:g} must be a number of GiB above 0")
        gpu = GPU(gpu.name, memory, gpu.bandwidth, gpu.link, gpu.network)
    return Cluster(gpu, per_node, nodes)
