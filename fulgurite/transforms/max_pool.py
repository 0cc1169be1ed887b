"""Max pooling that saves one byte per element for backward.

In: the joint graph of forward and backward. Out: the same with `max_pool2d_offsets` where only backward
reads the indices. torch saves the position of each maximum as an int64 index into the plane. Here it is
the position inside the window, which fits an int8. Both ops have decompositions, so the fuser generates
their kernels:

    forward    value[o] = max_k x[o*stride - padding + k*dilation]       offset[o] = k of the first maximum
    backward   grad_x[i] = sum_k where(offset[o] == k, grad[o], 0)       o = (i + padding - k*dilation) / stride
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format

from fulgurite.op import op
from fulgurite.trace.metadata import find_fake_mode, use_fake_mode
from fulgurite.trace.node_meta import copy_meta, fake_value, set_fake_value, set_fusion_group

aten = torch.ops.aten
MAX_WINDOW_SIZE = 128  # positions that fit an int8
MAX_UNROLLED_WINDOW = 25  # positions; larger windows are not decomposed


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


@max_pool2d_offsets.decomposition
def _(x, kernel, stride, padding, dilation, ceil_mode):  # type: ignore[no-untyped-def]
    if kernel[0] * kernel[1] > MAX_UNROLLED_WINDOW or 0 in x.shape:
        return NotImplemented
    sizes = [
        _num_windows(n, k, s, p, d, ceil_mode)
        for n, k, s, p, d in zip(x.shape[-2:], kernel, stride, padding, dilation, strict=True)
    ]
    extents = [_windows_extent(*each) for each in zip(sizes, kernel, stride, dilation, strict=True)]
    end_padding = [max(0, extents[k] - padding[k] - x.shape[k - 2]) for k in (0, 1)]
    padded = aten.constant_pad_nd(
        x, [padding[1], end_padding[1], padding[0], end_padding[0]], -torch.inf
    )
    rows = _first_valid_position(sizes[0], stride[0], padding[0], dilation[0], x.device)
    columns = _first_valid_position(sizes[1], stride[1], padding[1], dilation[1], x.device)
    best = torch.full((), -torch.inf, dtype=x.dtype, device=x.device)
    # if nothing is larger than -inf: the first position inside the image
    offsets = (rows[:, None] * kernel[1] + columns).to(torch.int8)
    for position, (row_offset, column_offset) in _window_positions(kernel, dilation):
        row = _strided_slice(padded, -2, row_offset, stride[0], sizes[0])
        value = _strided_slice(row, -1, column_offset, stride[1], sizes[1])
        is_larger = (value > best) | torch.isnan(value)  # as in torch, the last NaN wins
        best = torch.where(is_larger, value, best)
        number = torch.full((), position, dtype=torch.int8, device=x.device)
        offsets = torch.where(is_larger, number, offsets)
    channels_last = suggest_memory_format(x) is torch.channels_last
    return _to_memory_format(best, channels_last), _to_memory_format(offsets, channels_last)


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


@max_pool2d_offsets_backward.decomposition
def _(grad, offsets, size, kernel, stride, padding, dilation, ceil_mode, channels_last):  # type: ignore[no-untyped-def]
    if kernel[0] * kernel[1] > MAX_UNROLLED_WINDOW or 0 in grad.shape:
        return NotImplemented
    wide = torch.promote_types(grad.dtype, torch.float32)
    sizes = grad.shape[-2:]
    extents = [
        max(_windows_extent(n, k, s, d), p + n_input)
        for n, k, s, d, p, n_input in zip(
            sizes, kernel, stride, dilation, padding, size, strict=True
        )
    ]
    total = torch.zeros((), dtype=wide, device=grad.device)
    for position, (row_offset, column_offset) in _window_positions(kernel, dilation):
        part = torch.where(offsets == position, grad.to(wide), total.new_zeros(()))
        part = _strided_scatter(part, -2, row_offset, stride[0], extents[0])
        part = _strided_scatter(part, -1, column_offset, stride[1], extents[1])
        part = part[..., padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]
        total = total + part
    return _to_memory_format(total.to(grad.dtype), channels_last)


# ---- windows -------------------------------------------------------------------------------------


def _window_positions(
    kernel: list[int], dilation: list[int]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """The positions of a window in order, each with its row and column offset."""
    steps = itertools.product(range(kernel[0]), range(kernel[1]))
    return enumerate((a * dilation[0], b * dilation[1]) for a, b in steps)


def _num_windows(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Number of windows along a dimension, as torch counts them: none starts in the end padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    count = span // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _windows_extent(count: int, kernel: int, stride: int, dilation: int) -> int:
    """Number of rows that `count` windows cover."""
    return (count - 1) * stride + (kernel - 1) * dilation + 1


def _strided_slice(x: Tensor, dim: int, start: int, step: int, count: int) -> Tensor:
    return aten.slice(x, dim, start, start + (count - 1) * step + 1, step)


def _strided_scatter(x: Tensor, dim: int, start: int, step: int, size: int) -> Tensor:
    """The inverse of `_strided_slice`: x at every `step`-th position of a zero tensor."""
    shape = list(x.shape)
    shape[dim] = size
    end = start + (x.shape[dim] - 1) * step + 1
    return aten.slice_scatter(x.new_zeros(shape), x, dim, start, end, step)


def _first_valid_position(
    count: int, stride: int, padding: int, dilation: int, device: Any
) -> Tensor:
    """For each window along a dimension, its first position that is not padding."""
    missing = torch.arange(padding, padding - count * stride, -stride, device=device).clamp(min=0)
    if dilation == 1:
        return missing
    return torch.div(missing + dilation - 1, dilation, rounding_mode="floor")


def _window_starts(like: Tensor, stride: list[int], padding: list[int]) -> tuple[Tensor, Tensor]:
    rows = torch.arange(like.shape[-2], device=like.device) * stride[0] - padding[0]
    columns = torch.arange(like.shape[-1], device=like.device) * stride[1] - padding[1]
    return rows[:, None], columns


def _empty_input_gradient(grad: Tensor, size: list[int], channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(
        (*grad.shape[:-2], *size), dtype=grad.dtype, device=grad.device, memory_format=layout
    )


def _to_memory_format(x: Tensor, channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return x.contiguous(memory_format=layout)


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
