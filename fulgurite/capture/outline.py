"""Outlining: the equal layers of a captured graph become calls of one sub-graph.

In: TorchDynamo's graph of a model, and groups of equal module calls (`capture/repeats.py`). Out: one graph
per group (`extract_layer`), and the model's graph with a call in place of each layer (`replace_layers`).
So AOTAutograd, the transforms and the executors see each distinct layer once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.capture.repeats import LayerCall, LayerGroup, is_nested_graph
from fulgurite.trace.cost import iter_tensors
from fulgurite.trace.metadata import use_fake_mode
from fulgurite.trace.node_meta import (
    copy_location,
    copy_meta,
    example_value,
    is_static_input,
    set_example_value,
)
from fulgurite.trace.subgraph import SubgraphCall

# ops that return a view of their first argument, as TorchDynamo's graphs call them
VIEW_OPS = {
    *("view", "view_as", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten"),
    *("unflatten", "expand", "expand_as", "t", "mT", "narrow", "select", "unbind", "chunk"),
    *("split", "tensor_split", "swapaxes", "movedim", "diagonal", "getitem"),
}


@dataclass(frozen=True)
class LayerSource:
    """The captured graph of one layer, for AOTAutograd."""

    group: LayerGroup
    name: str
    module: fx.GraphModule
    inputs: list[Any]  # FakeTensors and symbolic sizes
    static_inputs: list[int]  # positions of parameters


@dataclass(frozen=True)
class _Interface:
    """What one call of a layer reads and returns. Views among its results are made outside."""

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    views: list[fx.Node]

    @classmethod
    def of(cls, call: LayerCall) -> _Interface:
        inside = set(call.nodes)
        outputs: dict[fx.Node, None] = {}
        views: dict[fx.Node, None] = {}
        for node in call.outputs:
            chain = list(_view_chain(node, inside))
            views |= dict.fromkeys(reversed(chain))
            base = chain[-1].args[0] if chain else node
            assert isinstance(base, fx.Node), "a view op has a tensor argument"
            if base in inside:
                outputs[base] = None
        order = {node: k for k, node in enumerate(call.nodes)}
        return cls(
            call.inputs,
            sorted(outputs, key=order.__getitem__),
            sorted(views, key=order.__getitem__),
        )


def _view_chain(node: fx.Node, inside: set[fx.Node]) -> Iterator[fx.Node]:
    """The view ops from a value back to the tensor that owns its memory, or to an input."""
    while node in inside and _is_view(node):
        yield node
        node = node.args[0]  # type: ignore[assignment]


def _is_view(node: fx.Node) -> bool:
    """Whether the node is a known view op that reads one tensor, and its result shares its memory."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    source = node.args[0] if node.args else None
    if name not in VIEW_OPS or node.all_input_nodes != [source]:
        return False
    assert isinstance(source, fx.Node), "one of the inputs"
    if not isinstance(example_value(source), Tensor):
        return _is_view(source)  # an item of a tuple of views
    made = [t.untyped_storage()._cdata for t in iter_tensors(example_value(node))]
    given = [t.untyped_storage()._cdata for t in iter_tensors(example_value(source))]
    return bool(made) and set(made) == set(given[:1])


def extract_layer(module: fx.GraphModule, group: LayerGroup, name: str) -> LayerSource:
    """Copy the first call of a group into a graph module of its own."""
    call = group.calls[0]
    interface = _Interface.of(call)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for source in interface.inputs:
        values[source] = graph.placeholder(_layer_name(source.name, call.path))
        copy_meta(source, values[source])
    for node in {n: None for inner in call.nodes for n in inner.all_input_nodes}:
        if is_nested_graph(node):
            values[node] = graph.node_copy(node)
    for node in call.nodes:
        values[node] = graph.node_copy(node, lambda n: values[n])
    graph.output(tuple(values[node] for node in interface.outputs))
    graph.eliminate_dead_code(_is_effectful)
    layer = _LazyGraphModule(module, graph, class_name=name)
    inputs = [_fresh_input(node) for node in interface.inputs]
    for placeholder, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        set_example_value(placeholder, value)
    static = [k for k, node in enumerate(interface.inputs) if is_static_input(node)]
    return LayerSource(group, name, layer, inputs, static)


def _is_effectful(node: fx.Node) -> bool:
    """Keep every op but views, which the caller makes: an op may write in place."""
    return node.op in ("placeholder", "output") or not _is_view(node)


def _layer_name(name: str, path: str) -> str:
    """The name of a parameter without the layer's path: `attention_query_weight`."""
    parts = re.findall(r"\w+", path)[1:]
    own = r"_?(?:modules_|slice_\w*?_|)".join(re.escape(part) for part in parts)
    return re.sub(rf"^.*?{own}_+(?=modules_|parameters_|buffers_)", "l_self_", name)


def _fresh_input(node: fx.Node) -> Any:
    """A layer's input for AOTAutograd: a leaf, also if the model computes it."""
    value = example_value(node)
    if node.op == "placeholder" or not isinstance(value, Tensor):
        return value
    with use_fake_mode(fake_mode_of(value)):
        made = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return made.requires_grad_(value.requires_grad)


def fake_mode_of(value: Tensor) -> FakeTensorMode:
    assert isinstance(value, FakeTensor), "TorchDynamo records fake tensors"
    return value.fake_mode


def replace_layers(
    module: fx.GraphModule, layers: Mapping[LayerCall, SubgraphCall]
) -> fx.GraphModule:
    """A copy of the model's graph with a call of its sub-graph in place of each layer."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    call_of = {node: call for call in layers for node in call.nodes}
    for node in module.graph.nodes:
        call = call_of.get(node)
        if call is None:
            values[node] = graph.node_copy(node, lambda n: values[n])
        elif node is call.nodes[-1]:
            _add_call(graph, call, layers[call], values)
    replaced = _LazyGraphModule(module, graph, class_name="GraphModule")
    replaced.meta = dict(module.meta)
    _copy_sources(module, replaced)
    return replaced


def _add_call(
    graph: fx.Graph, call: LayerCall, target: SubgraphCall, values: dict[fx.Node, fx.Node]
) -> None:
    """Add one call, its results and the views of them that the model reads."""
    interface = _Interface.of(call)
    node = graph.call_function(target, tuple(values[n] for n in interface.inputs))
    copy_location(call.nodes[0], node)
    set_example_value(node, tuple(example_value(n) for n in interface.outputs))
    for position, output in enumerate(interface.outputs):
        item = graph.create_node(
            "call_function", operator.getitem, (node, position), name=output.name
        )
        copy_meta(output, item)
        values[output] = item
    for view in interface.views:
        values[view] = graph.node_copy(view, lambda n: values[n])


def _copy_sources(module: fx.GraphModule, copy: fx.GraphModule) -> None:
    """Keep TorchDynamo's record of where each input comes from, which AOTAutograd reads."""
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = module._param_name_to_source
    old, new = (m.graph.find_nodes(op="placeholder") for m in (module, copy))
    for source, target in zip(old, new, strict=True):
        if hasattr(source, "_dynamo_source"):
            target._dynamo_source = source._dynamo_source
