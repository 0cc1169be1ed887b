"""Repeated layers in a captured graph: which module calls do the same on inputs of the same kind.

In: TorchDynamo's graph of a model, whose nodes know the module calls that they run in. Out: groups of
equal calls (`LayerGroup`), outermost first. Two calls are equal if their nodes are the same up to the
tensors they read, and those tensors agree in dtype, sizes, strides, device and whether they need gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo.guards import GlobalStateGuard
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fulgurite.capture.blocks import MIN_REPEATS
from fulgurite.trace.cost import strides_or_ones
from fulgurite.trace.node_meta import example_value, is_static_input, module_calls
from fulgurite.trace.subgraph import SubgraphCall

MIN_LAYER_OPS = 8  # smaller modules are fused better as a part of the model's graph
MIN_OP_FRACTION = 0.5  # of the graph's ops that must be in repeated layers


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: its nodes in order, and the module's path."""

    path: str
    kind: str
    nodes: tuple[fx.Node, ...]

    @property
    def inputs(self) -> list[fx.Node]:
        """The values that the nodes read, in the order of their first use."""
        inside = set(self.nodes)
        read = (source for node in self.nodes for source in node.all_input_nodes)
        return [n for n in dict.fromkeys(read) if n not in inside and not is_nested_graph(n)]

    @property
    def num_ops(self) -> int:
        """Number of ops, those of checkpointed bodies included."""
        bodies = [body for node in self.nodes for body in _nested_bodies(node)]
        return len(self.nodes) + sum(len(body.graph.nodes) for body in bodies)

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes whose values are read outside."""
        inside = set(self.nodes)
        return [node for node in self.nodes if any(user not in inside for user in node.users)]


@dataclass(frozen=True)
class LayerGroup:
    """Equal calls of layers."""

    kind: str  # name of their class
    calls: tuple[LayerCall, ...]
    key: Hashable  # what the calls have in common

    @property
    def is_static(self) -> bool:
        """Whether no input has a symbolic size: then a layer of the same key in another graph is equal."""
        values = [example_value(node) for node in self.calls[0].inputs]
        return not free_symbols(values)

    def __str__(self) -> str:
        return f"{len(self.calls)} × {self.kind}"


class LayerCache:
    """The sub-graphs of layers that were traced before, in any graph of one session."""

    def __init__(self) -> None:
        self.known: dict[Hashable, list[tuple[GlobalStateGuard, SubgraphCall]]] = {}

    def find(self, group: LayerGroup) -> SubgraphCall | None:
        """The sub-graph of an equal layer, traced in the same grad mode, autocast and other settings."""
        entries = self.known.get(group.key, ()) if group.is_static else ()
        return next((call for state, call in entries if state.check()), None)

    def add(self, group: LayerGroup, call: SubgraphCall) -> None:
        if group.is_static:
            self.known.setdefault(group.key, []).append((GlobalStateGuard(), call))


def find_repeated_layers(module: fx.GraphModule) -> list[LayerGroup]:
    """Groups of at least `MIN_REPEATS` equal module calls. Calls inside other groups' calls don't count."""
    nodes = [node for node in module.graph.nodes if node.op.startswith("call_")]
    found = list(_Search(nodes).run(nodes, 0))
    covered = sum(call.num_ops for group in found for call in group.calls)
    total = LayerCall("", "", tuple(nodes)).num_ops
    return found if covered >= MIN_OP_FRACTION * total else []


class _Search:
    """A search through the module calls of one graph."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes
        self.position = {node: k for k, node in enumerate(nodes)}
        self.contexts = _open_contexts(nodes)

    def run(self, nodes: list[fx.Node], depth: int) -> Iterator[LayerGroup]:
        """Groups among the module calls at a nesting depth, then inside the calls that have no equal."""
        equal: dict[Hashable, list[LayerCall]] = {}
        checkpointed = list(_find_checkpointed_calls(nodes)) if depth == 0 else []
        taken = {node for call in checkpointed for node in call.nodes}
        others = [node for node in nodes if node not in taken]
        for call in map(self.add_contexts, (*checkpointed, *self.split_calls(others, depth))):
            if call.num_ops >= MIN_LAYER_OPS:
                key = _call_key(call) if self.can_outline(call) else None
                equal.setdefault(key, []).append(call)
        rest: list[fx.Node] = []
        for key, group in equal.items():
            if key is not None and len(group) >= MIN_REPEATS:
                yield LayerGroup(group[0].kind, tuple(group), key)
            else:
                rest += [node for call in group for node in call.nodes]
        if rest:
            yield from self.run(sorted(rest, key=self.position.__getitem__), depth + 1)

    def add_contexts(self, call: LayerCall) -> LayerCall:
        """The call with contexts that are opened and closed around it alone, such as `torch.autocast`.

        TorchDynamo's nodes for them know no module.
        """
        first, last = self.position[call.nodes[0]], self.position[call.nodes[-1]]
        while self.contexts[first] and _changes_context(self.nodes[first - 1]):
            first -= 1
        while self.contexts[last + 1] and _changes_context(self.nodes[last + 1]):
            last += 1
        if len(call.nodes) >= last - first + 1:
            return call
        return replace(call, nodes=tuple(self.nodes[first : last + 1]))

    def can_outline(self, call: LayerCall) -> bool:
        """Whether no context of the model, such as `torch.autocast`, is open where the layer runs."""
        before, after = self.position[call.nodes[0]], self.position[call.nodes[-1]] + 1
        return not self.contexts[before] and not self.contexts[after]

    def split_calls(self, nodes: list[fx.Node], depth: int) -> Iterator[LayerCall]:
        """The module calls at a depth, each with the consecutive nodes that run in it."""
        current: list[fx.Node] = []
        key: tuple[str, ...] = ()
        for node in nodes:
            stack = module_calls(node)[: depth + 1]
            own = tuple(call for call, _, _ in stack) if len(stack) > depth else ()
            follows = bool(current) and self.position[node] == self.position[current[-1]] + 1
            if current and (own != key or not follows):
                yield _make_call(current, depth)
                current = []
            key = own
            if own:
                current.append(node)
        if current:
            yield _make_call(current, depth)


def _make_call(nodes: list[fx.Node], depth: int) -> LayerCall:
    _, path, kind = module_calls(nodes[0])[depth]
    return LayerCall(path, kind, tuple(nodes))


def _find_checkpointed_calls(nodes: list[fx.Node]) -> Iterator[LayerCall]:
    """Calls of `torch.utils.checkpoint`, each with its results; the module is that of its body."""
    for node in nodes:
        if node.target is tag_activation_checkpoint:
            inside = [n for body in _nested_bodies(node) for n in body.graph.nodes]
            calls = [call for n in inside for call in module_calls(n)]
            own = [call for call in calls if call not in module_calls(node)]
            _, path, kind = own[0] if own else ("", "", "Checkpoint")
            items = [user for user in node.users if user.target is operator.getitem]
            yield LayerCall(path, kind, (node, *items))


def _nested_bodies(node: fx.Node) -> list[fx.GraphModule]:
    return [nested_graph(source) for source in node.all_input_nodes if is_nested_graph(source)]


def _open_contexts(nodes: list[fx.Node]) -> list[bool]:
    """For each node, and the end: whether a context that changes how ops run is open before it."""
    depth, grad_enabled = 0, torch.is_grad_enabled()
    found = [False]
    for node in nodes:
        if node.target is torch._C._set_grad_enabled:
            grad_enabled = bool(node.args[0])
        elif _changes_context(node):
            name = _function_name(node)
            is_left = name.startswith("_exit_") or name.endswith("decrement_nesting")
            depth += -1 if is_left else 1  # a setting that is never undone stays open
        found.append(depth != 0 or grad_enabled != torch.is_grad_enabled())
    return found


def _changes_context(node: fx.Node) -> bool:
    name = _function_name(node)
    return name.startswith(("_enter_", "_exit_", "_set_")) or name.endswith("crement_nesting")


def _function_name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


# ---- equality --------------------------------------------------------------------------------------


def _call_key(call: LayerCall) -> Hashable:
    """What equal calls have in common; None if the call can't be a sub-graph."""
    inputs = call.inputs
    types = tuple(map(_type_key, inputs))
    if None in types or not all(_is_outlinable(value) for value in map(example_value, call.nodes)):
        return None
    names = {node: ("input", k) for k, node in enumerate(inputs)}
    names |= {node: ("node", k) for k, node in enumerate(call.nodes)}
    outputs = tuple(names[node] for node in call.outputs)
    return (types, outputs, *_node_keys(call.nodes, names.get))


def _node_keys(nodes: Any, name_of: Callable[[fx.Node], Any]) -> Iterator[Hashable]:
    for node in nodes:
        yield (
            node.op,
            _object_key(node.target),
            _value_key(node.args, name_of),
            _value_key(node.kwargs, name_of),
        )


def _value_key(value: Any, name_of: Callable[[fx.Node], Any]) -> Hashable:
    """A hashable form of a node's arguments. Objects of unknown types are equal only to themselves."""
    if isinstance(value, fx.Node):
        name = name_of(value)
        return name if name is not None else _graph_key(nested_graph(value))
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_value_key(item, name_of) for item in value))
    if isinstance(value, dict):
        return ("dict", *((k, _value_key(item, name_of)) for k, item in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_value_key(v, name_of) for v in (value.start, value.stop, value.step)))
    if isinstance(value, bool | int | float | complex | str | type(None)):
        return type(value).__name__, repr(value)
    if isinstance(value, torch.dtype | torch.device | torch.memory_format | torch.layout):
        return type(value).__name__, str(value)
    return _object_key(value)


class _Identity:
    """An object that is equal only to itself, also if it has an equality of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _object_key(value: Any) -> Hashable:
    return value if isinstance(value, str) else _Identity(value)


def _graph_key(module: fx.GraphModule) -> Hashable:
    """The form of a nested graph, such as the body of a checkpointed layer."""
    nodes = list(module.graph.nodes)
    numbers = {n: ("node", k) for k, n in enumerate(nodes) if not is_nested_graph(n)}
    kept = [node for node in nodes if node in numbers and node.op != "placeholder"]
    if any(node.op == "get_attr" for node in kept):
        return _Identity(module)  # it holds a constant of its own
    return ("graph", len(nodes), *_node_keys(kept, numbers.get))


def is_nested_graph(node: fx.Node) -> bool:
    """Whether the node is a nested graph: an argument of a higher-order op."""
    return node.op == "get_attr" and isinstance(nested_graph(node), fx.GraphModule)


def nested_graph(node: fx.Node) -> Any:
    owner = node.graph.owning_module
    assert owner is not None, "captured graphs belong to a module"
    return operator.attrgetter(str(node.target))(owner)


def _is_outlinable(value: Any) -> bool:
    return not isinstance(value, Tensor) or not is_traceable_wrapper_subclass(value)


def _type_key(node: fx.Node) -> Hashable:
    """The kind of an input; None if a sub-graph can't take it."""
    value = example_value(node)
    if isinstance(value, torch.SymInt):
        return ("size", str(value.node.expr))
    if not isinstance(value, Tensor) or not _is_outlinable(value):
        return None
    sizes = tuple(str(size) for size in (*value.shape, *strides_or_ones(value)))
    needs_gradient = value.requires_grad and torch.is_grad_enabled()
    bits = (needs_gradient, value.is_conj(), value.is_neg(), is_static_input(node))
    return (type(value).__name__, value.dtype, value.device, value.layout, sizes, *bits)
