"""Max pooling that saves one byte per element for backward.

In: the joint graph of forward and backward. Out: the same with `max_pool2d_offsets` where only backward
reads the indices. torch saves the position of each maximum as an int64 index into the plane. Here it is
the position inside the window, which fits an int8. The fuser lowers both ops
(`fuser/frontend/pooling.py`, `pooling_gradients.py`):

    forward    value[o] = max_k x[o*stride - padding + k*dilation]       offset[o] = k of the first maximum
    backward   grad_x[i] = sum_k where(offset[o] == k, grad[o], 0)       o = (i + padding - k*dilation) / stride
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.op import op
from fulgurite.trace.metadata import find_fake_mode, use_fake_mode
from fulgurite.trace.node_meta import copy_meta, fake_value, set_fake_value, set_fusion_group

aten = torch.ops.aten
MAX_WINDOW_SIZE = 128  # positions that fit an int8


@op("fulgurite::max_pool2d_offsets")
def max_pool2d_offsets(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    """The maximum of each window, and its position inside the window."""
    values, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    rows, columns = _window_starts(values, stride, padding)
    width = x.shape[-1]
    row_offset = torch.div(indices, width, rounding_mode="floor") - rows
    column_offset = indices % width - columns
    offsets = row_offset // dilation[0] * kernel[1] + column_offset // dilation[1]
    return values, offsets.to(torch.int8)


@max_pool2d_offsets.fake
def _(x, kernel, stride, padding, dilation, ceil_mode):  # type: ignore[no-untyped-def]
    values, _ = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    return values, torch.empty_like(values, dtype=torch.int8)


@op("fulgurite::max_pool2d_offsets_backward")
def max_pool2d_offsets_backward(
    grad: Tensor,
    offsets: Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    channels_last: bool,
) -> Tensor:
    """The gradient of the input of pooling; `size` is its height and width."""
    rows, columns = _window_starts(offsets, stride, padding)
    row_offset = rows + torch.div(offsets, kernel[1], rounding_mode="floor").long() * dilation[0]
    column_offset = columns + (offsets % kernel[1]).long() * dilation[1]
    like = _empty_input_gradient(grad, size, channels_last)
    return aten.max_pool2d_with_indices_backward(
        grad,
        like,
        kernel,
        stride,
        padding,
        dilation,
        ceil_mode,
        row_offset * size[1] + column_offset,
    )


@max_pool2d_offsets_backward.fake
def _(grad, offsets, size, kernel, stride, padding, dilation, ceil_mode, channels_last):  # type: ignore[no-untyped-def]
    return _empty_input_gradient(grad, size, channels_last)


# ---- windows -------------------------------------------------------------------------------------


def _window_starts(like: Tensor, stride: list[int], padding: list[int]) -> tuple[Tensor, Tensor]:
    rows = torch.arange(like.shape[-2], device=like.device) * stride[0] - padding[0]
    columns = torch.arange(like.shape[-1], device=like.device) * stride[1] - padding[1]
    return rows[:, None], columns


def _empty_input_gradient(grad: Tensor, size: list[int], channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(
        (*grad.shape[:-2], *size), dtype=grad.dtype, device=grad.device, memory_format=layout
    )


# ---- the joint graph -----------------------------------------------------------------------------


def use_int8_offsets(joint: fx.GraphModule) -> None:
    """Save positions inside windows instead of indices, if only backward reads them."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices.default):
        items = {user.args[1]: user for user in node.users}
        backward = list(items[1].users) if 1 in items else []
        if not backward or not all(_is_its_backward(user, node) for user in backward):
            continue
        if _window_arguments(node) is None:
            continue
        with use_fake_mode(find_fake_mode(joint)):
            _replace_pooling(graph, node, items, backward)


def _is_its_backward(user: fx.Node, node: fx.Node) -> bool:
    if user.target is not aten.max_pool2d_with_indices_backward.default:
        return False
    return user.args[7] in node.users and user.args[1] is node.args[0]


def _window_arguments(node: fx.Node) -> tuple[Any, ...] | None:
    """kernel, stride, padding, dilation as pairs, and ceil_mode. None if offsets don't fit an int8."""
    value = fake_value(node)[0]
    x = fake_value(node.args[0])  # type: ignore[union-attr]
    if not x.is_floating_point() or not all(isinstance(n, int) for n in (*x.shape, *value.shape)):
        return None
    kernel, stride, padding, dilation, ceil_mode = (*node.args[1:], *[None] * 5)[:5]
    pairs = [
        list(pair) * (2 if len(pair) == 1 else 1)
        for pair in (kernel, stride or kernel, padding or [0], dilation or [1])  # type: ignore[arg-type]
    ]
    if pairs[0][0] * pairs[0][1] > MAX_WINDOW_SIZE:
        return None
    return (*pairs, bool(ceil_mode))


def _replace_pooling(
    graph: fx.Graph, node: fx.Node, items: dict[Any, fx.Node], backward: list[fx.Node]
) -> None:
    window = _window_arguments(node)
    assert window is not None, f"{node.name} was checked before"
    x = node.args[0]
    assert isinstance(x, fx.Node), f"{node.name} does not pool a tensor"
    with graph.inserting_before(node):
        pooled = graph.call_function(max_pool2d_offsets.overload, (x, *window))
        copy_meta(node, pooled)
        set_fake_value(pooled, max_pool2d_offsets(fake_value(x), *window))
        outputs = [graph.call_function(operator.getitem, (pooled, k)) for k in (0, 1)]
    for k, item in enumerate(outputs):
        copy_meta(items.get(k, node), item)
        set_fake_value(item, fake_value(pooled)[k])
    for user in backward:
        old = fake_value(user)
        channels_last = old.dim() == 4 and not old.is_contiguous()
        grad, size = user.args[0], list(old.shape[-2:])
        with graph.inserting_before(user):
            gradient = graph.call_function(
                max_pool2d_offsets_backward.overload,
                (grad, outputs[1], size, *window, channels_last),
            )
        # a kernel of its own: it reads a window's gradient at every position, and a reduction fused
        # with it would read it once more for each
        copy_meta(user, gradient)
        set_fusion_group(gradient, gradient.name)
        user.replace_all_uses_with(gradient)
        graph.erase_node(user)
    for k, item in items.items():
        item.replace_all_uses_with(outputs[k])
        graph.erase_node(item)
    graph.erase_node(node)
