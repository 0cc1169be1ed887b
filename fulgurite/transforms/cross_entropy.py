"""The backward of a cross entropy from the logits, which are in memory anyway, instead of their logarithms.

In: the joint graph of forward and backward. Out: the same, where forward gives two numbers a row and backward makes
the logarithms once more; forward then writes nothing as large as the logits:

    log_softmax(x)[n,c] = x[n,c] - top[n] - total[n]       top = max_c x       total = log(sum_c exp(x - top))

The gradient of the negative log likelihood has one number a row that is not zero, so that its sum over the classes,
which the backward of the log softmax asks for, is that number (`cross_entropy_backward`).
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from fulgurite.op import op
from fulgurite.trace.cost import is_view
from fulgurite.trace.metadata import fake_mode_of, faking
from fulgurite.transforms.losses import by_class, of_own_class, of_rows
from fulgurite.transforms.masks import emit_again, recomputed, source

aten = torch.ops.aten
LOG_SOFTMAX = aten._log_softmax.default
LOG_SOFTMAX_BACKWARD = aten._log_softmax_backward_data.default
NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


@op("fulgurite::log_softmax_parts")
def log_softmax_parts(x: Tensor, dim: int, half_to_float: bool) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax, and what it takes off each row: the maximum, and the logarithm of the sum of the rest."""
    return _parts(x, dim, half_to_float)


@log_softmax_parts.fake
def _(x, dim, half_to_float):  # type: ignore[no-untyped-def]
    return _parts(x, dim, half_to_float)


@log_softmax_parts.pieces
def _(x, dim, half_to_float):  # type: ignore[no-untyped-def]
    return _parts(x, dim, half_to_float)


def _parts(x: Tensor, dim: int, half_to_float: bool) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    top = wide.amax(dim, keepdim=True)
    total = (wide - top).exp().sum(dim, keepdim=True).log()
    return _logarithms(x, top, total, wide.dtype if half_to_float else x.dtype), top, total


@op("fulgurite::logarithms_again")
def logarithms_again(x: Tensor, top: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """What a log softmax made of x, from the two numbers a row that it kept."""
    return _logarithms(x, top, total, dtype)


@logarithms_again.fake
def _(x, top, total, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=dtype)


@logarithms_again.pieces
def _(x, top, total, dtype):  # type: ignore[no-untyped-def]
    return _logarithms(x, top, total, dtype)


def _logarithms(x: Tensor, top: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    return ((x.to(top.dtype) - top) - total).to(dtype, copy=True)


@op("fulgurite::cross_entropy_backward")
def cross_entropy_backward(
    grad: Tensor,
    logarithms: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits: `nll_loss_backward` and then `_log_softmax_backward_data`."""
    grad, target = of_rows(grad, logarithms, target, reduction, total_weight)
    return _gradient(grad, logarithms, target, weight, ignored, dtype)


@cross_entropy_backward.fake
def _(grad, logarithms, target, weight, reduction, ignored, total_weight, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(logarithms, dtype=dtype)


@cross_entropy_backward.pieces
def _(grad, logarithms, target, weight, reduction, ignored, total_weight, dtype):  # type: ignore[no-untyped-def]
    grad, target = of_rows(grad, logarithms, target, reduction, total_weight)
    return _gradient(grad, logarithms, target, weight, ignored, dtype)


def _gradient(
    grad: Tensor,
    logarithms: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignored: int,
    dtype: torch.dtype,
) -> Tensor:
    each = by_class(grad, logarithms, target, weight, ignored)
    row = of_own_class(
        grad, logarithms, target, weight, ignored
    )  # the sum of `each` over the classes
    wide = torch.promote_types(logarithms.dtype, torch.float32)
    return (each.to(wide) - logarithms.to(wide).exp() * row.to(wide)).to(dtype)


def logarithms_from_logits(joint: fx.GraphModule) -> None:
    """Let the backward of each log softmax look at its input, where nothing else keeps what it made."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=LOG_SOFTMAX):
        readers = _readers(node)
        if readers and _is_taken(node):
            with faking(fake_mode_of(joint)):
                _split(graph, node, readers)
    graph.eliminate_dead_code()


def _readers(node: fx.Node) -> list[fx.Node]:
    """What backward does with it; none where that is more than the gradient of a log softmax."""
    behind, found = [node], []
    for one in behind:
        for user in one.users:
            if user.target is aten.detach.default:
                behind.append(user)
            elif user.op == "output":
                return []
            elif user.meta.get("partitioner_tag") == "is_backward":
                found.append(user)
    known = all(
        user.target in (LOG_SOFTMAX_BACKWARD, *NLL_BACKWARD) and source(user.args[1]) is node
        for user in found
    )
    return found if known and any(u.target is LOG_SOFTMAX_BACKWARD for u in found) else []


def _is_taken(node: fx.Node) -> bool:
    """Whether it has elements, which lie as the formulas lay them."""
    value = node.meta["val"]
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    has_some = all(not isinstance(size, int) or size > 0 for size in x.shape)
    return has_some and x.dim() > 0 and x.stride() == value.stride()


def _split(graph: fx.Graph, node: fx.Node, readers: list[fx.Node]) -> None:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    _move_again(x)
    with graph.inserting_before(node):
        parts = graph.call_function(log_softmax_parts.overload, node.args)
        parts.meta = {**node.meta, "val": log_softmax_parts.overload(x.meta["val"], *node.args[1:])}
        items = [graph.call_function(operator.getitem, (parts, place)) for place in range(3)]
        for item, value in zip(items, parts.meta["val"], strict=True):
            item.meta = {**node.meta, "val": value}
    made, top, total = items
    first = min(readers, key=list(graph.nodes).index)
    with graph.inserting_before(first):
        again = emit_again(graph, logarithms_again.overload, x, top, total, node.meta["val"].dtype)
    for reader in readers:
        reader.args = (reader.args[0], again, *reader.args[2:])
        if reader.target is LOG_SOFTMAX_BACKWARD:
            _join(graph, reader, again)
    node.replace_all_uses_with(made)


def _move_again(x: fx.Node) -> None:
    """Keep what slices, copies and casts were made of, instead of what they gave."""
    moves = aten.clone.default, aten._to_copy.default
    while x.target in moves or (is_view(x) and x.target is not operator.getitem):
        recomputed(x)
        x = x.all_input_nodes[0]


def _join(graph: fx.Graph, node: fx.Node, again: fx.Node) -> None:
    """The gradients of the likelihood and of the log softmax in one, where nothing is between them."""
    (likelihood, _, dim, dtype) = node.args
    if not isinstance(likelihood, fx.Node) or likelihood.target not in NLL_BACKWARD:
        return
    value = again.meta["val"]
    if dim % value.dim() != (0 if value.dim() < 2 else 1):  # type: ignore[operator]
        return
    (grad, _, *rest) = likelihood.args
    with graph.inserting_before(node):
        joined = graph.call_function(cross_entropy_backward.overload, (grad, again, *rest, dtype))
    joined.meta = dict(node.meta)
    node.replace_all_uses_with(joined)
