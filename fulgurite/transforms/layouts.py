"""Memory layouts after some nodes of a graph return others than before.

In: a functional graph, and the values that its nodes had. Out: the same graph, with the values that follow
from the new layouts. Convolutions with packed weights return channels-last tensors; elementwise ops, norms
and pooling after them keep that layout. Where an op needs the old one (a view, an operator of another
library, a result of the graph), a copy restores it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.trace.cost import is_view, iter_tensors, size_hint
from fulgurite.trace.metadata import find_fake_mode, run_node, use_fake_mode
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import (
    fake_value,
    has_side_effect,
    is_in_backward,
    mark_in_backward,
    set_fake_value,
)
from fulgurite.trace.purity import find_escaping

aten = torch.ops.aten
# ops that compute from strides, not from elements
STRIDED_OPS = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
)
ADAPTABLE_NAMESPACES = ("aten", "prims", "fulgurite")


class CannotRelayout(Exception):
    """A tensor's old layout can't be restored by a copy."""


def update_layouts(module: fx.GraphModule, before: Mapping[fx.Node, Any]) -> None:
    """Compute the values that follow from changed layouts.

    A result of the graph, or what it is a view of, is brought to its old layout where it is computed.
    So results share memory as before.

    before   the values that nodes had; of a new node, that of the node which it replaces
    """
    escaping = find_escaping(module.graph)
    with use_fake_mode(find_fake_mode(module)):
        for node in list(module.graph.nodes):
            if node.op != "call_function" or has_side_effect(node):
                continue
            if node not in before:  # a view or weight of a new node
                if not _recompute(module, node):
                    raise CannotRelayout(f"{node.name} can't run on other layouts")
                continue
            changed = [n for n in node.all_input_nodes if _has_changed(n, before)]
            if changed:
                _adapt(module, node, changed, before)
            is_item = node.target is operator.getitem  # of a tuple, which can't be restored itself
            is_origin = is_item or not (changed and is_view(node))
            can_restore = is_origin and isinstance(before[node], Tensor)
            if node in escaping and can_restore and _has_changed(node, before):
                _restore_result(node, before[node])


def _adapt(
    module: fx.GraphModule,
    node: fx.Node,
    changed: Sequence[fx.Node],
    before: Mapping[fx.Node, Any],
) -> None:
    """Compute the value of a node whose inputs have other layouts, or let it read copies."""
    if not _can_adapt(node):
        _restore_inputs(node, changed, before)
        return
    _unify_operands(node, changed)
    if not _recompute(module, node):
        _restore_inputs(node, changed, before)
        if not _recompute(module, node):
            raise CannotRelayout(f"{node.name} can't run on other layouts")


def _restore_result(node: fx.Node, old: Tensor) -> None:
    """Let everything read a node's value in the old layout."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        anchor = node.graph.call_function(aten.clone.default, (node,))
    with node.graph.inserting_before(anchor):
        restored = _restore_layout(node, old)
    node.graph.erase_node(anchor)
    for user in users:
        user.replace_input_with(node, restored)


def _has_changed(node: fx.Node, before: Mapping[fx.Node, Any]) -> bool:
    old, new = before.get(node), fake_value(node)
    if node.target is operator.getitem or isinstance(old, Tensor):
        return isinstance(old, Tensor) and _strides(old) != _strides(new)
    if isinstance(old, list | tuple):  # its items tell
        pairs = zip(old, new, strict=True)
        return any(isinstance(a, Tensor) and _strides(a) != _strides(b) for a, b in pairs)
    return False


def _strides(value: Tensor) -> list[str]:
    """Strides as text: symbols are compared without guards. torch's convolutions look at all of them."""
    return [*map(str, value.stride())]


def _order(value: Tensor) -> list[str]:
    """The strides that decide which element is where: not those of dimensions of size 1."""
    sizes = map(str, value.shape)
    return [stride for size, stride in zip(sizes, _strides(value), strict=True) if size != "1"]


def _can_adapt(node: fx.Node) -> bool:
    """Whether a node takes any layout, and its result's layout can be computed."""
    if node.target is operator.getitem:
        return True
    if node.target in STRIDED_OPS or mutated_inputs(node):
        return False
    if (
        node.target is aten.native_group_norm.default
    ):  # contiguous or channels-last, says its kernel
        return all(fake_value(source).dim() in (1, 4, 5) for source in node.all_input_nodes)
    return getattr(node.target, "namespace", "") in ADAPTABLE_NAMESPACES


def _recompute(module: fx.GraphModule, node: fx.Node) -> bool:
    """Compute the node's value from its arguments' values; False for a view that they don't allow."""
    values = {source: fake_value(source) for source in node.all_input_nodes}
    try:
        set_fake_value(node, run_node(module, node, values))
    except (RuntimeError, ValueError):  # a view across memory that is not contiguous
        return False
    return True


def _unify_operands(node: fx.Node, changed: Sequence[fx.Node]) -> None:
    """Bring the operands of an elementwise op to one layout, that of the first changed one.

    torch's fake rules of some ops predict another layout than their kernels return for operands of
    different layouts (`elu_backward`). A generated kernel reads the operand in place.
    """
    result: Tensor | None = next(iter(iter_tensors(fake_value(node))), None)
    peers = [n for n in node.all_input_nodes if result is not None and _is_like(n, result)]
    leader = next((n for n in peers if n in changed), None)
    if leader is None:
        return
    wanted = _dim_order(fake_value(leader))
    with node.graph.inserting_before(node):
        for source in peers:
            if _dim_order(fake_value(source)) != wanted:
                copy = _copy_in_order(source, wanted, is_in_backward(node))
                node.replace_input_with(source, copy)


def _dim_order(value: Tensor) -> list[int]:
    """The dimensions from the largest stride to the smallest; those of size 1 are last."""
    sizes = [str(size) == "1" for size in value.shape]
    return sorted(
        range(value.dim()), key=lambda dim: (sizes[dim], -size_hint(value.stride(dim)), dim)
    )


def _is_like(node: fx.Node, result: Tensor) -> bool:
    """Whether a node has the sizes of a result, and no dimension is expanded."""
    value = fake_value(node)
    if not isinstance(value, Tensor) or [*map(str, value.shape)] != [*map(str, result.shape)]:
        return False
    return "0" not in _order(value)


def _restore_inputs(
    node: fx.Node, sources: Sequence[fx.Node], before: Mapping[fx.Node, Any]
) -> None:
    """Let a node read copies in the old layouts."""
    for source in sources:
        value = before[source]
        if not isinstance(value, Tensor):
            raise CannotRelayout(f"{source.name} is a tuple")
        with node.graph.inserting_before(node):
            node.replace_input_with(source, _restore_layout(source, value))


def _restore_layout(node: fx.Node, old: Tensor) -> fx.Node:
    """A node's value with the strides of an old one.

    That is a view if only strides of dimensions of size 1 differ, otherwise a copy.
    """
    new, size, strides = fake_value(node), list(old.shape), list(old.stride())
    if _order(old) != _order(new):
        return _copy_to_layout(node, old)
    if not all(isinstance(n, int) for n in (*size, *strides)):
        return node
    view = node.graph.call_function(aten.as_strided.default, (node, size, strides))
    set_fake_value(view, new.as_strided(size, strides))
    return view


def _copy_to_layout(node: fx.Node, old: Tensor) -> fx.Node:
    """A copy of a node's value with the sizes and strides of an old one."""
    order = sorted(range(old.dim()), key=lambda dim: (-size_hint(old.stride(dim)), dim))
    result = _copy_in_order(node, order)
    if _order(fake_value(result)) != _order(old):
        raise CannotRelayout(f"{node.name} had the strides {tuple(old.stride())}")
    return result


def _copy_in_order(node: fx.Node, order: Sequence[int], in_backward: bool = False) -> fx.Node:
    """A dense copy of a node's value, its dimensions in memory from the outermost to the innermost."""
    graph = node.graph
    permuted = graph.call_function(aten.permute.default, (node, list(order)))
    copied = graph.call_function(
        aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format}
    )
    back = [order.index(dim) for dim in range(len(order))]
    result = graph.call_function(aten.permute.default, (copied, back))
    if list(order) == sorted(order):  # contiguous
        copied.args = (node,)
        graph.erase_node(result)
        graph.erase_node(permuted)
        result = copied
    for new in (permuted, copied, result):
        if not new._erased:
            args = fx.node.map_arg(new.args, fake_value)
            set_fake_value(new, new.target(*args, **new.kwargs))  # type: ignore[operator]
            if in_backward:
                mark_in_backward(new)
    return result
