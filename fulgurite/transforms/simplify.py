"""The built-in simplifications, in the order they run: `SIMPLIFY`.

In: a functional Trace. Out: a smaller one with bitwise equal results (-0, NaN and inf included), the same
random draws, and the same aliasing of outputs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.trace import Trace
from fulgurite.trace.metadata import run_node, same_metadata
from fulgurite.trace.node_meta import fake_value, set_fake_value
from fulgurite.trace.purity import allocates_memory, find_escaping, is_pure
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.base import transform

aten = torch.ops.aten
MAX_FOLDED_ELEMENTS = 16  # larger constants are cheaper to compute than to store


@transform
def eliminate_dead_code(trace: Trace) -> Trace:
    """Remove unused nodes. Random ops stay: removing one would shift all later draws."""

    def change(graph: fx.Graph) -> None:
        for node in reversed(graph.nodes):
            if not node.users and is_pure(node):
                graph.erase_node(node)

    dead = any(not node.users and is_pure(node) for node in trace.graph.nodes)
    return trace.edit(change) if dead else trace


@transform
def fold_constants(trace: Trace) -> Trace:
    """Evaluate nodes that depend on constants alone, if the result is small."""
    if not any(node.op == "get_attr" or _is_foldable(node, {}) for node in trace.graph.nodes):
        return trace
    module = copy_module(trace.module)
    graph = module.graph
    visible = find_escaping(graph)
    folded = _fold_conjugated_numbers(graph)
    known: dict[fx.Node, Any] = {}  # values of constant nodes
    for node in list(graph.nodes):
        if node.op == "get_attr":
            known[node] = run_node(module, node, {})
        elif _is_foldable(node, known):
            with _disable_current_modes(), torch.no_grad():
                known[node] = run_node(module, node, known)
    for node, value in known.items():
        is_needed = any(user not in known for user in node.users)
        is_factory = not node.all_input_nodes  # `full` or `arange` is as short as a constant
        if node.op == "get_attr" or is_factory or not is_needed or node in visible:
            continue
        if isinstance(value, torch.Tensor):
            serial = itertools.count(len(folded))
            name = next(n for n in map("folded_{}".format, serial) if not hasattr(module, n))
            folded.append(name)
            module.register_buffer(name, value)
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            set_fake_value(constant, fake_value(node))
            node.replace_all_uses_with(constant)
    return eliminate_dead_code(trace.with_module(module)) if folded else trace


def _fold_conjugated_numbers(graph: fx.Graph) -> list[str]:
    """Replace `_conj` of a number, as in the gradient of `x * 2j`: it is a view of no tensor."""
    folded = []
    for node in graph.find_nodes(op="call_function", target=aten._conj.default):
        number = node.args[0]
        if isinstance(number, complex) and all(user.op == "call_function" for user in node.users):
            for user in list(node.users):
                user.args, user.kwargs = fx.node.map_aggregate(
                    (user.args, user.kwargs), lambda a: number.conjugate() if a is node else a
                )
            graph.erase_node(node)
            folded.append(node.name)
    return folded


def _is_foldable(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not is_pure(node):
        return False
    if node.target in (aten.empty.memory_format, aten.empty_strided.default):
        return False
    value = fake_value(node)
    if not isinstance(value, FakeTensor) or any(isinstance(s, torch.SymInt) for s in value.shape):
        return False
    small = value.numel() <= MAX_FOLDED_ELEMENTS
    return small and all(source in known for source in node.all_input_nodes)


@transform
def simplify_algebra(trace: Trace) -> Trace:
    """Remove ops that never change a value: `x * 1`, `x / 1`, `x - 0`, round-trip casts, no-op views.

    Not `x + 0.0` (-0.0 + 0.0 is 0.0), `x * 0` (NaN, inf) or `x - x`.
    """

    def change(graph: fx.Graph) -> None:
        visible = find_escaping(graph)
        outputs = set(graph.output_node().all_input_nodes)
        for node in list(graph.nodes):
            rewrite = REWRITES.get(node.target) if node.op == "call_function" else None
            same = rewrite(node) if rewrite is not None else None
            if same is None or not _is_replaceable(fake_value(same), fake_value(node)):
                continue
            if node.target in COPIES and (node in visible or same in visible):
                continue
            if node in visible and allocates_memory(node):  # the caller may mutate it
                if same in visible or not allocates_memory(same):
                    continue
                visible.add(same)
            if node in outputs:  # outputs stay distinct objects
                if same in outputs or same.op != "call_function":
                    continue
                # a view of an output that needs a gradient would need one too
                if node.target is aten.detach.default and not allocates_memory(same):
                    continue
                outputs.add(same)
            node.replace_all_uses_with(same)
            graph.erase_node(node)

    return trace.edit(change)


_is_replaceable = functools.partial(same_metadata, exact=True)
Rewrite = Callable[[fx.Node], fx.Node | None]  # the earlier node that equals the node, if any


def _first_argument(node: fx.Node) -> fx.Node | None:
    """The first argument, if it is a node. The caller compares metadata."""
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def _equal_view(node: fx.Node) -> fx.Node | None:
    """The nearest value up the chain of reshapes with the same metadata."""
    source = _first_argument(node)
    while source is not None and source.target in RESHAPES:
        if _is_replaceable(fake_value(source), fake_value(node)):
            return source
        source = _first_argument(source)
    return source


def _identity_operand(number: int) -> Rewrite:
    """`x op number` is x."""

    def rewrite(node: fx.Node) -> fx.Node | None:
        is_plain = len(node.args) == 2 and not node.kwargs and type(node.args[1]) in (int, float)
        is_identity = is_plain and repr(node.args[1]) in (repr(number), repr(float(number)))
        return _first_argument(node) if is_identity else None  # repr: -0.0 is not 0.0

    return rewrite


def _multiply_by_one(node: fx.Node) -> fx.Node | None:
    """x * 1 and x / 1 are x for real numbers. A complex product contains inf * 0."""
    return None if fake_value(node).is_complex() else _identity_operand(1)(node)


def _add_zero(node: fx.Node) -> fx.Node | None:
    """x + 0 is x for integers only."""
    value = fake_value(node)
    return None if value.is_floating_point() or value.is_complex() else _identity_operand(0)(node)


def _cancel_inverse(target: Any) -> Rewrite:
    """op(op(x)) is x."""

    def rewrite(node: fx.Node) -> fx.Node | None:
        inner = _first_argument(node)
        same = inner is not None and inner.target is target and inner.args[1:] == node.args[1:]
        return _first_argument(inner) if inner is not None and same else None

    return rewrite


def _cancel_cast(node: fx.Node) -> fx.Node | None:
    """A cast to the value's own dtype, or to a wider dtype and back."""
    first = _first_argument(node)
    if first is None:
        return None
    if first.target is aten._to_copy.default and (source := _first_argument(first)) is not None:
        narrow, wide = fake_value(source).dtype, fake_value(first).dtype
        if fake_value(node).dtype == narrow and wide in EXACT_WIDENINGS.get(narrow, ()):
            return source
    return first


RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
EXACT_WIDENINGS = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}
REWRITES: dict[Any, Rewrite] = {
    aten.mul.Tensor: _multiply_by_one,
    aten.mul.Scalar: _multiply_by_one,
    aten.div.Tensor: _multiply_by_one,
    aten.div.Scalar: _multiply_by_one,
    aten.sub.Tensor: _identity_operand(0),
    aten.add.Tensor: _add_zero,
    aten.pow.Tensor_Scalar: _identity_operand(1),
    aten.neg.default: _cancel_inverse(aten.neg.default),
    aten._conj.default: _cancel_inverse(aten._conj.default),
    aten.t.default: _cancel_inverse(aten.t.default),
    aten.transpose.int: _cancel_inverse(aten.transpose.int),
    aten.view.default: _equal_view,
    aten._unsafe_view.default: _equal_view,
    aten.reshape.default: _equal_view,
    aten.expand.default: _first_argument,
    aten.permute.default: _first_argument,
    aten.slice.Tensor: lambda node: _first_argument(node) if _is_full_slice(node) else None,
    aten.alias.default: _first_argument,
    aten.detach.default: _first_argument,
    aten.clone.default: _first_argument,
    aten._to_copy.default: _cancel_cast,
}


def _is_full_slice(node: fx.Node) -> bool:
    """A slice from the start with step 1. The caller's metadata check covers its end."""
    start = node.args[2] if len(node.args) > 2 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return start in (None, 0) and step == 1


@transform
def eliminate_common_subexpressions(trace: Trace) -> Trace:
    """Merge nodes that compute the same from the same inputs (CSE)."""
    return trace.edit(merge_subexpressions_in_graph)


def merge_subexpressions_in_graph(graph: fx.Graph) -> None:
    """The same on a graph in place, for the joint graph before it is partitioned."""
    visible = find_escaping(graph)
    first_seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_pure(node):
            continue
        key = (node.target, _hashable_key(node.args), _hashable_key(node.kwargs))
        first = first_seen.setdefault(key, node)
        if first is not node and node not in visible:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _hashable_key(value: Any) -> Any:
    """A hashable key of an argument. 1, 1.0 and True have different keys, and so do 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(_hashable_key(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _hashable_key(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return (
            "slice",
            _hashable_key(value.start),
            _hashable_key(value.stop),
            _hashable_key(value.step),
        )
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    return (type(value), value)


SIMPLIFY = [fold_constants, simplify_algebra, eliminate_common_subexpressions, eliminate_dead_code]

__all__ = [
    "SIMPLIFY",
    "eliminate_common_subexpressions",
    "eliminate_dead_code",
    "fold_constants",
    "simplify_algebra",
]
