"""Recompute the ReLU mask after a batch norm in backward, instead of reading the ReLU's output.

In: the joint graph of forward and backward. Out: the same, where `threshold_backward` reads the ReLU's
input. That is recomputed from the input of the batch norm, which the norm's backward reads in the same
kernels anyway:

    relu(y) <= 0   is   y <= 0,   with  y[n,c,…] = (x[n,c,…] - mean[c]) * rstd[c] * weight[c] + bias[c]

or the sum of two such y (a residual block and its shortcut). Two kernels per norm read one tensor less:
the channel sums and the gradient of x. If nothing else needs the ReLU's output, it is not saved either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.op import op
from fulgurite.trace.metadata import find_fake_mode, use_fake_mode
from fulgurite.trace.node_meta import (
    fake_value,
    mark_in_backward,
    mark_must_recompute,
    set_fake_value,
)

aten = torch.ops.aten
BATCH_NORM = aten._native_batch_norm_legit_functional.default
BATCH_NORM_BACKWARD = aten.native_batch_norm_backward.default
TRAINING_ARGUMENT = 5, 7  # position of the argument `training` of the two


@op("fulgurite::recompute_batch_norm")
def recompute_batch_norm(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The output of a batch norm, from its input and the statistics that forward saved."""
    return _batch_norm(x, mean, rstd, weight, bias)


@recompute_batch_norm.fake
def _(x, mean, rstd, weight, bias):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@recompute_batch_norm.decomposition
def _(x, mean, rstd, weight, bias):  # type: ignore[no-untyped-def]
    return _batch_norm(x, mean, rstd, weight, bias)


def _batch_norm(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The formula of batch norm, rounded where batch norm rounds."""
    channels = [1, -1] + [1] * (x.dim() - 2)
    y = (x.to(mean.dtype) - mean.view(channels)) * rstd.view(channels)
    y = y * weight.view(channels) if weight is not None else y
    y = y + bias.view(channels) if bias is not None else y
    return y.to(x.dtype)


def recompute_relu_masks(joint: fx.GraphModule) -> None:
    """Let the backward of each ReLU read the ReLU's input, if that can be recomputed from norms."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
        norms = _find_batch_norms(node)
        if norms:
            with graph.inserting_before(node), use_fake_mode(find_fake_mode(joint)):
                terms = [_emit_batch_norm(graph, norm) for norm in norms]
                relu_input = (
                    terms[0] if len(terms) == 1 else emit_recompute(graph, aten.add.Tensor, *terms)
                )
            node.args = (node.args[0], relu_input, *node.args[2:])


def _find_batch_norms(node: fx.Node) -> list[fx.Node]:
    """The batch norms whose output, or sum of outputs, is the ReLU's input.

    Empty if a norm's backward does not read its x with this gradient anyway.
    """
    relu = skip_detach(node.args[1])
    if relu is None or relu.target is not aten.relu.default or node.args[2] != 0:
        return []
    relu_input = skip_detach(relu.args[0])
    if relu_input is None:
        return []
    is_sum = relu_input.target is aten.add.Tensor and not relu_input.kwargs
    norms = [_batch_norm_of(term) for term in (relu_input.args if is_sum else (relu_input,))]
    read = {user.args[1] for user in node.users if _is_in_training(user, BATCH_NORM_BACKWARD)}
    found = [norm for norm in norms if norm is not None and norm.args[0] in read]
    return found if len(found) == len(norms) else []


def _batch_norm_of(value: Any) -> fx.Node | None:
    """The training batch norm whose output the value is; None if it is none."""
    item = skip_detach(value)
    if item is None or len(item.args) != 2 or item.args[1] != 0:
        return None
    (norm, _) = item.args
    return norm if isinstance(norm, fx.Node) and _is_in_training(norm, BATCH_NORM) else None


def _is_in_training(node: fx.Node, target: Any) -> bool:
    position = TRAINING_ARGUMENT[0] if target is BATCH_NORM else TRAINING_ARGUMENT[1]
    return node.target is target and len(node.args) > position and node.args[position] is True


def skip_detach(value: Any) -> fx.Node | None:
    """The node behind `detach` calls; None if the value is no node."""
    while isinstance(value, fx.Node) and value.target is aten.detach.default:
        value = value.args[0]
    return value if isinstance(value, fx.Node) else None


def _emit_batch_norm(graph: fx.Graph, norm: fx.Node) -> fx.Node:
    """Recompute the norm's output in backward."""
    x, weight, bias = norm.args[:3]
    mean, rstd = (_find_item(norm, index) for index in (1, 2))
    return emit_recompute(graph, recompute_batch_norm.overload, x, mean, rstd, weight, bias)


def _find_item(norm: fx.Node, index: int) -> fx.Node:
    found = next((user for user in norm.users if user.args[1] == index), None)
    assert found is not None, f"the backward of {norm.name} reads none of its statistics"
    return found


def emit_recompute(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Add a node that backward must compute. torch's partitioner would rather save it in forward."""
    node = graph.call_function(target, args)
    values = [fake_value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    set_fake_value(node, target(*values))
    mark_in_backward(node)
    mark_must_recompute(node)
    return node
