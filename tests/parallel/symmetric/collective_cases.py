"""The functions that ranks run in test_symmetric_collectives.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import RankError
from fulgurite.kernels.common.triton_import import INTERPRETED
from fulgurite.parallel.collectives import (
    all_gather,
    all_gather_tokens,
    all_reduce,
    reduce_scatter_tokens,
    shard_range,
)
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.symmetric.collectives import SymmetricCollectives, count_bytes
from fulgurite.parallel.symmetric.memory import allocate_symmetric_buffer
from tests.parallel.model_cases import mesh_of

REGION_BYTES = 64  # so that small tensors take several programs and several chunks


def make(axis: Axis, device: torch.device, **options: Any) -> SymmetricCollectives:
    size = count_bytes(axis.size, REGION_BYTES)
    buffer = allocate_symmetric_buffer(axis, size, device)
    return SymmetricCollectives(axis, buffer, region_bytes=REGION_BYTES, **options)


def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (100 * x).to(dtype)


def exchange(
    count: int, dtype: torch.dtype, shapes: list[tuple[int, ...]]
) -> tuple[list[str], list[list[float]]]:
    """What is wrong: every collective, over changing shapes, against sums in float64. And all sums."""
    mesh = mesh_of((1, count, 1))
    axis, wrong, sums = mesh.tensor, [], []
    collectives = make(axis, mesh.device)
    for number, shape in enumerate(shapes):
        parts = [draw(100 * number + rank, shape, dtype) for rank in range(count)]
        own = parts[axis.index].to(mesh.device)
        total = torch.stack(parts).double().sum(0)
        in_order = torch.zeros(shape)
        for part in parts:
            in_order += part.float()
        assert (in_order - total).abs().max() < 1e-3 if total.numel() else True
        results = {
            "all_reduce": (collectives.all_reduce(own), in_order.to(dtype)),
            "all_gather": (collectives.all_gather(own), torch.cat(parts)),
        }
        if shape[0] % count == 0:
            rows = shape[0] // count
            mine = in_order.to(dtype)[axis.index * rows : (axis.index + 1) * rows]
            results["reduce_scatter"] = collectives.reduce_scatter(own), mine
            start = axis.index * rows
            received = torch.cat([part[start : start + rows] for part in parts])
            results["all_to_all"] = collectives.all_to_all(own), received
        wrong += [
            f"{name} of {shape}"
            for name, (found, wanted) in results.items()
            if not is_equal(found.cpu(), wanted)
        ]
        sums.append(results["all_reduce"][0].flatten().tolist())
    collectives.check()
    return wrong, sums


def is_equal(found: Tensor, wanted: Tensor) -> bool:
    """To the bit; Triton's interpreter truncates where others round to the nearest bfloat16."""
    if INTERPRETED and found.dtype == torch.bfloat16:
        return torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=0)
    return torch.equal(found, wanted)


def exchange_strided(count: int) -> bool:
    """A transposed input, integers, and single bytes."""
    mesh = mesh_of((1, count, 1))
    collectives = make(mesh.tensor, mesh.device)
    x = torch.arange(35.0, device=mesh.device).view(5, 7).t() * (mesh.rank + 1)
    total = sum(range(1, count + 1)) * torch.arange(35.0, device=mesh.device).view(5, 7).t()
    bytes = torch.full((3, 1), mesh.rank, dtype=torch.uint8, device=mesh.device)
    integers = torch.tensor([2**40 + mesh.rank], device=mesh.device)
    gathered = collectives.all_gather(integers).tolist() == [2**40 + r for r in range(count)]
    all_bytes = collectives.all_gather(bytes).flatten().tolist()
    equal = torch.equal(collectives.all_reduce(x), total)
    collectives.check()
    return equal and gathered and all_bytes == [r for r in range(count) for _ in range(3)]


def exchange_through_axis(count: int) -> tuple[list[bool], int]:
    """The collectives of an axis give the results of gloo; how many went through symmetric memory."""
    mesh = mesh_of((1, count, 1))
    collectives = make(mesh.tensor, mesh.device, max_bytes=400)
    axis, calls = dataclasses.replace(mesh.tensor, device_collectives=collectives), []
    run = collectives._exchange
    collectives._exchange = lambda *a, **k: (calls.append(1), run(*a, **k))[1]  # type: ignore[method-assign]
    same = []
    for tokens in (0, 1, 3, 8, 50):  # the last one is too large
        x = torch.arange(tokens * 4.0, device=mesh.device).view(tokens, 4) + mesh.rank
        own = x[: all_local(tokens, axis)]
        same += [
            torch.equal(all_reduce(x, axis), all_reduce(x, mesh.tensor)),
            torch.equal(all_gather(x, axis), all_gather(x, mesh.tensor)),
            torch.equal(reduce_scatter_tokens(x, axis), reduce_scatter_tokens(x, mesh.tensor)),
            torch.equal(
                all_gather_tokens(own, axis, tokens), all_gather_tokens(own, mesh.tensor, tokens)
            ),
        ]
    collectives.check()
    return same, len(calls)


def all_local(tokens: int, axis: Axis) -> int:
    start, stop = shard_range(tokens, axis.index, axis.size)
    return stop - start


def lose_a_rank(count: int) -> str:
    """The last rank takes no part; what the others say."""
    mesh = mesh_of((1, count, 1))
    # Enough for ranks that start late on a busy machine.
    collectives = make(mesh.tensor, mesh.device, max_polls=3000 if INTERPRETED else 1 << 22)
    torch.distributed.barrier()
    if mesh.rank == count - 1:
        return ""
    for _ in range(3):
        collectives.all_reduce(torch.ones(8, device=mesh.device))
    try:
        collectives.check()
    except RankError as error:
        return f"{error.ranks} {error}"
    return "no error"


def replay_graph(count: int, replays: int) -> list[str]:
    """A captured all-reduce counts on, between eager ones."""
    mesh = mesh_of((1, count, 1))
    collectives = SymmetricCollectives.create(mesh.tensor, mesh.device)
    x = torch.zeros(300, device=mesh.device)
    for _ in range(3):
        collectives.all_reduce(x)
    graph, wrong = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        total = collectives.all_reduce(x)
        twice = collectives.all_gather(total)
    for number in range(replays):
        x.fill_(number + mesh.rank)
        graph.replay()
        wanted = sum(number + rank for rank in range(count))
        eager = collectives.all_reduce(x)
        if (
            not (total == wanted).all()
            or not (twice == wanted).all()
            or not (eager == wanted).all()
        ):
            wrong.append(str(number))
    collectives.check()
    return wrong
