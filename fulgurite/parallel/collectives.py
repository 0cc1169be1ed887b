"""What ranks say to each other, with gradients: each function is one collective there and one back.

    function            forward                                   backward
    enter               nothing                                   sum over the axis
    leave               sum over the axis                         nothing
    gather_tokens       tokens of all ranks, one after another    sum, and each rank its tokens
    scatter_tokens      sum, and each rank its tokens             tokens of all ranks
    gather_columns      columns of all ranks side by side         each rank its columns
    exchange            rows to the ranks that want them          the same rows back

`enter` and `leave` bracket a region whose weights are divided: a value that all ranks have goes in, and
partial sums come out. Everything in between has partial gradients. On an axis of one rank each of them
gives its input back.

Ranks may have different numbers of tokens, none among them: `share` says which are whose.

Shapes: T tokens of all ranks; D the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fulgurite.parallel.mesh import Axis

# torch 2.13 renamed these two; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def share(total: int, index: int, count: int, step: int = 1) -> tuple[int, int]:
    """The `index`-th of `count` ranges of `total` things: equal ones, multiples of `step`, and the
    last ones shorter or empty."""
    width = -(-total // (count * step)) * step
    return min(index * width, total), min((index + 1) * width, total)


def sum_over(x: Tensor, axis: Axis, what: str = "sum") -> Tensor:
    """The sum of all ranks' x, on every rank; no gradient."""
    if axis.group is None:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    finish(axis, what, total, partial(dist.all_reduce, total))
    return total


def least_over(value: int, axis: Axis, what: str = "least") -> int:
    """The least of all ranks' values."""
    least = torch.tensor([value])
    if axis.group is not None:
        finish(axis, what, least, partial(dist.all_reduce, least, op=dist.ReduceOp.MIN))
    return int(least)


def gather(x: Tensor, axis: Axis, what: str = "gather") -> Tensor:
    """All ranks' x, equally large, one after another along dimension 0; no gradient."""
    if axis.group is None:
        return x
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    finish(axis, what, out, partial(_all_gather, out, x.contiguous()))
    return out


def exchange_rows(
    x: Tensor,
    axis: Axis,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    what: str,
    spare: int = 0,
) -> Tensor:
    """`exchange` without a gradient, for anything that has rows; `spare` rows of zeros come last."""
    total = sum(receive)
    if axis.group is None and not spare:
        return x
    out = x.new_empty(total + spare, *x.shape[1:])
    out[total:] = 0
    if axis.group is None:
        out[:total] = x
    else:
        x, into = x.contiguous(), out[:total]
        start = partial(dist.all_to_all_single, into, x, list(receive), list(send))
        finish(axis, what, out, start)
    return out


def finish(axis: Axis, what: str, out: Tensor, start: Callable[..., Any]) -> None:
    """A collective of an axis by name: if it fails, the error says which rank is the reason."""
    begin = partial(start, group=axis.group, async_op=True)
    if axis.health is None:
        begin().wait()
    else:
        axis.health.finish(f"{axis.name} {what}", begin, on_host=out.device.type == "cpu")


def enter(x: Tensor, axis: Axis) -> Tensor:
    """x, the same on all ranks, goes into a region that is divided over the axis."""
    return x if axis.group is None else _Enter.apply(x, axis)


def leave(x: Tensor, axis: Axis) -> Tensor:
    """Partial sums come out of such a region."""
    return x if axis.group is None else _Leave.apply(x, axis)


def gather_tokens(x: Tensor, axis: Axis, total: int) -> Tensor:
    """The shares of all ranks as [T, ..]."""
    return x if axis.group is None else _GatherTokens.apply(x, axis, total)


def scatter_tokens(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all ranks' [T, ..], of which each keeps its share."""
    return x if axis.group is None else _ScatterTokens.apply(x, axis)


def gather_columns(x: Tensor, axis: Axis, total: int, step: int = 1) -> Tensor:
    """Columns that `share(total, ...)` gave to the ranks, side by side; the loss must be the same on
    all of them."""
    return x if axis.group is None else _GatherColumns.apply(x, axis, total, step)


def exchange(
    x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], what: str
) -> Tensor:
    """The first send[0] rows to rank 0 of the axis, the next send[1] to rank 1, ..; what came, by rank."""
    return x if axis.group is None else _Exchange.apply(x, axis, tuple(send), tuple(receive), what)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return sum_over(gradients[0], ctx.axis, "sum of gradients"), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return sum_over(x, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, total: int) -> Tensor:
        ctx.axis = axis
        return _gathered(x, axis, total)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _scattered(gradients[0], ctx.axis), None, None


class _ScatterTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.total = axis, x.shape[0]
        return _scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gathered(gradients[0], ctx.axis, ctx.total), None


class _GatherColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, total: int, step: int) -> Tensor:
        ctx.range = share(total, axis.index, axis.size, step)
        start, stop = share(total, 0, axis.size, step)
        parts = gather(_padded(x, stop - start, -1)[None], axis, "gather of columns")
        return torch.cat(parts.unbind(0), dim=-1)[..., :total]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        start, stop = ctx.range
        return gradients[0][..., start:stop], None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, send: tuple[int, ...], receive: tuple[int, ...], what: str
    ) -> Tensor:
        ctx.axis, ctx.send, ctx.receive, ctx.what = axis, send, receive, what
        return exchange_rows(x, axis, send, receive, what)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        what = f"{ctx.what} of gradients"
        back = exchange_rows(gradients[0], ctx.axis, ctx.receive, ctx.send, what)
        return back, None, None, None, None


def _gathered(x: Tensor, axis: Axis, total: int) -> Tensor:
    start, stop = share(total, axis.index, axis.size)
    assert x.shape[0] == stop - start, (
        f"{axis} has {x.shape[0]} of {total} tokens, and should have {stop - start}"
    )
    width = -(-total // axis.size)
    return gather(_padded(x, width, 0), axis, "gather of tokens")[:total]


def _scattered(x: Tensor, axis: Axis) -> Tensor:
    total = x.shape[0]
    width = -(-total // axis.size)
    full = _padded(x, width * axis.size, 0).contiguous()
    out = x.new_empty(width, *x.shape[1:])
    finish(axis, "scatter of tokens", out, partial(_reduce_scatter, out, full))
    start, stop = share(total, axis.index, axis.size)
    return out[: stop - start]


def _padded(x: Tensor, size: int, dim: int) -> Tensor:
    """x with zeros at the end of a dimension, up to `size`."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim=dim)
