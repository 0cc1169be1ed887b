"""Capture CUDA graphs: capturable parts of a final trace become graph calls.

In: a final trace of kernels and library calls. Out: the same trace, with each run of capturable nodes as
one call. Other nodes stay between them: CPU tensors, data-dependent sizes, collectives, and generated
kernels whose seed the host draws (a replay would draw the same numbers each time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fulgurite.cudagraph import CudaCapturedCall, GraphedFunction, OutputMode
from fulgurite.executors.base import Executor
from fulgurite.executors.regions import lower_trace
from fulgurite.executors.torch import TORCH
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view, iter_tensors
from fulgurite.trace.mutations import is_input_mutation, mutated_inputs
from fulgurite.trace.node_meta import (
    aten_op,
    copy_meta,
    cudagraph_output,
    enter_cudagraph,
    executor_of,
    fake_value,
    leave_cudagraph,
    set_cudagraph_output,
    set_executor,
)
from fulgurite.trace.printer import render
from fulgurite.trace.purity import is_pure, is_random
from fulgurite.trace.region import Region
from fulgurite.trace.source import compile_source
from fulgurite.trace.trace import copy_module

SYNCHRONIZING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
CAPTURE = CudaCapturedCall
WARMUPS = {
    "inference": 2,
    "forward": 2,
    "backward": 4,
}  # backward's inputs are static only once forward is captured


class CudaGraphExecutor(Executor):
    """Runs the nodes that `capture_cuda_graphs` assigned to it."""

    name = "cudagraph"
    falls_back_if_failed = True  # the step is left out
    region_name = "graph"

    def __init__(self, warmups: int) -> None:
        self.warmups = warmups
        self.graphs: list[GraphedFunction] = []

    def claims(self, node: fx.Node) -> bool:
        return executor_of(node) == self.name

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        for node in region.graph.nodes:
            leave_cudagraph(node)
        run = compile_source(render(region, "graph", (), "boxed"), "<fulgurite graph>")
        output_modes: list[OutputMode] = [
            cudagraph_output(n) for n in region.graph.output_node().args[0]
        ]
        mutated = {target for node in region.graph.nodes for target in mutated_inputs(node)}
        placeholders = region.graph.find_nodes(op="placeholder")
        graphed = GraphedFunction(
            f"graph_{len(self.graphs)}",
            lambda *inputs: run(list(inputs)),
            output_modes,
            mutated_inputs=[k for k, node in enumerate(placeholders) if node in mutated],
            warmups=self.warmups,
            capture=CAPTURE,
        )
        self.graphs.append(graphed)
        return graphed


def capture_cuda_graphs(trace: Trace, num_user_outputs: int) -> Trace:
    """Replace the capturable parts of a trace by CUDA graphs.

    num_user_outputs   how many outputs go to the user; the others are saved for backward
    """
    module = copy_module(trace.module)
    executor = CudaGraphExecutor(WARMUPS[trace.kind])
    output_modes = _output_modes(trace, module.graph, num_user_outputs)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        copy_meta(node, node)  # don't change the metadata of the earlier stage
        set_cudagraph_output(node, output_modes.get(node, "internal"))
        if is_capturable(node):
            enter_cudagraph(node, executor.name)
        else:
            set_executor(node, TORCH.name)
    return lower_trace(trace.with_module(module), [executor, TORCH])


def find_cuda_graphs(trace: Trace) -> list[GraphedFunction]:
    """The CUDA graphs of a final trace, in order."""
    calls = [n.target.call for n in trace.graph.nodes if isinstance(n.target, Region)]
    return [call for call in calls if isinstance(call, GraphedFunction)]


def _output_modes(
    trace: Trace, graph: fx.Graph, num_user_outputs: int
) -> dict[fx.Node, OutputMode]:
    """How the program's outputs are returned: gradients and saved tensors without a copy."""
    modes: dict[fx.Node, OutputMode] = {}
    outputs = graph.output_node().args[0]
    for position, node in enumerate(outputs if isinstance(outputs, (list, tuple)) else [outputs]):
        is_shared = trace.kind == "backward" or position >= num_user_outputs
        if isinstance(node, fx.Node):
            is_copied = modes.get(node) == "copied" or not is_shared
            modes[node] = "copied" if is_copied else "shared"
    for node in reversed(graph.nodes):  # the base of a returned view is returned with it
        if node in modes and is_view(node):
            for source in node.all_input_nodes:
                modes.setdefault(source, modes[node])
    return modes


def is_capturable(node: fx.Node) -> bool:
    """Whether a CUDA graph can capture this node of a final trace."""
    values = [t for n in (node, *node.all_input_nodes) for t in iter_tensors(fake_value(n))]
    if not values or any(t.device.type != "cuda" for t in values):
        return False
    if len({t.device for t in values}) > 1 or free_unbacked_symbols(values):
        return False
    if isinstance(node.target, Region):
        return bool(getattr(node.target.call, "is_capturable", True))
    tags = set(getattr(aten_op(node), "tags", ()))
    is_replayable = is_pure(node) or is_random(node) or is_input_mutation(node)
    return not SYNCHRONIZING_TAGS & tags and is_replayable
