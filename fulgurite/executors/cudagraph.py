"""Stretches of a final trace as CUDA graphs.

In: a final trace, whose lines are kernels and library calls. Out: the same trace with every stretch that can be
recorded as one call. What can't be stays between them: CPU tensors, sizes that depend on data, collectives, and
generated kernels that draw a seed on the host (a replay would draw the same numbers each time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fulgurite.cudagraph import CudaTape, Graphed, Handing
from fulgurite.executors.base import Executor
from fulgurite.executors.regions import lower
from fulgurite.executors.torch import TORCH
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view, op_of, tensors
from fulgurite.trace.printer import render
from fulgurite.trace.region import Region
from fulgurite.trace.text import bind
from fulgurite.trace.trace import copy_module
from fulgurite.trace.writes import writes_only_inputs, written
from fulgurite.transforms.purity import is_pure, is_random

SYNCHRONIZING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
RECORD = CudaTape
WARMUPS = {"inference": 2, "forward": 2, "backward": 4}  # backward waits for forward's addresses


class CudaGraphExecutor(Executor):
    """Runs stretches that were chosen before; see `graphed`."""

    name = "cudagraph"
    region_name = "graph"

    def __init__(self, warmups: int) -> None:
        self.warmups = warmups
        self.graphs: list[Graphed] = []

    def claims(self, node: fx.Node) -> bool:
        return node.meta.get("executor") == self.name

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        for node in region.graph.nodes:
            if "ran_by" in node.meta:
                node.meta["executor"] = node.meta.pop("ran_by")
        run = bind(render(region, "graph", (), "boxed"), "<fulgurite graph>")
        handing: list[Handing] = [n.meta["handing"] for n in region.graph.output_node().args[0]]
        name = f"graph_{len(self.graphs)}"
        changed = {target for node in region.graph.nodes for target in written(node)}
        places = [node for node in region.graph.nodes if node.op == "placeholder"]
        graphed = Graphed(
            name,
            lambda *i: run(list(i)),
            handing,
            written=[k for k, node in enumerate(places) if node in changed],
            warmups=self.warmups,
            record=RECORD,
        )
        self.graphs.append(graphed)
        return graphed


def graphed(trace: Trace, user_results: int) -> Trace:
    """The trace with its capturable stretches as CUDA graphs.

    user_results   how many of its results the user gets; the others are kept for backward
    """
    module = copy_module(trace.module)
    executor = CudaGraphExecutor(WARMUPS[trace.kind])
    handed = _handed(trace, module.graph, user_results)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        node.meta = {**node.meta, "handing": handed.get(node, "inside")}
        if capturable(node):
            node.meta["ran_by"] = node.meta.get("executor", TORCH.name)
            node.meta["executor"] = executor.name
        else:
            node.meta["executor"] = TORCH.name
    return lower(trace.with_module(module), [executor, TORCH])


def cuda_graphs_of(trace: Trace) -> list[Graphed]:
    """The CUDA graphs of a final trace, in order."""
    calls = [n.target.call for n in trace.graph.nodes if isinstance(n.target, Region)]
    return [call for call in calls if isinstance(call, Graphed)]


def _handed(trace: Trace, graph: fx.Graph, user_results: int) -> dict[fx.Node, Handing]:
    """How values that leave the program are handed out: gradients and what backward needs are lent."""
    found: dict[fx.Node, Handing] = {}
    results = graph.output_node().args[0]
    for position, node in enumerate(results if isinstance(results, (list, tuple)) else [results]):
        lent = trace.kind == "backward" or position >= user_results
        if isinstance(node, fx.Node):
            found[node] = "copied" if found.get(node) == "copied" or not lent else "lent"
    for node in reversed(graph.nodes):  # a view that leaves takes its base along
        if node in found and is_view(node):
            for source in node.all_input_nodes:
                found.setdefault(source, found[node])
    return found


def capturable(node: fx.Node) -> bool:
    """Whether a CUDA graph can hold this line of a final trace."""
    values = [t for n in (node, *node.all_input_nodes) for t in tensors(n.meta.get("val"))]
    if not values or any(t.device.type != "cuda" for t in values):
        return False
    if len({t.device for t in values}) > 1 or free_unbacked_symbols(values):
        return False
    if isinstance(node.target, Region):
        return bool(getattr(node.target.call, "capturable", True))
    tags = set(getattr(op_of(node), "tags", ()))
    plain = is_pure(node) or is_random(node) or writes_only_inputs(node)
    return not SYNCHRONIZING & tags and plain
