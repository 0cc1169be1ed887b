"""Backward graphs for calls of which only some outputs have a gradient.

In: a backward graph as AOTAutograd made it, with a tangent for each output. Out: one graph for each set of
outputs without a gradient, built when it is first needed.

A model of transformers returns its loss, its logits and its KV cache, and only the loss has a gradient. AOTAutograd
takes zeros for the others: for logits, hundreds of megabytes that are filled and added at every step. Here,
such tangents are removed from the graph, with everything that they alone contribute to. As in eager mode, an
input that no gradient reaches gets none (None). Where an op needs the zeros, symbolic sizes are computed from
the graph's other inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch._guards import TracingContext, tracing
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_symbols

from fulgurite.trace.cost import is_view
from fulgurite.trace.metadata import use_fake_mode
from fulgurite.trace.node_meta import fake_value, set_fake_value
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.traced_sizes import OPERATIONS, TracedSizes

aten = torch.ops.aten
Build = Callable[[fx.GraphModule], Any]

# zero if one of these arguments is, by position
LINEAR_OPS: dict[Any, tuple[int, ...]] = {
    aten.mul.Tensor: (0, 1),
    aten.mul.Scalar: (0,),
    aten.div.Tensor: (0,),
    aten.div.Scalar: (0,),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.neg.default: (0,),
    aten.sum.default: (0,),
    aten.sum.dim_IntList: (0,),
    aten.clone.default: (0,),
    aten._to_copy.default: (0,),
    aten._unsafe_view.default: (0,),
}
ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)


class BackwardGraphs:
    """The backward graphs of one training graph."""

    def __init__(self, module: fx.GraphModule, num_tangents: int, build: Build) -> None:
        self.module, self.num_tangents, self._build = module, num_tangents, build
        self._boxed_call = True  # tells AOTAutograd to pass inputs in a list
        self._built: dict[tuple[int, ...], Any] = {}
        self._context = TracingContext.try_get()
        self._lock = threading.Lock()

    def find(self, missing: tuple[int, ...]) -> Any:
        """The graph without these tangents; built at the first request."""
        graph = self._built.get(missing)
        if graph is None:
            with self._lock, tracing(self._context), torch.no_grad():
                graph = self._built.get(missing)
                if graph is None:
                    graph = self._build(remove_tangents(self.module, self.num_tangents, missing))
                    self._built[missing] = graph
        return graph

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph for these inputs; tangents that are None are missing."""
        first = len(inputs) - self.num_tangents
        graph = self.find(find_missing(inputs[first:]))
        values = [x for k, x in enumerate(inputs) if k < first or x is not None]
        inputs.clear()
        return graph(values)


def find_missing(gradients: Sequence[Any]) -> tuple[int, ...]:
    return tuple(k for k, gradient in enumerate(gradients) if gradient is None)


def remove_tangents(
    module: fx.GraphModule, num_tangents: int, missing: Sequence[int]
) -> fx.GraphModule:
    """A copy of a backward graph without these tangents: they are zero."""
    module = copy_module(module)
    if not missing:
        return module
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    tangents = placeholders[len(placeholders) - num_tangents :]
    zeros = {tangents[k] for k in missing}
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if not zeros.isdisjoint(node.all_input_nodes):
            if _is_zero(node, zeros):
                zeros.add(node)
            elif node.target in ADDITIONS:
                _drop_summand(graph, node, zeros)
    _return_none(graph, zeros | _find_unreached(graph, tangents, zeros))
    filled = _Zeros(graph, zeros)
    for node in reversed([node for node in graph.nodes if node in zeros]):
        if any(user not in zeros for user in node.users):
            if node.op != "placeholder" and free_symbols(fake_value(node)):
                zeros.remove(node)  # computed from zeros, by sizes that the graph has
                continue
            node.replace_all_uses_with(
                filled.like(node), delete_user_cb=lambda user: user not in zeros
            )
    for node in reversed([node for node in graph.nodes if node in zeros]):
        graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Whether a value is zero because these ones are."""
    target: Any = node.target
    if is_view(node) or target in (*ADDITIONS, aten.cat.default):
        return all(source in zeros for source in node.all_input_nodes)
    if target in LINEAR_OPS:
        return any(node.args[k] in zeros for k in LINEAR_OPS[target] if k < len(node.args))
    # ops of torch and ours that compute gradients are linear in that of their output
    is_known = getattr(target, "namespace", "") in ("aten", "fulgurite")
    if not is_known or "backward" not in target._schema.name or not node.args:
        return False
    return target._schema.arguments[0].name.startswith("grad") and node.args[0] in zeros


def _drop_summand(graph: fx.Graph, node: fx.Node, zeros: set[fx.Node]) -> None:
    """Replace a sum of zero and another value by that value, where it has the same shape and dtype."""
    left, right = node.args[:2]
    kept = right if left in zeros else left
    if not isinstance(kept, fx.Node) or node.kwargs:
        return
    value, total = fake_value(kept), fake_value(node)
    same = (value.shape, value.stride(), value.dtype, value.device)
    if same != (total.shape, total.stride(), total.dtype, total.device):
        return
    if node.target is aten.sub.Tensor and kept is right:
        with graph.inserting_before(node):
            kept = graph.call_function(aten.neg.default, (right,))
        set_fake_value(kept, total)
    node.replace_all_uses_with(kept)
    graph.erase_node(node)


def _find_unreached(
    graph: fx.Graph, tangents: Sequence[fx.Node], zeros: set[fx.Node]
) -> set[fx.Node]:
    """What is computed from missing tangents and from no other: as gradients of inputs, they are None."""
    reached, unreached = {node for node in tangents if node not in zeros}, set(zeros)
    for node in graph.nodes:
        sources = node.all_input_nodes
        if not reached.isdisjoint(sources):
            reached.add(node)
        elif not unreached.isdisjoint(sources):
            unreached.add(node)
    return unreached - reached


def _return_none(graph: fx.Graph, zeros: set[fx.Node]) -> None:
    output = graph.output_node()
    returned = output.args[0]
    assert isinstance(returned, list | tuple), "a backward graph returns a gradient for each input"
    output.args = (tuple(None if node in zeros else node for node in returned),)
    descriptions = output.meta.get("desc")
    if descriptions is not None:
        pairs = zip(descriptions, output.args[0], strict=True)
        output.meta["desc"] = [None if node is None else desc for desc, node in pairs]


def can_make_zeros(module: fx.GraphModule, num_tangents: int) -> bool:
    """Whether the other inputs of a backward graph tell the symbolic sizes of its tangents."""
    values = [fake_value(node) for node in module.graph.find_nodes(op="placeholder")]
    first = len(values) - num_tangents
    sizes = TracedSizes(values[:first])
    try:
        for tangent in values[first:]:
            for size in (*tangent.shape, *tangent.stride()):
                sizes.find(size)
    except NotImplementedError:
        return False
    return True


class _Zeros:
    """Tensors of zeros at the beginning of a graph, one for each layout."""

    def __init__(self, graph: fx.Graph, removed: set[fx.Node]) -> None:
        self.graph, self.made = graph, {}  # type: tuple[fx.Graph, dict[Any, fx.Node]]
        self.first = next(node for node in graph.nodes if node.op != "placeholder")
        placeholders = graph.find_nodes(op="placeholder")
        self.sizes = _SizeNodes([node for node in placeholders if node not in removed], self._call)

    def like(self, node: fx.Node) -> fx.Node:
        value = fake_value(node)
        assert isinstance(value, FakeTensor), f"{node} is zero and no tensor"
        size, stride = list(value.shape), list(value.stride())
        key = (*map(str, (*size, *stride)), value.dtype, value.device)
        if key not in self.made:
            with self.graph.inserting_before(self.first), use_fake_mode(value.fake_mode):
                self.made[key] = self._fill(value, size, stride)
        return self.made[key]

    def _fill(self, value: FakeTensor, size: list[Any], stride: list[Any]) -> fx.Node:
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        if is_contiguous_or_false(value):
            return self._call(aten.full.default, ([*map(self.sizes.find, size)], 0), options)
        layout = [*map(self.sizes.find, size)], [*map(self.sizes.find, stride)]
        made = self._call(aten.empty_strided.default, layout, options)
        return self._call(aten.fill.Scalar, (made, 0), {})

    def _call(self, op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(op, args, options)
        set_fake_value(node, op(*fx.node.map_arg(args, fake_value), **options))
        return node


class _SizeNodes:
    """The sizes and strides that the inputs of a graph have, as nodes of that graph."""

    def __init__(self, inputs: Sequence[fx.Node], call: Callable[..., fx.Node]) -> None:
        self._call = call
        self._known: dict[sympy.Expr, Any] = {}  # a node, or how to make it
        for node in inputs:
            value = fake_value(node)
            if isinstance(value, SymInt):
                self._known.setdefault(value.node.expr, node)
            elif isinstance(value, Tensor):
                reads = ((aten.sym_size.int, value.shape), (aten.sym_stride.int, value.stride()))
                for op, numbers in reads:
                    for dim, number in enumerate(numbers):
                        if isinstance(number, SymInt):
                            self._known.setdefault(number.node.expr, (op, (node, dim), {}))

    def find(self, size: int | SymInt) -> Any:
        return self._find(size.node.expr) if isinstance(size, SymInt) else size

    def _find(self, expression: sympy.Expr) -> Any:
        found = self._known.get(expression)
        if isinstance(found, tuple):
            found = self._call(*found)
        elif found is None and expression.is_Integer:
            return int(expression)
        elif found is None:
            operation = OPERATIONS[expression.func]
            terms = map(self._find, expression.args)
            found = reduce(lambda left, right: self._call(operation, (left, right), {}), terms)
        self._known[expression] = found
        return found
