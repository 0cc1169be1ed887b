"""Gradient reduction over ranks: local gradients of parameters in, sums over an axis out, in place.

    BucketReducer     all-reduce of buckets, started by backward while it computes the next ones
    reduce_in_order   the same sums in the order of a tree: reduce-scatter by all-to-all, all-gather

A bucket holds gradients of one axis and dtype, the last parameters first, since backward reaches them
first. Buckets are started in one order on all ranks, whichever gradients come first. A parameter
without a gradient takes part with zeros, so ranks can't wait for each other: a flag for each parameter
says whether any rank had one. A parameter without a gradient on all ranks keeps None, as on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fulgurite.parallel.collectives import all_gather, all_to_all_rows
from fulgurite.parallel.mesh import Axis
from fulgurite.train.parallel.layout_base import tree_sum

BUCKET_BYTES = 25 << 20  # as in DDP: large enough for bandwidth, small enough to overlap


def local_tensor(x: Tensor) -> Tensor:
    """The shard of a DTensor that this rank has; other tensors as they are. No gradient."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass(eq=False)
class Bucket:
    """Parameters that are reduced together. `flat` has their gradients, then their flags."""

    axis: Axis
    parameters: list[nn.Parameter] = field(default_factory=list)
    num_bytes: int = 0
    flat: Tensor | None = None
    work: Any = None
    missing: set[nn.Parameter] = field(default_factory=set)

    def pack(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Gradients (None: zeros), then flags; 16-bit gradients in float32."""
        parts = []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            local = local_tensor(parameter.detach() if gradient is None else gradient)
            parts.append((torch.zeros_like(local) if gradient is None else local).flatten())
        dtype = torch.promote_types(parts[0].dtype, torch.float32)
        flags = [float(gradient is not None) for gradient in gradients]
        return torch.cat([*(part.to(dtype) for part in parts), parts[0].new_tensor(flags)])

    def unpack(self, flat: Tensor, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The reduced gradients, as local tensors; None: no rank had one."""
        sizes = [local_tensor(p.detach()).numel() for p in self.parameters]
        *parts, flags = flat.split([*sizes, len(sizes)])
        # Reading a flag waits for the device: only where this rank has no gradient.
        return [
            None
            if gradient is None and not flags[number]
            else part.view_as(local_tensor(parameter.detach()))
            for number, (parameter, part, gradient) in enumerate(
                zip(self.parameters, parts, gradients, strict=True)
            )
        ]


def make_buckets(
    parameters: Sequence[nn.Parameter], axis: Axis, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Buckets of the parameters that need a gradient, last first; equal on every rank."""
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        size = local_tensor(parameter.detach()).numel() * parameter.element_size()
        key = parameter.dtype, parameter.device
        bucket = open_buckets.get(key)
        if bucket is None or bucket.num_bytes + size > bucket_bytes:
            bucket = open_buckets[key] = Bucket(axis)
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        bucket.num_bytes += size
    return buckets


class BucketReducer:
    """All-reduce overlapped with backward. Between `arm` and `finish` comes one backward."""

    def __init__(self, groups: Sequence[tuple[Axis, Sequence[nn.Parameter]]]) -> None:
        self.buckets = [
            bucket
            for axis, parameters in groups
            if axis.group is not None
            for bucket in make_buckets(parameters, axis)
        ]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._handles: list[RemovableHandle] = []
        self._next = 0

    def arm(self) -> None:
        """The next backward is the last of the step: start a bucket when it is complete."""
        self._next = 0
        for bucket in self.buckets:
            bucket.missing, bucket.work = set(bucket.parameters), None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._mark_ready)
            for parameter in self.bucket_of
        ]

    def _mark_ready(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter), "hooks are on parameters"
        self.bucket_of[parameter].missing.discard(parameter)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.flat = bucket.pack([p.grad for p in bucket.parameters])
        bucket.work = dist.all_reduce(bucket.flat, group=bucket.axis.group, async_op=True)

    @property
    def num_started(self) -> int:
        return self._next

    def finish(self) -> None:
        """Start the buckets that lack gradients, wait for all, and write the sums."""
        self.disarm()
        while self._next < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            assert bucket.flat is not None, "every bucket was started"
            wait_for(bucket.work, bucket.axis, bucket.flat)
            set_gradients(bucket, bucket.unpack(bucket.flat, [p.grad for p in bucket.parameters]))
            bucket.flat = bucket.work = None

    def disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def wait_for(work: Any, axis: Axis, out: Tensor) -> None:
    """Wait for a collective; if it fails, the error names the rank that is the cause."""
    if axis.health is None:
        work.wait()
    else:
        on_host = out.device.type == "cpu"
        axis.health.run_collective("all-reduce of gradients", lambda: work, on_host=on_host)


def set_gradients(bucket: Bucket, gradients: Sequence[Tensor | None]) -> None:
    """Write reduced gradients to `.grad`, in its dtype."""
    for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local_tensor(parameter.grad).copy_(gradient)


def reduce_in_order(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], axis: Axis
) -> list[Tensor | None]:
    """The sums of gradients over ranks in the order of a tree, bucket by bucket."""
    found = dict(zip(parameters, gradients, strict=True))
    if axis.group is not None:
        for bucket in make_buckets(parameters, axis):
            own = [found[parameter] for parameter in bucket.parameters]
            flat = tree_all_reduce_flat(bucket.pack(own), axis)
            found.update(zip(bucket.parameters, bucket.unpack(flat, own), strict=True))
    return [found[parameter] for parameter in parameters]


def tree_all_reduce_flat(flat: Tensor, axis: Axis) -> Tensor:
    """`tree_all_reduce` with the traffic of a ring: each rank sums one piece and all-gathers it."""
    if axis.group is None:
        return flat
    size = flat.numel()
    padded = torch.nn.functional.pad(flat, (0, -size % axis.size)).view(axis.size, -1)
    piece = tree_reduce_scatter(padded, axis)
    return all_gather(piece, axis, "all-gather of sums")[:size]


def tree_reduce_scatter(x_WS: Tensor, axis: Axis) -> Tensor:
    """Rank r gets the sum over ranks of their row r, in the order of a tree."""
    counts = (1,) * axis.size
    exchange = partial(all_to_all_rows, label="all-to-all of gradients")
    received_WS = exchange(x_WS, axis, counts, counts)
    return tree_sum(list(received_WS.unbind(0)))
