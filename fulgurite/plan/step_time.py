"""The time of a step: bytes, FLOPs and link speeds in, predicted seconds out. By formula, no GPU.

    LayerWork        what one rank reads and computes in a layer
    Traffic          bytes that one rank sends in a collective, inside its node and to other nodes
    StepTime         the parts of a step, and their sum

A layer takes as long as its memory reads or its FLOPs, whichever is longer. Communication does not
overlap with it. A collective takes the time of its bytes and one latency for each phase:

    all-reduce          reduce-scatter in the node, all-reduce over nodes, all-gather in the node
    all-to-all          every row goes to each rank of its experts; both kinds of links at once
    symmetric           the same rows, written by kernels into the memory of other ranks
    hierarchical        one row a node crosses the network; then each node passes it on inside

Tests compare `predict_dispatch_seconds` with emulated nodes, which delay and limit real transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fulgurite.plan.cluster import LinkSpeeds


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one collective. `is_phased`: first the network, then the links."""

    link_bytes: float
    network_bytes: float = 0.0
    is_phased: bool = False


@dataclass(frozen=True)
class DispatchShape:
    """Tokens on their way to experts, equal on all ranks.

    tokens           tokens that a rank sends
    row_bytes        bytes of a token on the wire, with its header
    ranks_per_node   consecutive ranks of the expert axis on one node
    """

    tokens: int
    top_k: int
    num_experts: int
    row_bytes: int
    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)


def count_dispatch_traffic(shape: DispatchShape, transport: str) -> Traffic:
    """The expected bytes of a dispatch, or of a combine, if all experts are equally likely.

    A rank sends nothing to itself. A token is sent once to each rank that has experts of it; by the
    hierarchical transport once to each node.
    """
    ranks, local = shape.num_ranks, min(shape.ranks_per_node, shape.num_ranks)
    sent = shape.tokens * shape.row_bytes
    is_chosen = chance_of_any(shape.num_experts, shape.num_experts / ranks, shape.top_k)
    if transport == "hierarchical" and shape.num_nodes > 1:
        is_node_chosen = chance_of_any(
            shape.num_experts, shape.num_experts / shape.num_nodes, shape.top_k
        )
        # Each rank passes on, inside its node, as many rows as it sent to other nodes.
        return Traffic(
            sent * ranks * is_chosen * (local - 1) / local,
            sent * (shape.num_nodes - 1) * is_node_chosen,
            is_phased=True,
        )
    return Traffic(sent * (local - 1) * is_chosen, sent * (ranks - local) * is_chosen)


def chance_of_any(total: int, marked: float, drawn: int) -> float:
    """The chance that at least one of `drawn` different items is among the marked ones."""
    none = 1.0
    for index in range(min(drawn, total)):
        none *= max(0.0, total - marked - index) / (total - index)
    return 1.0 - none


def predict_dispatch_seconds(traffic: Traffic, links: LinkSpeeds) -> float:
    """Seconds until all rows of a dispatch, or of a combine, have arrived."""
    link = traffic.link_bytes / links.link
    network = traffic.network_bytes / links.network
    if traffic.is_phased:
        return network + links.network_latency + link + links.link_latency
    if not traffic.network_bytes:
        return link + links.link_latency
    return max(link + links.link_latency, network + links.network_latency)


def predict_all_reduce_seconds(
    num_bytes: float, num_ranks: int, ranks_per_node: int, links: LinkSpeeds
) -> float:
    """Seconds of an all-reduce of `num_bytes`, or of a reduce-scatter and an all-gather of them."""
    if num_ranks == 1:
        return 0.0
    local = min(ranks_per_node, num_ranks)
    nodes = -(-num_ranks // local)
    seconds = 0.0
    if local > 1:
        seconds += 2 * (local - 1) / local * num_bytes / links.link + links.link_latency
    if nodes > 1:
        seconds += 2 * (nodes - 1) / nodes * (num_bytes / local) / links.network
        seconds += links.network_latency
    return seconds


def predict_all_gather_seconds(
    num_bytes: float, num_ranks: int, ranks_per_node: int, links: LinkSpeeds
) -> float:
    """Seconds of an all-gather whose result has `num_bytes`: half of an all-reduce's bytes."""
    return predict_all_reduce_seconds(num_bytes / 2, num_ranks, ranks_per_node, links)


def predict_send_seconds(num_bytes: float, crosses_nodes: bool, links: LinkSpeeds) -> float:
    """Seconds of one message to another rank."""
    if crosses_nodes:
        return num_bytes / links.network + links.network_latency
    return num_bytes / links.link + links.link_latency


@dataclass(frozen=True)
class LayerWork:
    """Bytes that a rank reads from memory, and FLOPs that it computes, in one layer."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step by part. `tokens`: of all replicas.

    memory, compute   reads and FLOPs of all layers; a layer takes the longer of the two, and `layers`
                      is their sum
    transfers         hidden states from one pipeline stage to the next
    """

    tokens: int
    memory: float
    compute: float
    layers: float
    all_reduce: float = 0.0
    dispatch: float = 0.0
    combine: float = 0.0
    transfers: float = 0.0

    @property
    def communication(self) -> float:
        return self.all_reduce + self.dispatch + self.combine + self.transfers

    @property
    def total(self) -> float:
        return self.layers + self.communication

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total if self.total else math.inf


def time_layers(
    tokens: int, layers: Iterable[LayerWork], bandwidth: float, flops_per_second: float
) -> StepTime:
    """The step without communication; `bandwidth` is the memory's, in bytes/s."""
    memory = compute = longest = 0.0
    for work in layers:
        read, computed = work.bytes / bandwidth, work.flops / flops_per_second
        memory, compute, longest = memory + read, compute + computed, longest + max(read, computed)
    return StepTime(tokens, memory, compute, longest)
