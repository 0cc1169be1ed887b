"""Composite ops that were taken apart, and the way back.

In: a claimed Trace whose pieces remember the op they come from, and the nodes of a region. Out: the same region
as torch itself would run it: whole ops where all their pieces are in the region, spelled as plainly as torch
allows. It is what generated code is measured against, and what runs where a region is given back.
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
from fulgurite.trace.cost import tensors


@dataclass(eq=False)
class Whole:
    """An op that was taken apart: its call, and the nodes that now hold its results."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    name: str
    results: list[Any] = field(default_factory=list)
    pieces: set[fx.Node] = field(default_factory=set)
    _keeper: fx.Node | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Whole:
        return cls(node.target, node.args, dict(node.kwargs), dict(node.meta), node.name)

    def open(self, pieces: Sequence[fx.Node], results: Sequence[Any]) -> None:
        """Follow the results while pieces are taken apart further: a node that uses them is kept up to date."""
        for piece in pieces:
            piece.meta["whole"] = self
        graph = pieces[0].graph
        with graph.inserting_before(graph.output_node()):
            self._keeper = graph.call_function(tuple, (list(results),))

    def close(self) -> None:
        """Note which pieces there are in the end, and which of them hold the results."""
        assert self._keeper is not None, f"{self.name} was not taken apart"
        graph = self._keeper.graph
        self.results = list(self._keeper.args[0])  # type: ignore[arg-type]
        graph.erase_node(self._keeper)
        self._keeper = None

    def is_inside(self, nodes: set[fx.Node], known: set[fx.Node]) -> bool:
        """Whether the whole op can stand for its pieces among `nodes`, given what else is `known` there."""
        sources: list[fx.Node] = []
        fx.node.map_arg((self.args, self.kwargs), sources.append)
        if not all(source in known for source in sources):
            return False
        held = {result for result in self.results if isinstance(result, fx.Node)}
        seen = {p for p in self.pieces if any(user not in self.pieces for user in p.users)}
        return self.pieces <= nodes and seen <= held <= self.pieces and self._same_values()

    def _same_values(self) -> bool:
        """Pieces and op give the same dtypes, sizes and strides."""
        value = self.meta.get("val")
        wanted = list(value) if isinstance(value, (tuple, list)) else [value]
        if len(wanted) != len(self.results):
            return False
        return all(
            _layout(result.meta.get("val")) == _layout(want)
            for result, want in zip(self.results, wanted, strict=True)
            if isinstance(result, fx.Node) and result.users
        )


def _layout(value: Any) -> list[Any]:
    return [(t.dtype, str(t.shape), str(t.stride())) for t in tensors(value)]


def as_torch(
    trace: Trace, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """The region of these nodes with its ops whole and spelled plainly: placeholders and outputs as given."""
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        value_of[source] = graph.placeholder(source.name)
        value_of[source].meta = {"val": source.meta.get("val")}
    inside, done = set(nodes), set[Whole]()
    restored: dict[Whole, bool] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in value_of and source not in inside:  # a nested graph
                value_of[source] = graph.node_copy(source)
        whole = node.meta.get("whole")
        if whole is not None and whole not in restored:
            restored[whole] = whole.is_inside(inside, inside | set(value_of))
        if whole is None or not restored[whole]:
            value_of[node] = graph.node_copy(node, lambda n: value_of[n])
        elif whole not in done:
            _add_whole(graph, whole, value_of)
            done.add(whole)
    graph.output(tuple(value_of[node] for node in outputs))
    module = _LazyGraphModule(trace.module, graph, class_name="Region")
    for node in graph.nodes:
        node.meta.pop("whole", None)
        if node.op == "call_function":
            node.meta["executor"] = TORCH.name
            TORCH.spell(module, node)
    return module


def _add_whole(graph: fx.Graph, whole: Whole, value_of: dict[fx.Node, fx.Node]) -> None:
    args, kwargs = fx.node.map_arg((whole.args, whole.kwargs), lambda n: value_of[n])
    call = graph.create_node("call_function", whole.target, args, kwargs, name=whole.name)
    call.meta = {key: value for key, value in whole.meta.items() if key != "executor"}
    if isinstance(whole.meta.get("val"), torch.Tensor):
        value_of[whole.results[0]] = call
        return
    for position, result in enumerate(whole.results):
        if isinstance(result, fx.Node) and result.users:
            item = graph.call_function(operator.getitem, (call, position))
            item.meta = {**result.meta}
            value_of[result] = item
