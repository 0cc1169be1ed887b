"""The built-in clean-ups, in the order they run: `SIMPLIFY`.

In: a functional Trace. Out: a smaller one that computes the same bits: -0, NaN and inf included, the same
random draws, the same sharing of memory between results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.trace import Trace
from fulgurite.trace.metadata import call_node, same_metadata
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.base import transform
from fulgurite.transforms.purity import escaping, is_pure, makes_memory

aten = torch.ops.aten
FOLD_LIMIT = 16  # elements: larger constants are cheaper to compute than to keep


@transform
def dead_code(trace: Trace) -> Trace:
    """Drop what nobody uses. Random draws stay: dropping one would shift all that follow."""

    def change(graph: fx.Graph) -> None:
        for node in reversed(graph.nodes):
            if not node.users and is_pure(node):
                graph.erase_node(node)

    dead = any(not node.users and is_pure(node) for node in trace.graph.nodes)
    return trace.edited(change) if dead else trace


@transform
def constant_folding(trace: Trace) -> Trace:
    """Compute once what depends on constants alone, where the result is small."""
    if not any(node.op == "get_attr" or _foldable(node, {}) for node in trace.graph.nodes):
        return trace
    module = copy_module(trace.module)
    graph = module.graph
    visible = escaping(graph)
    folded: list[str] = []
    known: dict[fx.Node, Any] = {}  # constants so far, by the node that stands for them
    for node in list(graph.nodes):
        if node.op == "get_attr":
            known[node] = call_node(module, node, {})
        elif _foldable(node, known):
            with _disable_current_modes(), torch.no_grad():
                known[node] = call_node(module, node, known)
    for node, value in known.items():
        needed = any(user not in known for user in node.users)
        creates = not node.all_input_nodes  # a creator is as short as the constant it would become
        if node.op == "get_attr" or creates or not needed or node in visible:
            continue
        if isinstance(value, torch.Tensor):
            serial = itertools.count(len(folded))
            name = next(n for n in map("folded_{}".format, serial) if not hasattr(module, n))
            folded.append(name)
            module.register_buffer(name, value)
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(constant)
    return dead_code(trace.with_module(module)) if folded else trace


def _foldable(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not is_pure(node):
        return False
    if node.target in (aten.empty.memory_format, aten.empty_strided.default):
        return False
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor) or any(isinstance(s, torch.SymInt) for s in value.shape):
        return False
    small = value.numel() <= FOLD_LIMIT
    return small and all(source in known for source in node.all_input_nodes)


@transform
def algebra(trace: Trace) -> Trace:
    """Rewrites that hold for every value: `x * 1`, `x / 1`, `x - 0`, casts there and back, idle views.

    Not `x + 0.0` (-0.0 + 0.0 is 0.0), not `x * 0` (NaN, inf), not `x - x`.
    """

    def change(graph: fx.Graph) -> None:
        visible = escaping(graph)
        outputs = set(graph.output_node().all_input_nodes)
        for node in list(graph.nodes):
            rule = RULES.get(node.target) if node.op == "call_function" else None
            same = rule(node) if rule is not None else None
            if same is None or not same_metadata(same.meta.get("val"), node.meta.get("val")):
                continue
            if node.target in COPIES and (node in visible or same in visible):
                continue
            if node in visible and makes_memory(node):  # the caller may write to it
                if same in visible or not makes_memory(same):
                    continue
                visible.add(same)
            if node in outputs:  # results stay objects of their own
                if same in outputs or same.op != "call_function":
                    continue
                outputs.add(same)
            node.replace_all_uses_with(same)
            graph.erase_node(node)

    return trace.edited(change)


Rule = Callable[[fx.Node], fx.Node | None]  # the earlier node it equals, if it does


def _first(node: fx.Node) -> fx.Node | None:
    """The first argument, if it is a node (metadata is compared by the caller)."""
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def _same_view(node: fx.Node) -> fx.Node | None:
    """The nearest value up the chain of views that looks the same: they keep the order of elements."""
    above = _first(node)
    while above is not None and above.target in SAME_ORDER:
        if same_metadata(above.meta.get("val"), node.meta.get("val")):
            return above
        above = _first(above)
    return above


def _neutral_right(number: int) -> Rule:
    """`x op number` is x."""

    def rule(node: fx.Node) -> fx.Node | None:
        plain = len(node.args) == 2 and not node.kwargs and type(node.args[1]) in (int, float)
        neutral = plain and repr(node.args[1]) in (repr(number), repr(float(number)))  # not -0.0
        return _first(node) if neutral else None

    return rule


def _times_one(node: fx.Node) -> fx.Node | None:
    """x * 1 and x / 1 are x for real numbers; a complex product has inf * 0 in it."""
    return None if node.meta["val"].is_complex() else _neutral_right(1)(node)


def _add_zero(node: fx.Node) -> fx.Node | None:
    """x + 0 is x for integers only."""
    value = node.meta["val"]
    return None if value.is_floating_point() or value.is_complex() else _neutral_right(0)(node)


def _undo(target: Any) -> Rule:
    """op(op(x)) is x."""

    def rule(node: fx.Node) -> fx.Node | None:
        inner = _first(node)
        same = inner is not None and inner.target is target and inner.args[1:] == node.args[1:]
        return _first(inner) if inner is not None and same else None

    return rule


def _there_and_back(node: fx.Node) -> fx.Node | None:
    """A cast to what it is already, or to a wider type and back."""
    first = _first(node)
    if first is None:
        return None
    if first.target is aten._to_copy.default and (source := _first(first)) is not None:
        narrow, wide = source.meta["val"].dtype, first.meta["val"].dtype
        if node.meta["val"].dtype == narrow and wide in WIDER.get(narrow, ()):
            return source
    return first


SAME_ORDER = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}
RULES: dict[Any, Rule] = {
    aten.mul.Tensor: _times_one,
    aten.mul.Scalar: _times_one,
    aten.div.Tensor: _times_one,
    aten.div.Scalar: _times_one,
    aten.sub.Tensor: _neutral_right(0),
    aten.add.Tensor: _add_zero,
    aten.pow.Tensor_Scalar: _neutral_right(1),
    aten.neg.default: _undo(aten.neg.default),
    aten._conj.default: _undo(aten._conj.default),
    aten.t.default: _undo(aten.t.default),
    aten.transpose.int: _undo(aten.transpose.int),
    aten.view.default: _same_view,
    aten._unsafe_view.default: _same_view,
    aten.reshape.default: _same_view,
    aten.expand.default: _first,
    aten.permute.default: _first,
    aten.slice.Tensor: lambda node: _first(node) if _whole_slice(node) else None,
    aten.alias.default: _first,
    aten.detach.default: _first,
    aten.clone.default: _first,
    aten._to_copy.default: _there_and_back,
}


def _whole_slice(node: fx.Node) -> bool:
    """A slice from the start in steps of one; that it ends at the end is in the metadata."""
    start = node.args[2] if len(node.args) > 2 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return start in (None, 0) and step == 1


@transform
def common_subexpressions(trace: Trace) -> Trace:
    """Compute once what is computed twice from the same inputs."""
    return trace.edited(merge_common_subexpressions)


def merge_common_subexpressions(graph: fx.Graph) -> None:
    """The same on a graph in place, for the joint graph before it is split."""
    visible = escaping(graph)
    first_seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_pure(node):
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        first = first_seen.setdefault(key, node)
        if first is not node and node not in visible:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _key(value: Any) -> Any:
    """A hashable stand-in: equal keys, equal values. 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _key(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return ("slice", _key(value.start), _key(value.stop), _key(value.step))
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    return (type(value), value)


SIMPLIFY = [constant_folding, algebra, common_subexpressions, dead_code]

__all__ = ["SIMPLIFY", "algebra", "common_subexpressions", "constant_folding", "dead_code"]
