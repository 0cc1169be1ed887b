"""Local shards: a parameter that may be a DTensor in, the tensor of this rank out, and back.

Optimizers compute on local shards. States have the placements of their parameter, so that a
checkpoint of them loads on another number of ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard


def read_local(x: Tensor) -> Tensor:
    """The tensor of this rank: it shares the memory of `x`."""
    return x.to_local() if isinstance(x, DTensor) else x


def wrap_like(parameter: Tensor, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """`local` as a tensor that is sharded as the parameter is.

    `shape` is the global shape, if it differs from that of the parameter.
    """
    if not isinstance(parameter, DTensor):
        return local
    shape = tuple(parameter.shape) if shape is None else shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def find_offset(x: Tensor) -> tuple[int, ...]:
    """Where the local shard starts in the whole tensor."""
    if not isinstance(x, DTensor):
        return (0,) * x.dim()
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(offset)


def count_largest_shard(x: Tensor) -> int:
    """Elements of the largest shard: the same number on every rank."""
    if not isinstance(x, DTensor):
        return x.numel()
    sizes = list(x.shape)
    for number, placement in enumerate(x.placements):
        if isinstance(placement, (Shard, _StridedShard)):
            dim = placement.dim % x.dim()
            sizes[dim] = -(-sizes[dim] // x.device_mesh.size(number))
    return math.prod(sizes)


def sharded_dims(x: Tensor) -> set[int]:
    """The dimensions that are split over ranks."""
    if not isinstance(x, DTensor):
        return set()
    return {p.dim % x.dim() for p in x.placements if isinstance(p, (Shard, _StridedShard))}
