"""What ranks run in the tests of gradient reduction."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.train.accumulate import SumTree
from fulgurite.train.parallel.layout_base import Degrees, RankMesh, tree_all_reduce
from fulgurite.train.parallel.reduction import (
    BucketReducer,
    make_buckets,
    reduce_in_order,
    set_gradients,
    tree_all_reduce_flat,
)


def open_ranks() -> RankMesh:
    world = int(os.environ["WORLD_SIZE"])
    return RankMesh(Degrees(dp_replicate=world), 60.0, "cpu")


def reduce_uneven_gradients(in_order: bool) -> list[list[float] | None]:
    """Parameters with a gradient on both ranks, on rank 0, on rank 1, and on none."""
    ranks = open_ranks()
    axis, value = ranks.axis("tokens"), float(ranks.rank + 1)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    reducer = BucketReducer([(axis, parameters)])
    reducer.arm()
    used = [parameters[0], parameters[1 + ranks.rank]]
    sum((p * value).sum() for p in used).backward()  # type: ignore[union-attr]
    if in_order:
        reducer.disarm()
        sums = reduce_in_order(parameters, [p.grad for p in parameters], axis)
        for bucket in make_buckets(parameters, axis):
            found = dict(zip(parameters, sums, strict=True))
            set_gradients(bucket, [found[p] for p in bucket.parameters])
    else:
        reducer.finish()
    ranks.close()
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def reduce_while_backward_runs() -> tuple[list[int], int, Tensor, Tensor]:
    """How many buckets had started at the backward of each layer, the last layer first."""
    ranks = open_ranks()
    axis = ranks.axis("tokens")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    reducer = BucketReducer([(axis, list(model.parameters()))])
    reducer.buckets = [
        b for p in reversed(list(model.parameters())) for b in make_buckets([p], axis)
    ]
    reducer.bucket_of = {p: bucket for bucket in reducer.buckets for p in bucket.parameters}
    started: list[int] = []
    for layer in model:
        layer.register_full_backward_pre_hook(lambda *_: started.append(reducer.num_started))
    inputs = [torch.randn(3, 16, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    reducer.arm()
    model(inputs[ranks.rank]).square().sum().backward()
    seen = list(started)
    reducer.finish()
    gradient = get_gradient(model[0])
    model.zero_grad()
    sum(model(x).square().sum() for x in inputs).backward()  # type: ignore[union-attr]
    ranks.close()
    return seen, len(reducer.buckets), gradient, get_gradient(model[0])


def get_gradient(layer: Any) -> Tensor:
    gradient: Tensor = layer.weight.grad.clone()
    return gradient


def sum_in_tree_order() -> tuple[Tensor, Tensor, Tensor]:
    """The two collectives, and the same sum on this rank alone."""
    ranks = open_ranks()
    axis = ranks.axis("data")
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(axis.size, 37, generator=generator) * 10.0 ** torch.arange(37).sub(18)
    tree = SumTree()
    for part in parts:
        tree.push([part.clone()])
    expected = tree.total()[0]
    assert expected is not None
    own = parts[axis.index]
    sums = tree_all_reduce(own, axis), tree_all_reduce_flat(own, axis)
    ranks.close()
    return *sums, expected
