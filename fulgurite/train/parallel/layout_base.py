"""What all layouts share: degrees in, a mesh with named dimensions, sums and norms over ranks out.

    ParallelSection, world ─ resolve_degrees ─▶ Degrees ─ RankMesh ─▶ DeviceMesh, Axis by name
                                                              │
                                        ParallelLayout: ranks, sums, gradient norm, close

    world = pp x dp_replicate x dp_shard x cp x tp       the last dimension varies fastest
    data  = dp_replicate x dp_shard                      ranks with samples of their own
    ep divides data x cp                                 the same ranks, regrouped for the experts

`RankMesh.mesh` has the dimensions pp, dp_replicate, dp_shard, cp, tp; `RankMesh.expert_mesh` has pp,
ep_replicate, ep, tp. Slices of them (`ranks.mesh["dp_shard"]`) are for DTensor and FSDP2.
`RankMesh.axis(name)` is the same group as an `Axis`, whose collectives name a failed rank. Names are
those dimensions, and `data`, `tokens` (data x cp: ranks with different tokens) and `world`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fulgurite.errors import ArgumentError
from fulgurite.parallel.collectives import all_gather, all_reduce
from fulgurite.parallel.mesh import Axis, Mesh
from fulgurite.train.accumulate import SumTree, norm_of_norms
from fulgurite.train.config import ParallelSection, TrainConfig
from fulgurite.train.loss import LossSums

# `full_tensor` of what two dimensions shard takes two all-gathers. torch warns of it on every rank.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
DENSE_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_DIMS = ("pp", "ep_replicate", "ep", "tp")
# Axes that are several dimensions of the dense mesh together.
FLAT_AXES = {"data": ("dp_replicate", "dp_shard"), "tokens": ("dp_replicate", "dp_shard", "cp")}


@dataclass(frozen=True)
class Degrees:
    """The number of ranks of each dimension."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def data(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def tokens(self) -> int:
        return self.data * self.cp

    @property
    def world_size(self) -> int:
        return self.pp * self.tokens * self.tp

    @property
    def ep_replicate(self) -> int:
        """Ranks with the same experts and other tokens."""
        return self.tokens // self.ep

    def __str__(self) -> str:
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        used = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return " x ".join(used) or "one rank"


def resolve_degrees(section: ParallelSection, world: int) -> Degrees:
    """The degrees for `world` ranks; ArgumentError if they don't fit."""
    if world < 1:
        raise ArgumentError(f"{world} ranks can't run", next="--ranks 1 or more")
    for name in ("tensor", "expert", "pipeline", "context"):
        if getattr(section, name) < 1:
            raise ArgumentError(
                f"parallel.{name}={getattr(section, name)}", next="a degree is at least 1"
            )
    rest = section.tensor * section.pipeline * section.context
    data = _resolve_data(section, world, rest)
    shard = data if section.data_shard == 0 else section.data_shard
    if shard < 0 or data % max(shard, 1):
        raise ArgumentError(
            f"parallel.data_shard={section.data_shard} must divide the {data} data ranks",
            next=f"one of {list_divisors(data)}; 1 replicates the weights, 0 shards them over all",
        )
    tokens = data * section.context
    if tokens % section.expert:
        raise ArgumentError(
            f"parallel.expert={section.expert} must divide data {data} x context "
            f"{section.context} = {tokens} ranks",
            next=f"one of {list_divisors(tokens)}",
        )
    return Degrees(
        section.pipeline, data // shard, shard, section.context, section.tensor, section.expert
    )


def _resolve_data(section: ParallelSection, world: int, rest: int) -> int:
    if section.data is not None and section.data < 1:
        raise ArgumentError(f"parallel.data={section.data}", next="a degree is at least 1")
    data = max(1, world // rest) if section.data is None else section.data
    if data * rest != world:
        raise ArgumentError(
            f"pipeline {section.pipeline} x data {data} x context {section.context} x tensor "
            f"{section.tensor} = {data * rest} ranks, but there are {world}",
            next=f"start {data * rest} ranks (--ranks {data * rest}), or change the degrees so that "
            f"their product is {world}",
        )
    return data


def list_divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def check_batch(config: TrainConfig, degrees: Degrees) -> None:
    """Raise if a step's samples can't be dealt out evenly."""
    batch, micro = config.batch_size, config.microbatch_size
    assert batch is not None and micro is not None, "resolve_sizes fills them in"
    if micro < 1 or batch < 1 or batch % (micro * degrees.data):
        raise ArgumentError(
            f"batch_size={batch} must be a multiple of microbatch_size {micro} x data ranks "
            f"{degrees.data} = {micro * degrees.data}",
            next=f"batch_size={max(1, round(batch / max(1, micro * degrees.data))) * micro * degrees.data}, "
            "or another microbatch_size or number of data ranks",
        )


class RankMesh:
    """The process group of a run and its dimensions. Every rank makes it, with equal degrees."""

    def __init__(
        self, degrees: Degrees, timeout: float = 300.0, device: torch.device | str | None = None
    ) -> None:
        """`device` cpu keeps ranks off the GPUs of the machine; otherwise each rank has its own."""
        is_cpu = device is not None and torch.device(device).type == "cpu"
        self.degrees = degrees
        # Starts torch.distributed, and finds failed ranks.
        self.ranks = Mesh(timeout=timeout, backend="gloo" if is_cpu else None)
        if self.ranks.shape.world_size != degrees.world_size:
            raise ArgumentError(
                f"{degrees} = {degrees.world_size} ranks, but {self.ranks.shape.world_size} were started"
            )
        self.device = torch.device("cpu") if is_cpu else self.ranks.device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._meshes: dict[str, DeviceMesh] = {}
        self._axes: dict[str, Axis] = {}
        if degrees.world_size > 1:
            self._make_meshes()

    def _make_meshes(self) -> None:
        """Create all groups; torch.distributed requires it of every rank, in one order."""
        degrees, device = self.degrees, self.device.type
        ranks = torch.arange(degrees.world_size)
        sizes = [getattr(degrees, name) for name in DENSE_DIMS]
        self._meshes["dense"] = DeviceMesh(device, ranks.view(sizes), mesh_dim_names=DENSE_DIMS)
        for name in DENSE_DIMS:
            self._axes[name] = self._axis_of_dim("dense", name)
        for name, dims in FLAT_AXES.items():
            self._axes[name] = self._flat_axis(name, dims, ranks.view(sizes))
        sizes = [getattr(degrees, name) for name in EXPERT_DIMS]
        self._meshes["expert"] = DeviceMesh(device, ranks.view(sizes), mesh_dim_names=EXPERT_DIMS)
        for name in ("ep_replicate", "ep"):
            self._axes[name] = self._axis_of_dim("expert", name)
        self._axes["world"] = self.ranks.world

    def _axis_of_dim(self, mesh: str, name: str) -> Axis:
        part = self._meshes[mesh][name]
        ranks = tuple(part.mesh.flatten().tolist())
        group = part.get_group() if len(ranks) > 1 else None
        return Axis(name, ranks, ranks.index(self.rank), group, self.ranks.health)

    def _flat_axis(self, name: str, dims: tuple[str, ...], ranks: Tensor) -> Axis:
        numbers = [DENSE_DIMS.index(dim) for dim in dims]
        others = [i for i in range(len(DENSE_DIMS)) if i not in numbers]
        groups = ranks.permute(*others, *numbers).flatten(len(others)).flatten(0, -2).tolist()
        own: Axis | None = None
        wait = timedelta(seconds=self.ranks.timeout)
        for members in groups:
            group = dist.new_group(members, timeout=wait) if len(members) > 1 else None
            if self.rank in members:
                index = members.index(self.rank)
                own = Axis(name, tuple(members), index, group, self.ranks.health)
        assert own is not None, f"rank {self.rank} is in no group of {name}"
        return own

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def mesh(self) -> DeviceMesh:
        """Dimensions pp, dp_replicate, dp_shard, cp, tp."""
        return self._meshes["dense"]

    @property
    def expert_mesh(self) -> DeviceMesh:
        """Dimensions pp, ep_replicate, ep, tp."""
        return self._meshes["expert"]

    def axis(self, name: str) -> Axis:
        """The ranks that differ from this one in this dimension only."""
        if self.degrees.world_size == 1:
            return Axis(name, (0,), 0)
        return self._axes[name]

    def close(self) -> None:
        self._meshes.clear()
        self._axes.clear()
        self.ranks.close()


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of equal shares of a `SumTree`, in its order; overwrites the parts."""
    tree = SumTree()
    for part in parts:
        tree.push([part])
    total = tree.total()[0]
    assert total is not None, "there is a part"
    return total


def tree_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks in the order of a tree, for small tensors: all-gather, then `tree_sum`."""
    if axis.group is None:
        return x
    return tree_sum(list(all_gather(x[None], axis, "all-gather for a tree").unbind(0)))


def sum_losses(sums: LossSums, axis: Axis, in_order: bool) -> LossSums:
    """The sums of all ranks of an axis, by one collective. `in_order`: in the order of a tree."""
    if axis.group is None:
        return sums
    values = [x for x in sums if x is not None]
    flat = torch.cat([x.detach().double().flatten() for x in values])  # exact: float32 and counts
    if not in_order:
        return _unpack_sums(all_reduce(flat, axis, "all-reduce of losses"), sums)
    tree = SumTree()
    for row in all_gather(flat[None], axis, "all-gather of losses").unbind(0):
        tree.push(_unpack_sums(row, sums))
    return LossSums(*tree.total())  # type: ignore[arg-type]


def _unpack_sums(flat: Tensor, like: LossSums) -> LossSums:
    parts = iter(flat.split([x.numel() for x in like if x is not None]))
    return LossSums(
        *(None if x is None else next(parts).view_as(x).to(x.dtype) for x in like)  # type: ignore[arg-type]
    )


class ParallelLayout:
    """Base of layouts: everything of `train.layout.Layout` but `shard` and `run_microbatches`."""

    def __init__(self, config: TrainConfig, ranks: RankMesh) -> None:
        self.config, self.ranks = config, ranks
        self.degrees = ranks.degrees
        self.is_deterministic = config.deterministic

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.degrees.world_size

    @property
    def data_rank(self) -> int:
        return self.ranks.axis("data").index

    @property
    def data_ranks(self) -> int:
        return self.degrees.data

    def sum_over_data(self, x: Tensor) -> Tensor:
        axis = self.ranks.axis("data")
        return tree_all_reduce(x, axis) if self.is_deterministic else all_reduce(x, axis)

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.is_deterministic:
            return norm_of_full_gradients(gradients)
        return norm_of_gradients(gradients, self.ranks.axis("pp"))

    def barrier(self) -> None:
        axis = self.ranks.axis("world")
        all_reduce(torch.zeros(1, device=self.ranks.device), axis, "barrier")

    def close(self) -> None:
        """Leave the process group."""
        self.ranks.close()


def norm_of_full_gradients(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of one rank, to the bit: of full gradients, gathered one at a time."""
    return norm_of_norms(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)


def norm_of_gradients(gradients: Sequence[Tensor], stages: Axis | None = None) -> Tensor:
    """The norm from sums of local squares: one all-reduce for each sharded dimension of a mesh.

    `stages` are pipeline stages, which have other parameters.
    """
    by_group: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    device = gradients[0].device if gradients else torch.device("cpu")
    for gradient in gradients:
        groups, local = _sharded_groups(gradient)
        by_group.setdefault(groups, []).append(local)
    total = torch.zeros((), device=device)
    for groups in sorted(by_group, key=_group_key):
        norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in by_group[groups]]
        squares = torch.stack(norms).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    if stages is not None and stages.group is not None:
        total = all_reduce(total[None], stages, "all-reduce of the gradient norm")[0]
    return total.sqrt()


def _sharded_groups(gradient: Tensor) -> tuple[tuple[dist.ProcessGroup, ...], Tensor]:
    """The groups over which a gradient is sharded, and its local shard."""
    if not isinstance(gradient, DTensor):
        return (), gradient
    if any(placement.is_partial() for placement in gradient.placements):
        raise ArgumentError(
            f"a gradient has placements {gradient.placements}",
            next="reduce gradients before their norm is taken",
        )
    mesh = gradient.device_mesh
    groups = [mesh.get_group(i) for i, p in enumerate(gradient.placements) if not p.is_replicate()]
    return tuple(group for group in groups if group.size() > 1), gradient.to_local()


def _group_key(groups: tuple[dist.ProcessGroup, ...]) -> tuple[str, ...]:
    """Ranks must reduce in one order."""
    return tuple(group.group_desc + group.group_name for group in groups)
