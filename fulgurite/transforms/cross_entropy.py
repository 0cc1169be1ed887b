"""Recompute log-softmax in the backward of a cross entropy, instead of saving it.

In: the joint graph of forward and backward. Out: the same, where forward saves two numbers per row and
backward recomputes the log-softmax from the logits, which are in memory anyway. Forward then writes
nothing as large as the logits:

    log_softmax(x)[n,c] = x[n,c] - row_max[n] - log_sum[n]
    row_max = max_c x          log_sum = log(sum_c exp(x - row_max))

The gradient of the negative log likelihood has one nonzero number per row. Its sum over the classes, which
the backward of log-softmax needs, is that number (`cross_entropy_backward`).
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from fulgurite.op import op
from fulgurite.trace.cost import is_view
from fulgurite.trace.metadata import find_fake_mode, use_fake_mode
from fulgurite.trace.node_meta import (
    copy_meta,
    fake_value,
    is_in_backward,
    mark_must_recompute,
    set_fake_value,
)
from fulgurite.transforms.nll_loss import (
    broadcast_row_gradients,
    class_gradients,
    target_class_gradients,
)
from fulgurite.transforms.relu_backward import emit_recompute, skip_detach

aten = torch.ops.aten
LOG_SOFTMAX = aten._log_softmax.default
LOG_SOFTMAX_BACKWARD = aten._log_softmax_backward_data.default
NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


@op("fulgurite::log_softmax_with_stats")
def log_softmax_with_stats(
    x: Tensor, dim: int, half_to_float: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax, and the two numbers per row that it subtracts: the maximum and the log-sum-exp."""
    return _log_softmax_with_stats(x, dim, half_to_float)


@log_softmax_with_stats.fake
def _(x, dim, half_to_float):  # type: ignore[no-untyped-def]
    return _log_softmax_with_stats(x, dim, half_to_float)


@log_softmax_with_stats.decomposition
def _(x, dim, half_to_float):  # type: ignore[no-untyped-def]
    return _log_softmax_with_stats(x, dim, half_to_float)


def _log_softmax_with_stats(
    x: Tensor, dim: int, half_to_float: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    row_max = wide.amax(dim, keepdim=True)
    log_sum = (wide - row_max).exp().sum(dim, keepdim=True).log()
    return (
        _recompute_log_softmax(x, row_max, log_sum, wide.dtype if half_to_float else x.dtype),
        row_max,
        log_sum,
    )


@op("fulgurite::recompute_log_softmax")
def recompute_log_softmax(
    x: Tensor, row_max: Tensor, log_sum: Tensor, dtype: torch.dtype
) -> Tensor:
    """log_softmax of x, from the two numbers per row that forward saved."""
    return _recompute_log_softmax(x, row_max, log_sum, dtype)


@recompute_log_softmax.fake
def _(x, row_max, log_sum, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=dtype)


@recompute_log_softmax.decomposition
def _(x, row_max, log_sum, dtype):  # type: ignore[no-untyped-def]
    return _recompute_log_softmax(x, row_max, log_sum, dtype)


def _recompute_log_softmax(
    x: Tensor, row_max: Tensor, log_sum: Tensor, dtype: torch.dtype
) -> Tensor:
    return ((x.to(row_max.dtype) - row_max) - log_sum).to(dtype, copy=True)


@op("fulgurite::cross_entropy_backward")
def cross_entropy_backward(
    grad: Tensor,
    log_probs: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits: `nll_loss_backward`, then `_log_softmax_backward_data`."""
    grad, target = broadcast_row_gradients(grad, log_probs, target, reduction, total_weight)
    return _logits_gradient(grad, log_probs, target, weight, ignore_index, dtype)


@cross_entropy_backward.fake
def _(grad, log_probs, target, weight, reduction, ignore_index, total_weight, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(log_probs, dtype=dtype)


@cross_entropy_backward.decomposition
def _(grad, log_probs, target, weight, reduction, ignore_index, total_weight, dtype):  # type: ignore[no-untyped-def]
    grad, target = broadcast_row_gradients(grad, log_probs, target, reduction, total_weight)
    return _logits_gradient(grad, log_probs, target, weight, ignore_index, dtype)


def _logits_gradient(
    grad: Tensor,
    log_probs: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:
    by_class = class_gradients(grad, log_probs, target, weight, ignore_index)
    # the sum of `by_class` over the classes
    row_sum = target_class_gradients(grad, log_probs, target, weight, ignore_index)
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    return (by_class.to(wide) - log_probs.to(wide).exp() * row_sum.to(wide)).to(dtype)


def recompute_log_softmax_in_backward(joint: fx.GraphModule) -> None:
    """Let the backward of each log-softmax read its input, unless its output is needed elsewhere."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=LOG_SOFTMAX):
        readers = _backward_readers(node)
        if readers and _is_supported(node):
            with use_fake_mode(find_fake_mode(joint)):
                _replace_log_softmax(graph, node, readers)
    graph.eliminate_dead_code()


def _backward_readers(node: fx.Node) -> list[fx.Node]:
    """Nodes of backward that read the log-softmax; empty if one of them is not its gradient."""
    aliases, found = [node], []
    for alias in aliases:
        for user in alias.users:
            if user.target is aten.detach.default:
                aliases.append(user)
            elif user.op == "output":
                return []
            elif is_in_backward(user):
                found.append(user)
    is_supported = all(
        user.target in (LOG_SOFTMAX_BACKWARD, *NLL_BACKWARD) and skip_detach(user.args[1]) is node
        for user in found
    )
    return found if is_supported and any(u.target is LOG_SOFTMAX_BACKWARD for u in found) else []


def _is_supported(node: fx.Node) -> bool:
    """Whether the tensor is not empty, and has the strides that the formulas produce."""
    value = fake_value(node)
    x = fake_value(node.args[0])  # type: ignore[union-attr]
    is_nonempty = all(not isinstance(size, int) or size > 0 for size in x.shape)
    return is_nonempty and x.dim() > 0 and x.stride() == value.stride()


def _replace_log_softmax(graph: fx.Graph, node: fx.Node, readers: list[fx.Node]) -> None:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    _recompute_copies(x)
    with graph.inserting_before(node):
        outputs = graph.call_function(log_softmax_with_stats.overload, node.args)
        copy_meta(node, outputs)
        set_fake_value(outputs, log_softmax_with_stats.overload(fake_value(x), *node.args[1:]))
        items = [graph.call_function(operator.getitem, (outputs, index)) for index in range(3)]
        for item, value in zip(items, fake_value(outputs), strict=True):
            copy_meta(node, item)
            set_fake_value(item, value)
    log_probs, row_max, log_sum = items
    first = min(readers, key=list(graph.nodes).index)
    with graph.inserting_before(first):
        recomputed = emit_recompute(
            graph, recompute_log_softmax.overload, x, row_max, log_sum, fake_value(node).dtype
        )
    for reader in readers:
        reader.args = (reader.args[0], recomputed, *reader.args[2:])
        if reader.target is LOG_SOFTMAX_BACKWARD:
            _fuse_gradients(graph, reader, recomputed)
    node.replace_all_uses_with(log_probs)


def _recompute_copies(x: fx.Node) -> None:
    """Recompute slices, copies and casts of the logits, so that only their source is saved."""
    copies = aten.clone.default, aten._to_copy.default
    while x.target in copies or (is_view(x) and x.target is not operator.getitem):
        mark_must_recompute(x)
        x = x.all_input_nodes[0]


def _fuse_gradients(graph: fx.Graph, node: fx.Node, log_probs: fx.Node) -> None:
    """Merge the gradients of nll_loss and log_softmax into one op, if they are adjacent."""
    (nll_gradient, _, dim, dtype) = node.args
    if not isinstance(nll_gradient, fx.Node) or nll_gradient.target not in NLL_BACKWARD:
        return
    value = fake_value(log_probs)
    if dim % value.dim() != (0 if value.dim() < 2 else 1):  # type: ignore[operator]
        return
    (grad, _, *rest) = nll_gradient.args
    with graph.inserting_before(node):
        fused = graph.call_function(
            cross_entropy_backward.overload, (grad, log_probs, *rest, dtype)
        )
    copy_meta(node, fused)
    node.replace_all_uses_with(fused)
