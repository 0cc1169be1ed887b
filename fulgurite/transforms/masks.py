"""The gradient of a relu behind batch norms, without reading the relu's result again.

In: the joint graph of forward and backward. Out: the same, where `threshold_backward` looks at what the relu was
given, computed once more from the input of the batch norm, which the norm's own backward reads in the same kernels:

    relu(y) <= 0   is   y <= 0,   with  y[n,c,…] = (x[n,c,…] - mean[c]) * rstd[c] * weight[c] + bias[c]

or the sum of two such y (a block of a residual network and its shortcut). Two kernels a norm read one tensor less:
the sums over a channel, and the gradient of x. Where nothing else needs the relu's result, it is not kept either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fulgurite.op import op
from fulgurite.trace.metadata import fake_mode_of, faking

aten = torch.ops.aten
NORM = aten._native_batch_norm_legit_functional.default
NORM_BACKWARD = aten.native_batch_norm_backward.default
TRAINS = 5, 7  # where the two are told that statistics are the batch's own


@op("fulgurite::normalized_again")
def normalized_again(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """What a batch norm made of x, from the statistics that it kept."""
    return _normalized(x, mean, rstd, weight, bias)


@normalized_again.fake
def _(x, mean, rstd, weight, bias):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@normalized_again.pieces
def _(x, mean, rstd, weight, bias):  # type: ignore[no-untyped-def]
    return _normalized(x, mean, rstd, weight, bias)


def _normalized(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The norm's own formula, rounded where it rounds."""
    channels = [1, -1] + [1] * (x.dim() - 2)
    y = (x.to(mean.dtype) - mean.view(channels)) * rstd.view(channels)
    y = y * weight.view(channels) if weight is not None else y
    y = y + bias.view(channels) if bias is not None else y
    return y.to(x.dtype)


def masks_from_inputs(joint: fx.GraphModule) -> None:
    """Let the backward of each relu look at what the relu was given, where that is at hand."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
        norms = _norms_before(node)
        if norms:
            with graph.inserting_before(node), faking(fake_mode_of(joint)):
                again = [_again(graph, norm) for norm in norms]
                given = again[0] if len(again) == 1 else emit_again(graph, aten.add.Tensor, *again)
            node.args = (node.args[0], given, *node.args[2:])


def _norms_before(node: fx.Node) -> list[fx.Node]:
    """The batch norms whose results, or whose sum, the relu was given; none where x is not read anyway."""
    relu = source(node.args[1])
    if relu is None or relu.target is not aten.relu.default or node.args[2] != 0:
        return []
    given = source(relu.args[0])
    if given is None:
        return []
    is_sum = given.target is aten.add.Tensor and not given.kwargs
    norms = [_norm_of(term) for term in (given.args if is_sum else (given,))]
    read = {user.args[1] for user in node.users if _is_in_training(user, NORM_BACKWARD)}
    found = [norm for norm in norms if norm is not None and norm.args[0] in read]
    return found if len(found) == len(norms) else []


def _norm_of(value: Any) -> fx.Node | None:
    """The batch norm in training that this is the result of."""
    item = source(value)
    if item is None or len(item.args) != 2 or item.args[1] != 0:
        return None
    (norm, _) = item.args
    return norm if isinstance(norm, fx.Node) and _is_in_training(norm, NORM) else None


def _is_in_training(node: fx.Node, target: Any) -> bool:
    place = TRAINS[0] if target is NORM else TRAINS[1]
    return node.target is target and len(node.args) > place and node.args[place] is True


def source(value: Any) -> fx.Node | None:
    while isinstance(value, fx.Node) and value.target is aten.detach.default:
        value = value.args[0]
    return value if isinstance(value, fx.Node) else None


def _again(graph: fx.Graph, norm: fx.Node) -> fx.Node:
    """The norm's result once more, in backward."""
    x, weight, bias = norm.args[:3]
    mean, rstd = (_item(graph, norm, place) for place in (1, 2))
    return emit_again(graph, normalized_again.overload, x, mean, rstd, weight, bias)


def _item(graph: fx.Graph, norm: fx.Node, place: int) -> fx.Node:
    found = next((user for user in norm.users if user.args[1] == place), None)
    assert found is not None, f"the backward of {norm.name} reads none of its statistics"
    return found


def emit_again(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A node that backward computes: torch would rather make it in forward and keep it."""
    node = graph.call_function(target, args)
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta["val"] = target(*values)
    node.meta["partitioner_tag"] = "is_backward"
    recomputed(node)
    return node


def recomputed(node: fx.Node) -> None:
    """Let backward compute it once more, whatever that saves."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 0
