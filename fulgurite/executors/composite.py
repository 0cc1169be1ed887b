"""Composite ops: what they were decomposed into, and how to restore them.

In: the nodes of a region of a claimed Trace; decomposed nodes remember their composite op. Out: the same
region as torch itself would run it. A composite op is restored if all of its decomposed nodes are in the
region. Generated code is measured against this form, and a region that falls back to torch runs it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.executors.torch import TORCH
from fulgurite.trace import Trace
from fulgurite.trace.cost import iter_tensors
from fulgurite.trace.node_meta import (
    clear_composite,
    composite_of,
    copy_meta,
    fake_value,
    restore_meta,
    set_composite,
    set_executor,
    set_fake_value,
    snapshot_meta,
)


@dataclass(eq=False)
class CompositeOp:
    """A decomposed op: its call, and the nodes that now compute its results.

    Its nodes are those of the "claimed" stage. Later stages copy the graph and keep the names, so
    nodes of other stages are compared by name.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    value: Any  # FakeTensor, or a tuple of them
    name: str
    results: list[Any] = field(default_factory=list)
    decomposed_nodes: set[fx.Node] = field(default_factory=set)
    _tracker: fx.Node | None = None

    @classmethod
    def from_node(cls, node: fx.Node) -> CompositeOp:
        return cls(
            node.target,
            node.args,
            dict(node.kwargs),
            snapshot_meta(node),
            fake_value(node),
            node.name,
        )

    def track_results(self, decomposed: Sequence[fx.Node], results: Sequence[Any]) -> None:
        """Follow the results while the decomposed nodes are decomposed further.

        A temporary node uses the results. fx updates its arguments when a result is replaced.
        """
        for node in decomposed:
            set_composite(node, self)
        graph = decomposed[0].graph
        with graph.inserting_before(graph.output_node()):
            self._tracker = graph.call_function(tuple, (list(results),))

    def finalize(self) -> None:
        """Record which nodes compute the results in the end, and erase the temporary node."""
        assert self._tracker is not None, f"{self.name} was not decomposed"
        graph = self._tracker.graph
        self.results = list(self._tracker.args[0])  # type: ignore[arg-type]
        graph.erase_node(self._tracker)
        self._tracker = None

    def can_restore(self, region: set[str], available: set[str]) -> bool:
        """Whether the op can replace its decomposed nodes in a region.

        region      names of the region's nodes
        available   names of the region's nodes and inputs
        """
        sources: list[fx.Node] = []
        fx.node.map_arg((self.args, self.kwargs), sources.append)
        if not all(source.name in available for source in sources):
            return False
        nodes = self.decomposed_nodes
        results = {result for result in self.results if isinstance(result, fx.Node)}
        read_outside = {n for n in nodes if any(user not in nodes for user in n.users)}
        is_inside = {node.name for node in nodes} <= region
        return is_inside and read_outside <= results <= nodes and self._has_same_layouts()

    def _has_same_layouts(self) -> bool:
        """Whether decomposed nodes and op return the same dtypes, sizes and strides."""
        expected = list(self.value) if isinstance(self.value, (tuple, list)) else [self.value]
        if len(expected) != len(self.results):
            return False
        return all(
            _layout(fake_value(result)) == _layout(value)
            for result, value in zip(self.results, expected, strict=True)
            if isinstance(result, fx.Node) and result.users
        )


def _layout(value: Any) -> list[Any]:
    return [(t.dtype, str(t.shape), str(t.stride())) for t in iter_tensors(value)]


def restore_composite_ops(
    trace: Trace, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """Build the region of these nodes as torch runs it: composite ops, direct torch functions."""
    graph = fx.Graph()
    value_of: dict[str, fx.Node] = {}
    for source in inputs:
        value_of[source.name] = graph.placeholder(source.name)
        set_fake_value(value_of[source.name], fake_value(source))
    region = {node.name for node in nodes}
    is_restored: dict[CompositeOp, bool] = {}
    added: set[CompositeOp] = set()
    for node in nodes:
        for source in node.all_input_nodes:
            if source.name not in value_of and source.name not in region:  # a nested graph
                value_of[source.name] = graph.node_copy(source)
        composite = composite_of(node)
        if composite is not None and composite not in is_restored:
            is_restored[composite] = composite.can_restore(region, region | set(value_of))
        if composite is None or not is_restored[composite]:
            value_of[node.name] = graph.node_copy(node, lambda n: value_of[n.name])
        elif composite not in added:
            _add_composite_op(graph, composite, value_of)
            added.add(composite)
    graph.output(tuple(value_of[node.name] for node in outputs))
    module = _LazyGraphModule(trace.module, graph, class_name="Region")
    for node in graph.nodes:
        clear_composite(node)
        if node.op == "call_function":
            set_executor(node, TORCH.name)
            TORCH.use_direct_function(module, node)
    return module


def _add_composite_op(
    graph: fx.Graph, composite: CompositeOp, value_of: dict[str, fx.Node]
) -> None:
    arguments = (composite.args, composite.kwargs)
    args, kwargs = fx.node.map_arg(arguments, lambda n: value_of[n.name])
    call = graph.create_node("call_function", composite.target, args, kwargs, name=composite.name)
    restore_meta(call, composite.meta)
    if isinstance(composite.value, torch.Tensor):
        value_of[composite.results[0].name] = call
        return
    for position, result in enumerate(composite.results):
        if isinstance(result, fx.Node) and result.users:
            item = graph.call_function(operator.getitem, (call, position))
            copy_meta(result, item)
            value_of[result.name] = item
