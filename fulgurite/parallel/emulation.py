"""Emulated networks: a collective of ranks on several nodes takes as long as a network would take.

    FULGURITE_NODES=4 FULGURITE_NETWORK="latency=100us,bandwidth=1GB/s,loss=0.01" torchrun ...
    Mesh(expert=8, nodes=4, network=EmulatedNetwork(latency=1e-4, bandwidth=1e9))

One machine with emulated nodes (topology.py) is the test bed for transports. After the real transfer each
rank waits for as long as its messages to and from other nodes would take:

    latency + max(bytes sent, bytes received) / bandwidth + lost messages x retransmission

Each rank has a link of its own to the network, as GPUs with a NIC each have. Messages between ranks of
one node cost nothing extra. An empty message is not sent. `loss` is the probability that a message is
lost once; the generator is seeded, so that runs can be repeated.

The host waits, so this is for CPU ranks over gloo. All collectives of collectives.py are delayed, an
all-reduce as a reduce-scatter and an all-gather. `collect_traffic` counts what crossed the network.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fulgurite.errors import ArgumentError

NETWORK_VARIABLE = "FULGURITE_NETWORK"
UNITS = {
    "latency": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "bandwidth": {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9},
    "loss": {"": 1.0},
    "retransmission": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "seed": {"": 1.0},
}
RETRANSMISSION_LATENCIES = 4  # a lost message is sent again after so many latencies


@dataclass
class NetworkTraffic:
    """What this rank has exchanged with other nodes."""

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    lost: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class EmulatedNetwork:
    """Links between nodes.

    latency          seconds from sending to receiving a message
    bandwidth        bytes a second of each rank's link, in each direction
    loss             probability that a message is lost once
    retransmission   seconds until a lost message is sent again; None: four latencies
    seed             of the losses; each rank has its own generator
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    loss: float = 0.0
    retransmission: float | None = None
    seed: int = 0
    traffic: NetworkTraffic = field(default_factory=NetworkTraffic)
    _generators: dict[int, random.Random] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0 and 0 <= self.loss < 1):
            raise ArgumentError(
                f"latency={self.latency}, bandwidth={self.bandwidth}, loss={self.loss}",
                next="latency of at least 0 seconds, bandwidth above 0 bytes a second, loss in [0, 1)",
            )

    def transfer(
        self,
        rank: int,
        is_remote: Sequence[bool],
        sent: Sequence[int],
        received: Sequence[int],
        elapsed: float = 0.0,
    ) -> float:
        """Wait as long as the messages of a rank take; returns the seconds.

        `sent[i]` and `received[i]` are the bytes to and from peer i, on another node if `is_remote[i]`.
        `elapsed`: seconds of other work since the transfer was started, which overlap with it.
        """
        out = [size for size, remote in zip(sent, is_remote, strict=True) if remote and size]
        into = [size for size, remote in zip(received, is_remote, strict=True) if remote and size]
        if not out and not into:
            return 0.0
        lost = self._count_lost(rank, len(into))
        seconds = self.latency + max(sum(out), sum(into)) / self.bandwidth
        seconds += lost * self._retransmission
        traffic = self.traffic
        traffic.messages += len(out)
        traffic.bytes_sent += sum(out)
        traffic.bytes_received += sum(into)
        traffic.lost += lost
        traffic.seconds += seconds
        time.sleep(max(0.0, seconds - elapsed))
        return seconds

    @property
    def _retransmission(self) -> float:
        if self.retransmission is None:
            return RETRANSMISSION_LATENCIES * self.latency
        return self.retransmission

    def _count_lost(self, rank: int, messages: int) -> int:
        if not self.loss:
            return 0
        generator = self._generators.setdefault(rank, random.Random(f"{self.seed}/{rank}"))
        return sum(generator.random() < self.loss for _ in range(messages))

    def collect_traffic(self) -> NetworkTraffic:
        """What has crossed the network since the last call."""
        collected = NetworkTraffic(**vars(self.traffic))
        vars(self.traffic).update(vars(NetworkTraffic()))
        return collected


def network_from_environment() -> EmulatedNetwork | None:
    """The network of FULGURITE_NETWORK; None if it is not set."""
    text = os.environ.get(NETWORK_VARIABLE, "")
    return parse_network(text) if text else None


def parse_network(text: str) -> EmulatedNetwork:
    """`latency=100us,bandwidth=1GB/s,loss=0.01,retransmission=1ms,seed=0`; every part is optional."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?) *([a-zA-Z/]*)", value)
        units = UNITS.get(name, {})
        if match is None or match[2] not in units:
            raise ArgumentError(
                f"{part!r} is not a property of an emulated network",
                where=f"{text!r}",
                next='for example "latency=100us,bandwidth=1GB/s,loss=0.01,retransmission=1ms,seed=0"',
            )
        values[name] = float(match[1]) * units[match[2]]
    return EmulatedNetwork(
        latency=values.get("latency", 0.0),
        bandwidth=values.get("bandwidth", float("inf")),
        loss=values.get("loss", 0.0),
        retransmission=values.get("retransmission"),
        seed=int(values.get("seed", 0)),
    )
