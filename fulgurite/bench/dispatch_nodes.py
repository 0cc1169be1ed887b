"""All-to-all against hierarchical dispatch on emulated nodes; part of the suite `dispatch` on CPUs.

In: nothing. Out: one row for each number of nodes, routing, wire format and number of tokens, with the
seconds of dispatch and combine by each transport, how many of them the network took, and what
`plan/step_time.py` predicts. Figures are those of rank 0.

gloo processes on this machine are divided into nodes. A network of `LATENCY` and `BANDWIDTH` a rank is
emulated between them (parallel/emulation.py). It is slow, so that the emulated network, and not the cores
that all ranks share, takes most of the time: bytes and messages carry over to other networks, seconds
don't. The prediction has the bytes and one latency for each phase; the measurement also has the counts, the copies,
and whatever the host does. Predictions assume uniform routing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fulgurite.bench import results
from fulgurite.bench.expert_routing import Routing, make_routing, record_load
from fulgurite.bench.moe import GPU_SHAPES, LayerShape
from fulgurite.kernels.dispatch.wire_format import WireFormat
from fulgurite.parallel import AllToAllDispatcher, Axis, Mesh, TokenDispatcher, launch
from fulgurite.parallel.dispatch.hierarchical import HierarchicalDispatcher
from fulgurite.parallel.dispatch.node_axes import split_by_node
from fulgurite.parallel.emulation import EmulatedNetwork, NetworkTraffic
from fulgurite.plan.cluster import LinkSpeeds
from fulgurite.plan.step_time import (
    DispatchShape,
    count_dispatch_traffic,
    predict_dispatch_seconds,
)

Row = dict[str, Any]
SHAPE = GPU_SHAPES[0]
NODES = ((2, 2), (4, 2))  # nodes, ranks of each
LATENCY, BANDWIDTH = 5e-3, 10e6  # seconds; bytes a second
CASES = (  # routing, wire format
    ("uniform", "bf16"),
    ("uniform", "fp8"),
    ("uniform", "nvfp4"),
    ("zipf", "bf16"),
    ("sand", "bf16"),
)
TOKENS = (16, 128)
ROUNDS = 3


def measure_nodes(quick: bool) -> list[Row]:
    """All rows; starts the processes."""
    load_LE = record_load()
    rows: list[Row] = []
    for nodes, local in NODES[:1] if quick else NODES:
        cases = CASES[:2] if quick else CASES
        rows += launch(_measure_on_rank, nodes * local, nodes, cases, load_LE)[0]
    return rows


def _measure_on_rank(nodes: int, cases: tuple[tuple[str, str], ...], load_LE: Tensor) -> list[Row]:
    rows = []
    network = EmulatedNetwork(LATENCY, BANDWIDTH)
    with Mesh(timeout=120, nodes=nodes, network=network) as world, torch.no_grad():
        axis = replace(world.world, name="expert")
        axes = split_by_node(axis)
        for routing_name, wire in cases:
            routing = make_routing(routing_name, SHAPE.experts, load_LE)
            dispatchers: dict[str, TokenDispatcher] = {
                "all_to_all": AllToAllDispatcher(axis, dispatch_format=wire),
                "hierarchical": HierarchicalDispatcher(axes, dispatch_format=wire),
            }
            for tokens in TOKENS:
                row: Row = {
                    "part": "nodes",
                    "shape": SHAPE.name,
                    "nodes": nodes,
                    "ranks_per_node": axes.layout.ranks_per_node,
                    "routing": routing_name,
                    "wire": wire,
                    "tokens": tokens,
                }
                for name, dispatcher in dispatchers.items():
                    measured, traffic = _measure(axis, dispatcher, network, routing, tokens)
                    row[name] = measured
                    row[f"{name}_network"] = traffic.seconds
                    row[f"{name}_bytes"] = traffic.bytes_sent
                    row[f"{name}_predicted"] = _predict(SHAPE, axes.layout, name, wire, tokens)
                rows.append(row)
    return rows


def _measure(
    axis: Axis, dispatcher: TokenDispatcher, network: EmulatedNetwork, routing: Routing, tokens: int
) -> tuple[float, NetworkTraffic]:
    """The median seconds of dispatch and combine, and what crosses the network meanwhile."""
    chosen = routing.draw(tokens, SHAPE.per_token, seed=axis.index)
    generator = torch.Generator().manual_seed(axis.index)
    x = torch.randn(tokens, SHAPE.hidden, generator=generator).bfloat16()
    weights = torch.rand(tokens, SHAPE.per_token, generator=generator)
    readings = []
    for _ in range(1 + ROUNDS):
        torch.distributed.barrier(axis.group)
        network.collect_traffic()
        start = time.perf_counter()
        pending = dispatcher.start_dispatch(x, chosen, SHAPE.experts, weights)
        dispatched = dispatcher.finish_dispatch(pending)
        dispatcher.combine(dispatched.x_SD, dispatched)
        readings.append(time.perf_counter() - start)
    return sorted(readings[1:])[ROUNDS // 2], network.collect_traffic()


def _predict(shape: LayerShape, layout: Any, transport: str, wire: str, tokens: int) -> float:
    """Dispatch in the wire format, combine in 16 bits. Links inside a node cost nothing here."""
    links = LinkSpeeds(link=1e12, network=BANDWIDTH, link_latency=0.0, network_latency=LATENCY)
    ranks = layout.num_nodes * layout.ranks_per_node
    make_shape = partial(
        DispatchShape,
        tokens=tokens,
        top_k=shape.per_token,
        num_experts=shape.experts,
        num_ranks=ranks,
        ranks_per_node=layout.ranks_per_node,
    )
    seconds = 0.0
    for row_bytes in (WireFormat(wire, shape.hidden).row_bytes, 2 * shape.hidden):
        traffic = count_dispatch_traffic(make_shape(row_bytes=row_bytes), transport)
        seconds += predict_dispatch_seconds(traffic, links)
    return seconds


def format_table(rows: list[Row]) -> str:
    """Milliseconds of dispatch and combine: measured, in the network, predicted."""
    head = [
        f"nodes, {LATENCY * 1e3:g} ms, {BANDWIDTH / 1e6:g} MB/s", "routing", "wire", "tokens",
        "all-to-all", "network", "predicted", "hierarchical", "network", "predicted", "speedup",
    ]  # fmt: skip
    lines = [
        [
            f"{row['nodes']} x {row['ranks_per_node']}",
            row["routing"],
            row["wire"],
            str(row["tokens"]),
            *(
                f"{row[name] * 1e3:.0f} ms"
                for transport in ("all_to_all", "hierarchical")
                for name in (transport, f"{transport}_network", f"{transport}_predicted")
            ),
            f"{row['all_to_all'] / row['hierarchical']:.2f}x",
        ]
        for row in rows
    ]
    return results.format_table([head, *lines])
