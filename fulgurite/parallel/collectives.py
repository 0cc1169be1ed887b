"""Collectives with gradients: each function is one collective forward and one backward.

    function                      forward                            backward
    copy_to_parallel_region       identity                           all-reduce
    reduce_from_parallel_region   all-reduce                         identity
    sum_inside_parallel_region    all-reduce                         all-reduce
    all_gather_tokens             all-gather of tokens               reduce-scatter of tokens
    reduce_scatter_tokens         reduce-scatter of tokens           all-gather of tokens
    all_gather_columns            all-gather of columns              each rank its columns
    all_to_all                    rows to other ranks                the same rows back

`copy_to_parallel_region` and `reduce_from_parallel_region` enclose a region with sharded weights. Its
input is the same on all ranks, its output are partial sums, and gradients inside are partial. On an
axis of one rank every function returns its input.

Ranks may have different numbers of tokens, or none: `shard_range` says which tokens belong to a rank.

Shapes: T tokens of all ranks; D the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fulgurite.parallel.mesh import Axis

# torch 2.13 renamed these two; 2.11 has only the old names.
_all_gather_op = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard_range(total: int, index: int, count: int, alignment: int = 1) -> tuple[int, int]:
    """The `index`-th of `count` ranges of `total` items.

    Ranges have equal sizes, multiples of `alignment`; the last ones may be shorter or empty.
    """
    width = -(-total // (count * alignment)) * alignment
    return min(index * width, total), min((index + 1) * width, total)


def all_reduce(x: Tensor, axis: Axis, label: str = "all-reduce") -> Tensor:
    """The sum of all ranks' x, on every rank; no gradient."""
    if axis.group is None:
        return x
    if axis.device_collectives is not None and axis.device_collectives.accepts(x):
        return axis.device_collectives.all_reduce(x)
    total = x.clone(memory_format=torch.contiguous_format)
    run_collective(axis, label, total, partial(dist.all_reduce, total))
    _emulate_transfer(axis, [2 * x.nbytes // axis.size] * axis.size)
    return total


def all_reduce_min(value: int, axis: Axis, label: str = "all-reduce of minimum") -> int:
    """The minimum of all ranks' values."""
    return all_reduce_mins([value], axis, label)[0]


def all_reduce_mins(values: Sequence[int], axis: Axis, label: str) -> list[int]:
    """The minimum of all ranks' values, one by one; a collective of the host."""
    minima = torch.tensor(values)
    if axis.group is not None:
        run_collective(axis, label, minima, partial(dist.all_reduce, minima, op=dist.ReduceOp.MIN))
    result: list[int] = minima.tolist()
    return result


def all_gather(x: Tensor, axis: Axis, label: str = "all-gather") -> Tensor:
    """All ranks' x, equally large, concatenated along dimension 0; no gradient."""
    if axis.group is None:
        return x
    if axis.device_collectives is not None and axis.device_collectives.accepts(x):
        return axis.device_collectives.all_gather(x)
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    run_collective(axis, label, out, partial(_all_gather_op, out, x.contiguous()))
    _emulate_transfer(axis, [x.nbytes] * axis.size)
    return out


def all_to_all_rows(
    x: Tensor,
    axis: Axis,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    label: str,
    padding: int = 0,
) -> Tensor:
    """`all_to_all` without a gradient, for any dtype; `padding` rows of zeros are appended."""
    total = sum(receive)
    if axis.group is None and not padding:
        return x
    collectives, is_equal = axis.device_collectives, len({*send, *receive}) == 1
    if collectives is not None and is_equal and collectives.accepts(x):
        received = collectives.all_to_all(x)
        zeros = x.new_zeros(padding, *x.shape[1:])
        return torch.cat((received, zeros)) if padding else received
    out = x.new_empty(total + padding, *x.shape[1:])
    out[total:] = 0
    if axis.group is None:
        out[:total] = x
    else:
        x, target = x.contiguous(), out[:total]
        start = partial(dist.all_to_all_single, target, x, list(receive), list(send))
        run_collective(axis, label, out, start)
        row_bytes = x[:1].nbytes if x.shape[0] else out[:1].nbytes
        _emulate_transfer(axis, [n * row_bytes for n in send], [n * row_bytes for n in receive])
    return out


class PendingRows:
    """Rows on their way, of `start_all_to_all_rows`. `wait`, once, returns what was received."""

    def __init__(
        self, axis: Axis, label: str, out: Tensor, work: Any = None, sent: Tensor | None = None
    ) -> None:
        self.axis, self.label, self.work = axis, label, work
        self.out: Tensor | None = out
        self.sent = sent  # must live until it has arrived
        self.started = time.monotonic()
        self.on_arrival: Callable[..., None] | None = None

    def wait(self) -> Tensor:
        out, work = self.out, self.work
        elapsed = time.monotonic() - self.started  # in other work, which overlaps with the transfer
        assert out is not None, f"somebody has waited for '{self.label}' before"
        if work is not None:
            run_collective(self.axis, self.label, out, lambda **how: work)
        if self.on_arrival is not None:
            self.on_arrival(elapsed=elapsed)
        self.out = self.work = self.sent = None
        return out


def start_all_to_all_rows(
    x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], label: str, padding: int = 0
) -> PendingRows:
    """`all_to_all_rows` in two halves: what runs before `wait` overlaps with the transfer."""
    total = sum(receive)
    out = x.new_empty(total + padding, *x.shape[1:])
    out[total:] = 0
    if axis.group is None or out.is_meta:
        if not out.is_meta:
            out[:total] = x
        return PendingRows(axis, label, out)
    x = x.contiguous()
    try:
        work = dist.all_to_all_single(
            out[:total], x, list(receive), list(send), group=axis.group, async_op=True
        )
    except RuntimeError as error:  # all backends of torch.distributed raise it
        if axis.health is None:
            raise
        raise axis.health.explain(f"{axis.name} {label}", error) from error
    pending = PendingRows(axis, label, out, work, x)
    row_bytes = x[:1].nbytes if x.shape[0] else out[:1].nbytes
    sizes = [n * row_bytes for n in send], [n * row_bytes for n in receive]
    pending.on_arrival = partial(_emulate_transfer, axis, *sizes)
    return pending


def run_collective(axis: Axis, label: str, out: Tensor, start: Callable[..., Any]) -> None:
    """Run a collective. If it fails, the error names the rank that is the cause.

    On the meta device nothing is sent: a plan of memory needs only what is allocated for it.
    """
    if out.is_meta:
        return
    start_async = partial(start, group=axis.group, async_op=True)
    if axis.health is None:
        start_async().wait()
    else:
        on_host = out.device.type == "cpu"
        axis.health.run_collective(f"{axis.name} {label}", start_async, on_host=on_host)


def _emulate_transfer(
    axis: Axis, sent: Sequence[int], received: Sequence[int] | None = None, elapsed: float = 0.0
) -> None:
    """Wait as an emulated network would: bytes to each rank, and from each if they differ."""
    if axis.network is not None and axis.spans_nodes:
        own = axis.nodes[axis.index]
        is_remote = [node != own for node in axis.nodes]
        rank = axis.ranks[axis.index]
        received = sent if received is None else received
        axis.network.transfer(rank, is_remote, sent, received, elapsed)


def copy_to_parallel_region(x: Tensor, axis: Axis) -> Tensor:
    """Enter a region with sharded weights; x is the same on all ranks."""
    return x if axis.group is None else _CopyToParallelRegion.apply(x, axis)


def reduce_from_parallel_region(x: Tensor, axis: Axis) -> Tensor:
    """Leave such a region; x are partial sums."""
    return x if axis.group is None else _ReduceFromParallelRegion.apply(x, axis)


def sum_inside_parallel_region(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of a partial result that the region itself reads again."""
    return copy_to_parallel_region(reduce_from_parallel_region(x, axis), axis)


def all_gather_tokens(x: Tensor, axis: Axis, total: int) -> Tensor:
    """The tokens of all ranks, [T, ..]."""
    return x if axis.group is None else _AllGatherTokens.apply(x, axis, total)


def reduce_scatter_tokens(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all ranks' [T, ..], of which each rank gets its own tokens."""
    return x if axis.group is None else _ReduceScatterTokens.apply(x, axis)


def all_gather_columns(x: Tensor, axis: Axis, total: int, alignment: int = 1) -> Tensor:
    """The columns of all ranks, sharded by `shard_range`; the loss must be equal on all ranks."""
    return x if axis.group is None else _AllGatherColumns.apply(x, axis, total, alignment)


def all_to_all(
    x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], label: str
) -> Tensor:
    """Send the first send[0] rows to rank 0 of the axis, the next send[1] to rank 1, and so on.

    Returns the received rows, ordered by rank.
    """
    if axis.group is None:
        return x
    return _AllToAll.apply(x, axis, tuple(send), tuple(receive), label)


class _CopyToParallelRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_reduce(gradients[0], ctx.axis, "all-reduce of gradients"), None


class _ReduceFromParallelRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _AllGatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, total: int) -> Tensor:
        ctx.axis = axis
        return _all_gather_padded(x, axis, total)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _reduce_scatter_padded(gradients[0], ctx.axis), None, None


class _ReduceScatterTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.total = axis, x.shape[0]
        return _reduce_scatter_padded(x, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all_gather_padded(gradients[0], ctx.axis, ctx.total), None


class _AllGatherColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, total: int, alignment: int) -> Tensor:
        ctx.range = shard_range(total, axis.index, axis.size, alignment)
        start, stop = shard_range(total, 0, axis.size, alignment)
        shards = all_gather(_pad(x, stop - start, -1)[None], axis, "all-gather of columns")
        return torch.cat(shards.unbind(0), dim=-1)[..., :total]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        start, stop = ctx.range
        return gradients[0][..., start:stop], None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, send: tuple[int, ...], receive: tuple[int, ...], label: str
    ) -> Tensor:
        ctx.axis, ctx.send, ctx.receive, ctx.label = axis, send, receive, label
        return all_to_all_rows(x, axis, send, receive, label)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        label = f"{ctx.label} of gradients"
        rows = all_to_all_rows(gradients[0], ctx.axis, ctx.receive, ctx.send, label)
        return rows, None, None, None, None


def _all_gather_padded(x: Tensor, axis: Axis, total: int) -> Tensor:
    start, stop = shard_range(total, axis.index, axis.size)
    assert x.shape[0] == stop - start, (
        f"{axis} has {x.shape[0]} of {total} tokens, but should have {stop - start}"
    )
    width = -(-total // axis.size)
    return all_gather(_pad(x, width, 0), axis, "all-gather of tokens")[:total]


def _reduce_scatter_padded(x: Tensor, axis: Axis) -> Tensor:
    total = x.shape[0]
    width = -(-total // axis.size)
    full = _pad(x, width * axis.size, 0).contiguous()
    start, stop = shard_range(total, axis.index, axis.size)
    if axis.device_collectives is not None and axis.device_collectives.accepts(full):
        return axis.device_collectives.reduce_scatter(full)[: stop - start]
    out = x.new_empty(width, *x.shape[1:])
    run_collective(axis, "reduce-scatter of tokens", out, partial(_reduce_scatter_op, out, full))
    _emulate_transfer(axis, [out.nbytes] * axis.size)
    return out[: stop - start]


def _pad(x: Tensor, size: int, dim: int) -> Tensor:
    """x, padded with zeros at the end of a dimension up to `size`."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim=dim)
