"""The topology: which node each rank is on. A store in, one node number a rank out.

    publish_node(store, rank) ─ barrier ─ read_nodes(store, 4)     (0, 0, 1, 1): 0 and 1 share a node

Ranks are on the same node if they see the same host name and the same boot of its kernel, and if one
torchrun agent started them (GROUP_RANK). A mesh exchanges these names through its store when it starts.
Nodes are numbered by their first rank.

`nodes=2`, or the environment variable FULGURITE_NODES=2, overrides it: consecutive ranks are divided into
as many emulated nodes (emulation.py). A single machine then behaves like several.

Shapes: W ranks.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store

from fulgurite.errors import ArgumentError

NODES_VARIABLE = "FULGURITE_NODES"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs between machines with one host name


@dataclass(frozen=True)
class NodeLayout:
    """Ranks of an axis by node: `ranks_NL[n][l]` is the axis index of local rank l on node n."""

    ranks_NL: tuple[tuple[int, ...], ...]

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_NL)

    @property
    def ranks_per_node(self) -> int:
        return len(self.ranks_NL[0])

    def position(self, index: int) -> tuple[int, int]:
        """Node and local rank of an axis index."""
        for node, ranks in enumerate(self.ranks_NL):
            if index in ranks:
                return node, ranks.index(index)
        raise AssertionError(f"{index} is on no node of {self.ranks_NL}")


def layout_nodes(nodes_W: tuple[int, ...]) -> NodeLayout:
    """The ranks of each node; ArgumentError if nodes have different numbers of ranks."""
    ranks: dict[int, list[int]] = {}
    for index, node in enumerate(nodes_W):
        ranks.setdefault(node, []).append(index)
    reason = unequal_nodes_reason(nodes_W)
    if reason is not None:
        raise ArgumentError(
            reason, next="start equally many ranks on each node, or use transport='all_to_all'"
        )
    return NodeLayout(tuple(tuple(ranks[node]) for node in sorted(ranks)))


def unequal_nodes_reason(nodes_W: tuple[int, ...]) -> str | None:
    """What is wrong if nodes have different numbers of ranks; None: nothing."""
    counts = Counter(nodes_W)
    if len(set(counts.values())) == 1:
        return None
    found = ", ".join(f"node {node}: {count}" for node, count in sorted(counts.items()))
    return f"nodes have different numbers of ranks: {found}"


def publish_node(store: Store, rank: int) -> None:
    """Write the name of this rank's node to a store."""
    store.set(f"node-{rank}", node_name())


def read_nodes(store: Store, world_size: int) -> tuple[int, ...]:
    """The node of each rank, after all ranks have published theirs."""
    names = store.multi_get([f"node-{rank}" for rank in range(world_size)])
    return number_nodes([name.decode() for name in names])


def find_emulated_nodes(world_size: int, nodes: int | None = None) -> tuple[int, ...]:
    """The nodes that `nodes` or FULGURITE_NODES asks for; empty if neither is set."""
    if nodes is None:
        nodes = _nodes_from_environment()
    return () if nodes is None else divide_into_nodes(world_size, nodes)


def divide_into_nodes(world_size: int, nodes: int) -> tuple[int, ...]:
    """Consecutive ranks on `nodes` nodes of equal size."""
    if nodes < 1 or world_size % nodes:
        choices = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ArgumentError(
            f"{world_size} ranks can't be divided into {nodes} nodes of equal size",
            next=f"nodes={', '.join(choices)}",
        )
    return tuple(rank // (world_size // nodes) for rank in range(world_size))


def number_nodes(names: list[str]) -> tuple[int, ...]:
    """Node numbers in the order in which names first appear."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def node_name() -> str:
    """What is equal on the ranks of one node, and different on others."""
    boot_id = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return "/".join((socket.gethostname(), boot_id, os.environ.get("GROUP_RANK", "")))


def _nodes_from_environment() -> int | None:
    text = os.environ.get(NODES_VARIABLE, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentError(
            f"{NODES_VARIABLE} is {text!r} and not a number of nodes",
            next=f"unset it, or {NODES_VARIABLE}=2",
        ) from error
