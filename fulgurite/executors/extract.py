"""Nodes of a trace as a graph module of their own: what is read becomes placeholders, what is read of it outputs."""

from __future__ import annotations

from typing import Any

from torch import SymInt, Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols

from fulgurite.trace import Trace
from fulgurite.trace.cost import strides, tensors

Extracted = tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]  # with the nodes it reads and gives


def extract(trace: Trace, nodes: list[fx.Node]) -> Extracted:
    """The nodes as a graph module of their own, with the nodes it reads and the ones it gives."""
    inside = set(nodes)
    read = {s: None for node in nodes for s in node.all_input_nodes if s not in inside}
    nested = {s for s in read if s.op == "get_attr" and not isinstance(s.meta.get("val"), Tensor)}
    inputs = [source for source in read if source not in nested]  # constants are inputs, too
    inputs += _hidden_sizes(trace, nodes, inputs)
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        value_of[source] = graph.placeholder(source.name)
        value_of[source].meta = {"val": source.meta.get("val")}
    for source in nested:
        value_of[source] = graph.node_copy(source)
    for node in nodes:
        value_of[node] = graph.node_copy(node, lambda n: value_of[n])
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(value_of[node] for node in outputs))
    return _LazyGraphModule(trace.module, graph, class_name="Region"), inputs, outputs


def _hidden_sizes(trace: Trace, nodes: list[fx.Node], inputs: list[fx.Node]) -> list[fx.Node]:
    """Dynamic sizes that the region's values depend on and its inputs don't show as they are."""
    shown = {symbol for source in inputs for symbol in _plain_sizes(source.meta.get("val"))}
    needed = {symbol for node in nodes for symbol in free_symbols(_sizes(node.meta.get("val")))}
    missing = needed - shown
    if not missing:
        return []
    inside = set(nodes)
    found: dict[Any, fx.Node] = {}
    for node in trace.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, SymInt) and node not in inside and value.node.expr in missing:
            found.setdefault(value.node.expr, node)
    return list(found.values())


def _sizes(value: Any) -> list[Any]:
    """Sizes and strides inside a metadata value, and the value itself where it is a size."""
    held = [value] if isinstance(value, SymInt) else []
    return held + [n for t in tensors(value) for n in (*t.shape, *strides(t))]


def _plain_sizes(value: Any) -> list[Any]:
    """The symbols among them that stand alone."""
    symbolic = [size.node.expr for size in _sizes(value) if isinstance(size, SymInt)]
    return [expression for expression in symbolic if expression.is_Symbol]
