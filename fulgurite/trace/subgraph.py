"""Sub-graphs: a repeated layer of a model, as a function that the model's trace calls.

In: the graph of one layer. Out: `SubgraphCall`, the target of one call per layer in every trace of the
model, and `inline_subgraphs`, which replaces the calls by the layer's own nodes.

A call's results share no memory with each other or with the inputs, and it mutates nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.trace.cost import is_view
from fulgurite.trace.node_meta import (
    copy_meta,
    fake_value,
    offset_shift,
    set_offset_shift,
    storage_offset,
)
from fulgurite.trace.region import Region

SUBGRAPH_EXECUTOR = "subgraph"


@dataclass(frozen=True, eq=False)
class SubgraphCall(Region):
    """The target of a layer's call. `module` is the layer's graph at the same stage as the trace.

    `call` depends on the stage. In a captured trace it is the op that AOTAutograd traces, in a
    functional one the graph itself, in a final one the compiled graph.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> SubgraphCall:
        return self  # graphs that are copied keep calling the same layer


def subgraph_calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that call a sub-graph."""
    return [node for node in graph.nodes if isinstance(node.target, SubgraphCall)]


def is_subgraph_result(node: fx.Node) -> bool:
    """Whether the node is a call of a sub-graph, or one of its results."""
    called = node.args[0] if node.target is operator.getitem else node
    return isinstance(called, fx.Node) and isinstance(called.target, SubgraphCall)


def inline_subgraphs(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module in which the nodes of each sub-graph replace its calls."""
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = {node: graph.node_copy(node) for node in placeholders}
    results = _copy_body(module, graph, values, attributes)
    copy_meta(module.graph.output_node(), graph.output(results))
    inlined = _LazyGraphModule(attributes, graph, class_name="Trace")
    inlined.meta = dict(module.meta)
    return inlined


def _copy_body(
    module: fx.GraphModule,
    graph: fx.Graph,
    values: dict[fx.Node, fx.Node],
    attributes: dict[str, Any],
) -> Any:
    """Append copies of a graph's nodes; returns its result in terms of them.

    values       node of the graph → its copy; holds the inputs
    attributes   the constants that the copies read, by name
    """
    called: dict[fx.Node, Any] = {}  # call of a sub-graph → its results
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: values[n])
        if isinstance(node.target, SubgraphCall):
            inner = node.target.module
            inputs = [n for n in inner.graph.nodes if n.op == "placeholder"]
            arguments = {
                placeholder: values[argument]
                for placeholder, argument in zip(inputs, node.args, strict=True)
                if isinstance(argument, fx.Node)
            }
            called[node] = _copy_body(inner, graph, arguments, attributes)
        elif node.target is operator.getitem and node.args[0] in called:
            values[node] = called[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.op == "get_attr":
            values[node] = _copy_attribute(module, node, graph, attributes)
        else:
            values[node] = graph.node_copy(node, lambda n: values[n])
            _shift_view(node, values)
    raise AssertionError("a graph without an output")


def _shift_view(node: fx.Node, values: dict[fx.Node, fx.Node]) -> None:
    """Let the copy of a view start where the copy of its source does.

    A layer is traced once: its input may be a slice of a larger tensor, at another place in each call.
    """
    source = node.args[0] if node.args else None
    if not is_view(node) or not isinstance(source, fx.Node):
        return
    if isinstance(fake_value(source), torch.Tensor):
        moved = storage_offset(values[source]) - storage_offset(source)
    else:  # one of several views
        moved = offset_shift(values[source]) - offset_shift(source)
    set_offset_shift(values[node], offset_shift(node) + moved)


def _copy_attribute(
    module: fx.GraphModule, node: fx.Node, graph: fx.Graph, attributes: dict[str, Any]
) -> fx.Node:
    """Copy a `get_attr` node; constants of different layers get different names."""
    value: Any = operator.attrgetter(str(node.target))(module)
    name = str(node.target).replace(".", "_")
    while name in attributes and attributes[name] is not value:
        name += "_"
    attributes[name] = value
    copy = graph.get_attr(name)
    copy_meta(node, copy)
    return copy
