"""CUDA graphs of a final trace: the whole of it as one graph, or its capturable parts.

In: a final trace of kernels and library calls. Out: `CudaGraphPlan.wrap`, which makes its function one that
is captured and replayed as a whole. A trace with nodes that can't be captured (CPU tensors, data-dependent
sizes, collectives) is split instead: each run of capturable nodes becomes one call `graph_0(...)` of the
trace, and the other nodes stay between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

from fulgurite.cudagraph import (
    CUDA,
    CaptureMemory,
    CudaGraphMode,
    GraphedFunction,
    GraphInterface,
    OutputMode,
    StaticAddresses,
)
from fulgurite.executors.base import Executor
from fulgurite.executors.regions import lower_trace
from fulgurite.executors.result_tail import split_tail
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
from fulgurite.trace.region import Region, bind_cached_launches
from fulgurite.trace.source import compile_source
from fulgurite.trace.subgraph import SubgraphCall
from fulgurite.trace.trace import copy_module

SYNCHRONIZING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
CAPTURABLE_NAMESPACES = {"aten", "prims", "fulgurite"}  # custom ops may do anything on the host
HOST_OPS = {"fulgurite::custom_op_gradient"}
MASK_OPS = {"aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put"}
SIZE_OPS = {
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
}
BACKEND = CUDA  # tests replace it
MIN_LAUNCHES = 2  # of a trace that is captured by itself: one launch is no slower than a replay
BoxedFunction = Callable[[list[Any]], Sequence[Any]]
Report = Callable[[str], None]


class ProgramMemory:
    """Memory of the CUDA graphs of one program."""

    def __init__(self) -> None:
        addresses = StaticAddresses()  # backward reads what forward saved in place
        self.forward = CaptureMemory(BACKEND, addresses)
        self.backward = CaptureMemory(BACKEND, addresses, self.forward)

    def of(self, kind: str) -> CaptureMemory:
        return self.backward if kind == "backward" else self.forward


@dataclass(frozen=True)
class CudaGraphPlan:
    """How a final trace is captured.

    num_user_outputs   how many outputs go to the user; the others are saved for backward
    """

    mode: CudaGraphMode
    memory: CaptureMemory
    num_user_outputs: int

    def can_capture(self, trace: Trace) -> bool:
        """Whether the trace is captured as a whole."""
        launches = [node for node in trace.ops if not is_free(node)]
        few = len(launches) < (1 if self.mode is True else MIN_LAUNCHES)
        return not few and all(self._is_capturable(node) for node in launches)

    def should_split(self, trace: Trace) -> bool:
        """Whether only parts of the trace can be captured.

        A trace that writes to its inputs is not split: its writes must stay after all readers.
        """
        if any(mutated_inputs(node) for node in trace.ops):
            return False
        launches = [node for node in trace.ops if not is_free(node)]
        capturable = sum(map(self._is_capturable, launches))
        return MIN_LAUNCHES <= capturable < len(launches)

    def _is_capturable(self, node: fx.Node) -> bool:
        return is_capturable(node, self.memory.backend.device_type)

    def wrap(
        self, trace: Trace, plain: BoxedFunction, captured: BoxedFunction, report: Report
    ) -> GraphedFunction:
        """The trace's function, captured after some calls.

        trace      without sub-graphs
        plain      what runs without a graph
        captured   the Python function of the trace
        """
        modes = tuple(self._output_mode(trace, k) for k in range(len(trace.outputs)))
        split = split_tail(trace, modes)
        if split is not None:
            captured = bind_cached_launches(split.head.compile())
            internal: OutputMode = "internal"
            modes += (internal,) * split.num_internal
        interface = GraphInterface(
            modes,
            _find_device(trace.graph, self.memory.backend.device_type),
            _mutated_positions(trace.graph),
            _dynamic_positions(trace.inputs),
        )
        return GraphedFunction(
            trace.name,
            plain,
            interface,
            self.memory,
            captured=captured,
            tail=None if split is None else split.tail,
            forced=self.mode is True,
            report=report,
        )

    def _output_mode(self, trace: Trace, position: int) -> OutputMode:
        is_shared = trace.kind == "backward" or position >= self.num_user_outputs
        return "shared" if is_shared else "copied"

    def split(self, trace: Trace) -> Trace:
        """Replace the capturable parts of a trace by CUDA graphs."""
        module = copy_module(trace.module)
        executor = CudaGraphExecutor(self)
        output_modes = self._node_modes(trace, module.graph)
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            copy_meta(node, node)  # don't change the metadata of the earlier stage
            set_cudagraph_output(node, output_modes.get(node, "shared"))
            if self._is_capturable(node):
                enter_cudagraph(node, executor.name)
            else:
                set_executor(node, TORCH.name)
        return lower_trace(trace.with_module(module), [executor, TORCH])

    def _node_modes(self, trace: Trace, graph: fx.Graph) -> dict[fx.Node, OutputMode]:
        """The modes of the nodes that the program returns."""
        modes: dict[fx.Node, OutputMode] = {}
        outputs = graph.output_node().args[0]
        nodes = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        for position, node in enumerate(nodes):
            if isinstance(node, fx.Node) and modes.get(node) != "copied":
                modes[node] = self._output_mode(trace, position)
        for node in reversed(graph.nodes):  # the base of a returned view is returned with it
            if node in modes and is_view(node):
                for source in node.all_input_nodes:
                    modes.setdefault(source, modes[node])
        return modes


class CudaGraphExecutor(Executor):
    """Runs the nodes that `CudaGraphPlan.split` assigned to it."""

    name = "cudagraph"
    falls_back_if_failed = True  # the step is left out
    region_name = "graph"

    def __init__(self, plan: CudaGraphPlan) -> None:
        self.plan = plan
        self.num_graphs = 0

    def claims(self, node: fx.Node) -> bool:
        return executor_of(node) == self.name

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        for node in region.graph.nodes:
            leave_cudagraph(node)
        run = compile_source(render(region, "graph", (), "boxed"), "<fulgurite graph>")
        placeholders = region.graph.find_nodes(op="placeholder")
        interface = GraphInterface(
            tuple(cudagraph_output(n) for n in region.graph.output_node().args[0]),
            _find_device(region.graph, self.plan.memory.backend.device_type),
            _mutated_positions(region.graph),
            _dynamic_positions(placeholders),
        )
        name = f"graph_{self.num_graphs}"
        self.num_graphs += 1
        forced = self.plan.mode is True
        return GraphedRegion(GraphedFunction(name, run, interface, self.plan.memory, forced=forced))


@dataclass(frozen=True)
class GraphedRegion:
    """A part of a trace that is captured by itself."""

    graphed: GraphedFunction

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self.graphed(list(inputs))


def find_cuda_graphs(trace: Trace) -> list[GraphedFunction]:
    """The CUDA graphs of a trace that is captured in parts, in order."""
    calls = [n.target.call for n in trace.graph.nodes if isinstance(n.target, Region)]
    return [call.graphed for call in calls if isinstance(call, GraphedRegion)]


def _mutated_positions(graph: fx.Graph) -> tuple[int, ...]:
    """Positions of the inputs that a graph writes to, donated buffers included."""
    written = {target for node in graph.nodes for target in mutated_inputs(node)}
    for node in graph.nodes:
        if isinstance(node.target, Region):
            overwritten = getattr(node.target.call, "overwritten_inputs", ())
            written |= {node.args[k] for k in overwritten}
    placeholders = graph.find_nodes(op="placeholder")
    return tuple(k for k, node in enumerate(placeholders) if node in written)


def _dynamic_positions(inputs: Sequence[fx.Node]) -> tuple[int, ...]:
    """Positions of inputs with symbolic sizes, and of numbers."""
    values = [fake_value(node) for node in inputs]
    return tuple(
        k for k, value in enumerate(values) if not isinstance(value, Tensor) or free_symbols(value)
    )


def _find_device(graph: fx.Graph, device_type: str) -> torch.device:
    """The device of a graph's first value on a GPU: an input, or a tensor that it creates."""
    devices = (t.device for node in graph.nodes for t in iter_tensors(fake_value(node)))
    return next(device for device in devices if device.type == device_type)


def is_free(node: fx.Node) -> bool:
    """Whether a node launches nothing: a view, an item of a tuple, or arithmetic on sizes."""
    if is_view(node) or aten_op(node) in SIZE_OPS:
        return True
    return not any(True for n in (node, *node.all_input_nodes) for _ in iter_tensors(fake_value(n)))


def is_capturable(node: fx.Node, device_type: str = "cuda") -> bool:
    """Whether a CUDA graph can capture this node of a final trace."""
    values = [t for n in (node, *node.all_input_nodes) for t in iter_tensors(fake_value(n))]
    if not values or any(t.device.type != device_type for t in values):
        return False
    if len({t.device for t in values}) > 1 or free_unbacked_symbols(values):
        return False
    if isinstance(node.target, SubgraphCall):
        inner = [n for n in node.target.module.graph.nodes if n.op == "call_function"]
        return all(is_free(n) or is_capturable(n, device_type) for n in inner)
    if isinstance(node.target, Region):
        return bool(getattr(node.target.call, "is_capturable", True))
    op = aten_op(node)
    if getattr(op, "namespace", "aten") not in CAPTURABLE_NAMESPACES or _reads_on_host(node):
        return False
    is_replayable = is_pure(node) or is_random(node) or is_input_mutation(node)
    return is_replayable and not SYNCHRONIZING_TAGS & set(getattr(op, "tags", ()))


def _reads_on_host(node: fx.Node) -> bool:
    """Whether an op waits for values on the device, although no tag says so."""
    schema = getattr(aten_op(node), "_schema", None)
    name = schema.name if schema is not None else ""
    if name in MASK_OPS:  # positions of a boolean mask are counted on the host
        masks = [t for n in node.all_input_nodes[1:] for t in iter_tensors(fake_value(n))]
        return any(t.dtype in (torch.bool, torch.uint8) for t in masks)
    return name in HOST_OPS
