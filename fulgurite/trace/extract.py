"""Extract nodes of a trace as a graph module.

In: a Trace and some of its nodes. Out: a `Subgraph`: the values that the nodes read become placeholders,
and the values that others read become outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import SymInt, Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols

from fulgurite.trace import Trace
from fulgurite.trace.cost import iter_tensors, strides_or_ones
from fulgurite.trace.node_meta import fake_value, set_fake_value


class Subgraph(NamedTuple):
    """A graph module, with the nodes of the trace that are its inputs and outputs."""

    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]


def extract_subgraph(trace: Trace, nodes: list[fx.Node]) -> Subgraph:
    """Copy the nodes into a graph module of their own."""
    inside = set(nodes)
    read = {s: None for node in nodes for s in node.all_input_nodes if s not in inside}
    nested = {s for s in read if s.op == "get_attr" and not isinstance(fake_value(s), Tensor)}
    inputs = [source for source in read if source not in nested]  # constants are inputs too
    inputs += _find_hidden_sizes(trace, nodes, inputs)
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        value_of[source] = graph.placeholder(source.name)
        set_fake_value(value_of[source], fake_value(source))
    for source in nested:
        value_of[source] = graph.node_copy(source)
    for node in nodes:
        value_of[node] = graph.node_copy(node, lambda n: value_of[n])
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(value_of[node] for node in outputs))
    module = _LazyGraphModule(trace.module, graph, class_name="Region")
    return Subgraph(module, inputs, outputs)


def _find_hidden_sizes(trace: Trace, nodes: list[fx.Node], inputs: list[fx.Node]) -> list[fx.Node]:
    """Nodes of symbols that the values need and that no input has as a plain size or number.

    An input that is a number `2*n - m`, or has it as a stride, may need its symbols in other terms too.
    """
    values = [fake_value(source) for source in inputs]
    shown = {symbol for value in values for symbol in _bare_symbols(value)}
    values += [fake_value(node) for node in nodes]
    needed = {s for value in values for s in free_symbols(_sizes_and_strides(value))}
    missing = needed - shown
    if not missing:
        return []
    inside = set(nodes)
    found: dict[Any, fx.Node] = {}
    for node in trace.graph.nodes:
        value = fake_value(node)
        if isinstance(value, SymInt) and node not in inside and value.node.expr in missing:
            found.setdefault(value.node.expr, node)
    return list(found.values())


def _sizes_and_strides(value: Any) -> list[Any]:
    """Sizes and strides of the tensors of a fake value, and the value itself if it is a size."""
    own = [value] if isinstance(value, SymInt) else []
    return own + [n for t in iter_tensors(value) for n in (*t.shape, *strides_or_ones(t))]


def _bare_symbols(value: Any) -> list[Any]:
    """The sizes and strides that are single symbols."""
    symbolic = [size.node.expr for size in _sizes_and_strides(value) if isinstance(size, SymInt)]
    return [expression for expression in symbolic if expression.is_Symbol]
