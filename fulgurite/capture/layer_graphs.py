"""AOTAutograd on one layer: its captured graph → functional graphs that a model's graph can call.

In: the captured graph of a layer and fake inputs. Out: `LayerGraphs`, whose graphs are pure functions:
they mutate nothing, and their results are tensors with memory of their own. Views among the results are
made by the caller (`Result.views`), so that the model's graph knows what shares memory.

A layer that does not fit this form raises `CannotOutline`; it then stays inside the model's graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext, tracing
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fulgurite.capture.subgraph_op import LayerGraph, LayerGraphs, Result, ViewStep
from fulgurite.capture.upsample import keep_upsampling_whole
from fulgurite.trace.cost import iter_tensors, view_base
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import (
    copy_meta,
    fake_value,
    is_saved_for_backward,
    set_fake_value,
    set_saved_for_backward,
)
from fulgurite.trace.subgraph import SUBGRAPH_EXECUTOR, SubgraphCall
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.remat import Partition

OUTLINED_OUTPUTS = (OutputType.non_alias, OutputType.unsafe_view_alias)


class CannotOutline(Exception):
    """A repeated layer can't be a sub-graph; the text says why."""


class _Traced:
    """What AOTAutograd made of a layer."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []  # inference; or forward and backward
        self.num_outputs = 0
        self.metadata: Any = None

    def record(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.metadata = TracingContext.get().fw_metadata
        if not self.graphs:
            self.graphs = [graph]
        return _never_called

    def record_partition(self, partition: Partition, static_inputs: list[int]) -> Partition:
        def split(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            options["static_lifetime_input_indices"] = static_inputs
            forward, backward = partition(joint, inputs, **options)
            self.graphs = [copy_module(forward), copy_module(backward)]
            self.num_outputs = options["num_fwd_outputs"]
            return forward, backward

        return split


def _never_called(inputs: list[Any]) -> Any:
    raise AssertionError("the layer's graphs are called by the model's graph")


_never_called._boxed_call = True  # type: ignore[attr-defined]


def trace_layer(
    name: str,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    static_inputs: list[int],
    partition: Partition,
) -> LayerGraphs:
    """Functionalize a layer and differentiate it if an input needs a gradient.

    static_inputs   positions of parameters and buffers, which are in memory anyway
    """
    traced = _Traced()
    backend = aot_autograd(
        fw_compiler=traced.record,
        bw_compiler=traced.record,
        inference_compiler=traced.record,
        partition_fn=traced.record_partition(partition, static_inputs),
        keep_inference_input_mutations=True,
    )
    with tracing(TracingContext(TracingContext.get().fake_mode)), keep_upsampling_whole():
        backend(module, inputs)
    _check_metadata(traced)
    forward = traced.graphs[0]
    if len(forward.graph.find_nodes(op="placeholder")) != len(inputs):
        raise CannotOutline("its graph takes other inputs, such as the state of a random generator")
    if len(traced.graphs) == 1:
        num_outputs = len(forward.graph.output_node().args[0])  # type: ignore[arg-type]
        return LayerGraphs(_make_graph(name, forward), num_outputs)
    return _pair_with_backward(name, traced)


def _check_metadata(traced: _Traced) -> None:
    """Raise CannotOutline unless the graphs take the layer's inputs and return new tensors."""
    metadata = traced.metadata
    if metadata is None or metadata.tokens or metadata.is_rng_op_functionalized:
        raise CannotOutline("it has effects besides its results")
    if any(info.mutates_data or info.mutates_metadata for info in metadata.input_info):
        raise CannotOutline("it mutates an input or a buffer")
    if metadata.num_intermediate_bases or any(
        info.output_type not in OUTLINED_OUTPUTS for info in metadata.output_info
    ):
        raise CannotOutline("it returns a view of an input, or views of each other")
    for graph in traced.graphs:
        for node in graph.graph.nodes:
            if mutated_inputs(node):
                raise CannotOutline("it mutates an input or a buffer")
            if free_unbacked_symbols([*iter_tensors(fake_value(node))]):
                raise CannotOutline("it has sizes that depend on data")


def _pair_with_backward(name: str, traced: _Traced) -> LayerGraphs:
    """Forward and backward as two calls, and which values pass between them."""
    forward, backward = traced.graphs
    num_outputs = traced.num_outputs
    outputs: Any = forward.graph.output_node().args[0]
    saved = {node.name: node for node in outputs[num_outputs:]}
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    tangents = [node for node in placeholders if node.name not in saved]
    passed = [saved[node.name] for node in placeholders if node.name in saved]
    sizes = [node for node in passed if not isinstance(fake_value(node), Tensor)]
    tensors = [node for node in passed if isinstance(fake_value(node), Tensor)]
    differentiable = [
        position
        for position, info in enumerate(traced.metadata.output_info)
        if info.requires_grad and issubclass(info.raw_type, Tensor)
    ]
    order = [*(n.name for n in (*sizes, *tensors)), *(n.name for n in tangents)]
    if order != [node.name for node in placeholders] or len(tangents) != len(differentiable):
        raise CannotOutline("its backward takes other values than forward saves")
    tensors = _move_views_to_backward(outputs[:num_outputs], tensors, backward)
    _set_outputs(forward, [*outputs[:num_outputs], *tensors])
    return LayerGraphs(
        _make_graph(name, forward),
        num_outputs,
        _make_graph(f"{name}_backward", backward),
        tuple(fake_value(node) for node in sizes),
        tuple(differentiable),
        tuple(fake_value(node) for node in tangents),
    )


def _move_views_to_backward(
    outputs: Sequence[fx.Node], saved: list[fx.Node], backward: fx.GraphModule
) -> list[fx.Node]:
    """Let backward make views of the layer's inputs, and of tensors that are saved or returned twice.

    Returns what forward saves instead of `saved`: each tensor once.
    """
    count = Counter(view_base(node) for node in (*outputs, *dict.fromkeys(saved)))
    placeholders = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    kept: dict[fx.Node, fx.Node] = {}  # saved by forward → the input of backward
    for node in saved:
        base, old = view_base(node), placeholders[node.name]
        views = _view_nodes(base, node)
        is_shared = base.op == "placeholder" or count[base] > 1
        if not is_shared or any(len(view.all_input_nodes) > 1 for view in views):
            kept[node] = old  # a view with symbolic sizes is made outside
            continue
        if base not in kept:
            with backward.graph.inserting_before(old):
                kept[base] = backward.graph.placeholder(base.name)
            copy_meta(old, kept[base])
            set_fake_value(kept[base], fake_value(base))
            set_saved_for_backward(kept[base], is_saved_for_backward(old) and base is node)
        _replace_by_views(backward.graph, old, kept[base], views)
    return list(kept)


def _replace_by_views(graph: fx.Graph, old: fx.Node, value: fx.Node, views: list[fx.Node]) -> None:
    """Replace an input of backward by views of `value`, as forward makes them."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        for node in views:
            made = graph.call_function(node.target, (value, *node.args[1:]))  # type: ignore[arg-type]
            copy_meta(node, made)
            value = made
    old.replace_all_uses_with(value)
    graph.erase_node(old)


def _make_graph(name: str, module: fx.GraphModule) -> LayerGraph:
    """Let a graph return each tensor's memory once; results that share memory become views of it."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    outputs: Any = module.graph.output_node().args[0]
    count = Counter(view_base(node) for node in dict.fromkeys(outputs) if node is not None)
    returned: dict[fx.Node, int] = {}
    results: list[Result | None] = []
    for node in outputs:
        if node is None:
            results.append(None)
            continue
        base = view_base(node)
        if base.op == "placeholder":
            results.append(Result(True, inputs.index(base), _views_between(base, node)))
        elif base.op != "get_attr" and isinstance(fake_value(node), Tensor):
            owner = base if count[base] > 1 else node
            position = returned.setdefault(owner, len(returned))
            results.append(Result(False, position, _views_between(owner, node)))
        else:
            raise CannotOutline("it returns a constant, or a value that is no tensor")
    _set_outputs(module, list(returned))
    module.graph.eliminate_dead_code()
    return LayerGraph(SubgraphCall(name, SUBGRAPH_EXECUTOR, module, module.forward), tuple(results))


def _views_between(base: fx.Node, node: fx.Node) -> tuple[ViewStep, ...]:
    """The view ops that make `node` from `base`."""
    return tuple(
        ViewStep(view.target, fx.node.map_arg(view.args[1:], _size_of_node))
        for view in _view_nodes(base, node)
    )


def _view_nodes(base: fx.Node, node: fx.Node) -> list[fx.Node]:
    """The nodes of these view ops, in order."""
    found: list[fx.Node] = []
    while node is not base:
        source = node.args[0]
        if node.kwargs or not isinstance(source, fx.Node):
            raise CannotOutline(f"it returns a view made by {node.target}")
        found.append(node)
        node = source
    return found[::-1]


def _size_of_node(node: fx.Node) -> Any:
    """The symbolic size that a node stands for; it means the same in the model's graph."""
    value = fake_value(node)
    if not isinstance(value, int | torch.SymInt):
        raise CannotOutline("it returns a view that depends on another tensor")
    return value


def _set_outputs(module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    module.graph.output_node().args = (tuple(nodes),)
