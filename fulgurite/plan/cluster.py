"""GPUs, links and clusters: names such as `h200` and `8x2` in, sizes and speeds out.

Memory is what torch reports, in GiB. Bandwidths are those of datasheets, in GB/s and one direction;
TFLOP/s are those of dense GEMMs with 16-bit and with 8-bit operands. The network bandwidth of
data-center GPUs assumes one 400 Gbit/s port a GPU. Measured speeds replace them (`LinkSpeeds`). No GPU
is needed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fulgurite.errors import ArgumentError

MAX_GPUS = 1_000_000
# Until the data of a small collective have arrived: typical values, not measured by us.
LINK_LATENCY = 5e-6
NETWORK_LATENCY = 15e-6


@dataclass(frozen=True)
class GPU:
    """Memory in GiB, bandwidths in GB/s (memory, within a node, between nodes), and TFLOP/s."""

    name: str
    memory_gib: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    tflops_16_bit: float
    tflops_8_bit: float


GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("b200", 178.4, 8000, 900, 50, 2250, 4500),
        GPU("h200", 139.8, 4800, 450, 50, 989, 1979),
        GPU("h100", 79.1, 3350, 450, 50, 989, 1979),
        GPU("a100", 79.2, 2039, 300, 25, 312, 312),
        GPU("mi300x", 191.5, 5300, 448, 50, 1307, 2615),
        GPU("l40s", 44.4, 864, 32, 25, 362, 733),
        GPU("rtx-5090", 31.4, 1792, 64, 1.25, 210, 419),
        GPU("rtx-4090", 23.6, 1008, 32, 1.25, 165, 330),
        GPU("l4", 22.0, 300, 32, 3, 121, 242),
        GPU("t4", 14.6, 320, 16, 3, 65, 65),
    )
}


@dataclass(frozen=True)
class LinkSpeeds:
    """Links of one GPU: bytes/s that it sends, and seconds until a small message has arrived.

    link      to the GPUs of its node
    network   to the GPUs of other nodes
    """

    link: float
    network: float
    link_latency: float = LINK_LATENCY
    network_latency: float = NETWORK_LATENCY


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` machines of `gpus_per_node` GPUs each."""

    gpu: GPU
    gpus_per_node: int
    num_nodes: int
    link_latency: float = LINK_LATENCY
    network_latency: float = NETWORK_LATENCY

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_node * self.num_nodes

    @property
    def links(self) -> LinkSpeeds:
        gpu = self.gpu
        return LinkSpeeds(
            gpu.link_bandwidth * 1e9,
            gpu.network_bandwidth * 1e9,
            self.link_latency,
            self.network_latency,
        )

    def __str__(self) -> str:
        gpus = f"{self.num_gpus} × {self.gpu.name}" if self.num_gpus > 1 else self.gpu.name
        if self.num_nodes == 1:
            return gpus
        return f"{gpus}, {self.num_nodes} nodes of {self.gpus_per_node}"


@dataclass(frozen=True)
class MeasuredSpeeds:
    """What the user has measured; None: those of the datasheet. In GB/s and µs."""

    link: float | None = None
    network: float | None = None
    latency: float | None = None
    network_latency: float | None = None


AS_PUBLISHED = MeasuredSpeeds()


def parse_cluster(
    text: str,
    name: str = "h200",
    memory: float | None = None,
    *,
    nodes: int | None = None,
    measured: MeasuredSpeeds = AS_PUBLISHED,
) -> Cluster:
    """`8` is one node of eight GPUs, `8x2` two nodes of eight; `nodes` divides all of them.

    `memory` overrides the GPU's GiB, `measured` its speeds.
    """
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip().lower())
    gpus_per_node, num_nodes = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
    if not 1 <= gpus_per_node * num_nodes <= MAX_GPUS:
        raise ArgumentError(
            f"--gpus {text} is not a number of GPUs",
            next=f"8, or 8x2 for two nodes of eight; at most {MAX_GPUS:,} in total",
        )
    if nodes is not None:
        gpus_per_node, num_nodes = _divide_into_nodes(gpus_per_node, num_nodes, nodes)
    if name.lower() not in GPUS:
        raise ArgumentError(f"unknown GPU {name!r}", next=f"one of {', '.join(GPUS)}")
    values = {"memory": memory, "link": measured.link, "network": measured.network}
    for option, unit in (("memory", "GiB"), ("link", "GB/s"), ("network", "GB/s")):
        value = values[option]
        if value is not None and not 0 < value < 1e6:
            raise ArgumentError(f"--{option} {value:g} must be a number of {unit} above 0")
    gpu = GPUS[name.lower()]
    gpu = replace(
        gpu,
        memory_gib=gpu.memory_gib if memory is None else memory,
        link_bandwidth=measured.link or gpu.link_bandwidth,
        network_bandwidth=measured.network or gpu.network_bandwidth,
    )
    return Cluster(
        gpu,
        gpus_per_node,
        num_nodes,
        _latency("latency", measured.latency, LINK_LATENCY),
        _latency("network-latency", measured.network_latency, NETWORK_LATENCY),
    )


def _latency(option: str, microseconds: float | None, default: float) -> float:
    if microseconds is None:
        return default
    if not 0 <= microseconds < 1e9:
        raise ArgumentError(f"--{option} {microseconds:g} must be a number of µs, 0 or more")
    return microseconds * 1e-6


def _divide_into_nodes(gpus_per_node: int, num_nodes: int, nodes: int) -> tuple[int, int]:
    """GPUs of a node, and nodes; both `8x2` and `16 --nodes 2` are two nodes of eight."""
    total = gpus_per_node * num_nodes
    if nodes < 1 or total % nodes or num_nodes not in (1, nodes):
        divisors = [str(n) for n in range(1, min(total, 64) + 1) if total % n == 0]
        raise ArgumentError(
            f"--nodes {nodes} does not divide {total} GPUs"
            if num_nodes == 1
            else f"--nodes {nodes}, but --gpus {gpus_per_node}x{num_nodes} are {num_nodes} nodes",
            next=f"--nodes {', '.join(divisors)}" if num_nodes == 1 else "omit --nodes",
        )
    return total // nodes, nodes
