"""Max pooling that keeps a byte an element for its backward.

In: the joint graph of forward and backward. Out: the same with `max_pool2d_offsets` for the pooling whose places only
backward reads. torch keeps where each maximum was as an int64 index into the plane; here it is the place inside the
window, which fits an int8. Both ops have pieces, so generated kernels compute them:

    forward    value[o] = max_k x[o*stride - padding + k*dilation]       offset[o] = the k of the first maximum
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
from fulgurite.trace.metadata import fake_mode_of, faking

aten = torch.ops.aten
LARGEST_WINDOW = 128  # places that an int8 tells apart
MOST_PIECES = 25  # places of a window that a kernel is written out for


@op("fulgurite::max_pool2d_offsets")
def max_pool2d_offsets(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    """The maxima of windows, and which place of its window each came from."""
    values, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    rows, columns = _window_starts(values, stride, padding)
    width = x.shape[-1]
    down = torch.div(indices, width, rounding_mode="floor") - rows
    across = indices % width - columns
    offsets = down // dilation[0] * kernel[1] + across // dilation[1]
    return values, offsets.to(torch.int8)


@max_pool2d_offsets.fake
def _(x, kernel, stride, padding, dilation, ceil_mode):  # type: ignore[no-untyped-def]
    values, _ = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    return values, torch.empty_like(values, dtype=torch.int8)


@max_pool2d_offsets.pieces
def _(x, kernel, stride, padding, dilation, ceil_mode):  # type: ignore[no-untyped-def]
    if kernel[0] * kernel[1] > MOST_PIECES or 0 in x.shape:
        return NotImplemented
    sizes = [
        _count(n, k, s, p, d, ceil_mode)
        for n, k, s, p, d in zip(x.shape[-2:], kernel, stride, padding, dilation, strict=True)
    ]
    reach = [_reach(*each) for each in zip(sizes, kernel, stride, dilation, strict=True)]
    more = [max(0, reach[k] - padding[k] - x.shape[k - 2]) for k in (0, 1)]
    padded = aten.constant_pad_nd(x, [padding[1], more[1], padding[0], more[0]], -torch.inf)
    rows = _first_inside(sizes[0], stride[0], padding[0], dilation[0], x.device)
    columns = _first_inside(sizes[1], stride[1], padding[1], dilation[1], x.device)
    best = torch.full((), -torch.inf, dtype=x.dtype, device=x.device)
    # where nothing is larger than -inf, the first place inside the image
    offsets = (rows[:, None] * kernel[1] + columns).to(torch.int8)
    for place, (down, across) in _places(kernel, dilation):
        row = _every(padded, -2, down, stride[0], sizes[0])
        seen = _every(row, -1, across, stride[1], sizes[1])
        better = (seen > best) | torch.isnan(seen)  # of several NaN the last one counts
        best = torch.where(better, seen, best)
        number = torch.full((), place, dtype=torch.int8, device=x.device)
        offsets = torch.where(better, number, offsets)
    last = suggest_memory_format(x) is torch.channels_last
    return _laid_out(best, last), _laid_out(offsets, last)


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
    """The gradient of what was pooled, `size` its height and width."""
    rows, columns = _window_starts(offsets, stride, padding)
    down = rows + torch.div(offsets, kernel[1], rounding_mode="floor").long() * dilation[0]
    across = columns + (offsets % kernel[1]).long() * dilation[1]
    like = _empty(grad, size, channels_last)
    return aten.max_pool2d_with_indices_backward(
        grad, like, kernel, stride, padding, dilation, ceil_mode, down * size[1] + across
    )


@max_pool2d_offsets_backward.fake
def _(grad, offsets, size, kernel, stride, padding, dilation, ceil_mode, channels_last):  # type: ignore[no-untyped-def]
    return _empty(grad, size, channels_last)


@max_pool2d_offsets_backward.pieces
def _(grad, offsets, size, kernel, stride, padding, dilation, ceil_mode, channels_last):  # type: ignore[no-untyped-def]
    if kernel[0] * kernel[1] > MOST_PIECES or 0 in grad.shape:
        return NotImplemented
    wide = torch.promote_types(grad.dtype, torch.float32)
    sizes = grad.shape[-2:]
    reach = [
        max(_reach(n, k, s, d), p + whole)
        for n, k, s, d, p, whole in zip(sizes, kernel, stride, dilation, padding, size, strict=True)
    ]
    total = torch.zeros((), dtype=wide, device=grad.device)
    for place, (down, across) in _places(kernel, dilation):
        part = torch.where(offsets == place, grad.to(wide), total.new_zeros(()))
        part = _spread(part, -2, down, stride[0], reach[0])
        part = _spread(part, -1, across, stride[1], reach[1])
        part = part[..., padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]
        total = total + part
    return _laid_out(total.to(grad.dtype), channels_last)


# ---- windows -------------------------------------------------------------------------------------


def _places(kernel: list[int], dilation: list[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """The places of a window in order, each with how far down and across it lies."""
    steps = itertools.product(range(kernel[0]), range(kernel[1]))
    return enumerate((a * dilation[0], b * dilation[1]) for a, b in steps)


def _count(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Windows along a dimension, as torch counts them: none starts in the padding behind."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    count = span // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _reach(count: int, kernel: int, stride: int, dilation: int) -> int:
    """The rows that `count` windows span."""
    return (count - 1) * stride + (kernel - 1) * dilation + 1


def _every(x: Tensor, dim: int, start: int, step: int, count: int) -> Tensor:
    return aten.slice(x, dim, start, start + (count - 1) * step + 1, step)


def _spread(x: Tensor, dim: int, start: int, step: int, size: int) -> Tensor:
    """The inverse: x at every `step`-th place of zeros."""
    shape = list(x.shape)
    shape[dim] = size
    end = start + (x.shape[dim] - 1) * step + 1
    return aten.slice_scatter(x.new_zeros(shape), x, dim, start, end, step)


def _first_inside(count: int, stride: int, padding: int, dilation: int, device: Any) -> Tensor:
    """For each window along a dimension, its first place that is not padding."""
    missing = torch.arange(padding, padding - count * stride, -stride, device=device).clamp(min=0)
    if dilation == 1:
        return missing
    return torch.div(missing + dilation - 1, dilation, rounding_mode="floor")


def _window_starts(like: Tensor, stride: list[int], padding: list[int]) -> tuple[Tensor, Tensor]:
    rows = torch.arange(like.shape[-2], device=like.device) * stride[0] - padding[0]
    columns = torch.arange(like.shape[-1], device=like.device) * stride[1] - padding[1]
    return rows[:, None], columns


def _empty(grad: Tensor, size: list[int], channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(
        (*grad.shape[:-2], *size), dtype=grad.dtype, device=grad.device, memory_format=layout
    )


def _laid_out(x: Tensor, last: bool) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


# ---- the joint graph -----------------------------------------------------------------------------


def small_offsets(joint: fx.GraphModule) -> None:
    """Keep places inside windows instead of indices, where only backward reads them."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices.default):
        items = {user.args[1]: user for user in node.users}
        backward = list(items[1].users) if 1 in items else []
        if not backward or not all(_is_its_backward(user, node) for user in backward):
            continue
        if _window(node) is None:
            continue
        with faking(fake_mode_of(joint)):
            _replace(graph, node, items, backward)


def _is_its_backward(user: fx.Node, node: fx.Node) -> bool:
    if user.target is not aten.max_pool2d_with_indices_backward.default:
        return False
    return user.args[7] in node.users and user.args[1] is node.args[0]


def _window(node: fx.Node) -> tuple[Any, ...] | None:
    """kernel, stride, padding, dilation, ceil_mode with two numbers each; None: not for int8."""
    value = node.meta["val"][0]
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    if not x.is_floating_point() or not all(isinstance(n, int) for n in (*x.shape, *value.shape)):
        return None
    kernel, stride, padding, dilation, ceil_mode = (*node.args[1:], *[None] * 5)[:5]
    pairs = [
        list(pair) * (2 if len(pair) == 1 else 1)
        for pair in (kernel, stride or kernel, padding or [0], dilation or [1])  # type: ignore[arg-type]
    ]
    if pairs[0][0] * pairs[0][1] > LARGEST_WINDOW:
        return None
    return (*pairs, bool(ceil_mode))


def _replace(
    graph: fx.Graph, node: fx.Node, items: dict[Any, fx.Node], backward: list[fx.Node]
) -> None:
    window = _window(node)
    assert window is not None, f"{node.name} was asked before"
    x = node.args[0]
    assert isinstance(x, fx.Node), f"{node.name} pools no tensor"
    with graph.inserting_before(node):
        pooled = graph.call_function(max_pool2d_offsets.overload, (x, *window))
        pooled.meta = {**node.meta, "val": max_pool2d_offsets(x.meta["val"], *window)}
        picked = [graph.call_function(operator.getitem, (pooled, k)) for k in (0, 1)]
    for k, item in enumerate(picked):
        item.meta = {**items.get(k, node).meta, "val": pooled.meta["val"][k]}
    for user in backward:
        given = user.meta["val"]
        last = given.dim() == 4 and not given.is_contiguous()
        grad, size = user.args[0], list(given.shape[-2:])
        with graph.inserting_before(user):
            made = graph.call_function(
                max_pool2d_offsets_backward.overload, (grad, picked[1], size, *window, last)
            )
        # a kernel of its own: it reads each window's gradient at all places, in sums over it once too often
        made.meta = {**user.meta, "apart": made.name}
        user.replace_all_uses_with(made)
        graph.erase_node(user)
    for k, item in items.items():
        item.replace_all_uses_with(picked[k])
        graph.erase_node(item)
    graph.erase_node(node)
