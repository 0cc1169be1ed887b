"""GPUs and clusters: names such as `h200` and `8x2` in, memory sizes and bandwidths out.

Memory is what torch reports, in GiB. Bandwidths are those of datasheets, in GB/s. The network
bandwidth of data-center GPUs assumes one 400 Gbit/s port a GPU. No GPU is needed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fulgurite.errors import ArgumentError

MAX_GPUS = 1_000_000


@dataclass(frozen=True)
class GPU:
    """Memory in GiB, and bandwidths in GB/s: of the memory, within a node, between nodes."""

    name: str
    memory_gib: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float


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
    """`num_nodes` machines of `gpus_per_node` GPUs each."""

    gpu: GPU
    gpus_per_node: int
    num_nodes: int

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_node * self.num_nodes

    def __str__(self) -> str:
        gpus = f"{self.num_gpus} × {self.gpu.name}" if self.num_gpus > 1 else self.gpu.name
        if self.num_nodes == 1:
            return gpus
        return f"{gpus}, {self.num_nodes} nodes of {self.gpus_per_node}"


def parse_cluster(text: str, name: str = "h200", memory: float | None = None) -> Cluster:
    """`8` is one node of eight GPUs, `8x2` two nodes of eight. `memory` overrides the GPU's GiB."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip().lower())
    gpus_per_node, num_nodes = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
    if not 1 <= gpus_per_node * num_nodes <= MAX_GPUS:
        raise ArgumentError(
            f"--gpus {text} is not a number of GPUs",
            next=f"8, or 8x2 for two nodes of eight; at most {MAX_GPUS:,} in total",
        )
    if name.lower() not in GPUS:
        raise ArgumentError(f"unknown GPU {name!r}", next=f"one of {', '.join(GPUS)}")
    gpu = GPUS[name.lower()]
    if memory is not None:
        if not 0 < memory < 1e6:
            raise ArgumentError(f"--memory {memory:g} must be a number of GiB above 0")
        gpu = GPU(gpu.name, memory, gpu.memory_bandwidth, gpu.link_bandwidth, gpu.network_bandwidth)
    return Cluster(gpu, gpus_per_node, num_nodes)
