"""`build_layout`: a config and the ranks of the environment in, their `Layout` out.

RANK and WORLD_SIZE are set by `fulgurite train --ranks`, `fulgurite.parallel.launch` or torchrun. What
does not fit together is an error here, before any rank waits for another.

| degrees                         | layout           |
|---------------------------------|------------------|
| one rank                        | `OneRank`        |
| data                            | `ReplicatedData` |
| data, data_shard                | `ShardedData`    |
| either, expert                  | the same         |
| either, tensor, context         | `ReplicatedModelParallel`, `ShardedModelParallel` |
| either, pipeline, all others    | `ReplicatedPipeline`, `ShardedPipeline` |
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from fulgurite.errors import ArgumentError
from fulgurite.models.config import ModelConfig
from fulgurite.train.config import TrainConfig
from fulgurite.train.layout import Layout
from fulgurite.train.parallel.data import ReplicatedData
from fulgurite.train.parallel.expert import check_experts
from fulgurite.train.parallel.fsdp import ShardedData
from fulgurite.train.parallel.layout_base import (
    Degrees,
    ParallelLayout,
    RankMesh,
    check_batch,
    resolve_degrees,
)
from fulgurite.train.parallel.model_layouts import (
    ReplicatedModelParallel,
    ShardedModelParallel,
    check_model_parallel,
)
from fulgurite.train.parallel.pipeline import check_pipeline
from fulgurite.train.parallel.pipeline_layouts import ReplicatedPipeline, ShardedPipeline
from fulgurite.train.step import OneRank

MakeLayout = Callable[[TrainConfig, RankMesh], ParallelLayout]


def build_layout(
    config: TrainConfig, model_config: ModelConfig, device: torch.device | str
) -> Layout:
    """The layout of this rank. `device` cpu keeps ranks off the GPUs of the machine."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    degrees = resolve_degrees(config.parallel, world)
    check_layout(config, model_config, degrees)
    if world == 1:
        return OneRank(config.deterministic)
    ranks = RankMesh(degrees, config.parallel.timeout, device)
    return select_layout(degrees)(config, ranks)  # type: ignore[return-value]


def select_layout(degrees: Degrees) -> MakeLayout:
    is_sharded = degrees.dp_shard > 1
    if degrees.pp > 1:
        return ShardedPipeline if is_sharded else ReplicatedPipeline
    if degrees.tp > 1 or degrees.cp > 1:
        return ShardedModelParallel if is_sharded else ReplicatedModelParallel
    return ShardedData if is_sharded else ReplicatedData


def check_layout(config: TrainConfig, model_config: ModelConfig, degrees: Degrees) -> None:
    """Raise for what can't work, or would not keep its promise."""
    check_batch(config, degrees)
    check_model_parallel(config, model_config, degrees)
    check_pipeline(config, model_config, degrees)
    experts = 0 if model_config.moe is None else model_config.moe.num_experts
    check_experts(experts, degrees.ep, degrees.tp)
    if config.deterministic:
        check_deterministic(config, degrees)


def check_deterministic(config: TrainConfig, degrees: Degrees) -> None:
    """Raise if bits would depend on the number of ranks."""
    for name, degree in (
        ("expert", degrees.ep),
        ("tensor", degrees.tp),
        ("context", degrees.cp),
        ("pipeline", degrees.pp),
    ):
        if degree > 1:
            raise ArgumentError(
                f"deterministic=true with parallel.{name}={degree}: sums over its ranks depend on "
                "their number",
                next=f"parallel.{name}=1 and more data ranks (parallel.data_shard shards weights), "
                "or deterministic=false",
            )
    assert config.batch_size is not None and config.microbatch_size is not None
    leaves = config.batch_size // (config.microbatch_size * degrees.data)
    if degrees.data > 1 and leaves & (leaves - 1):
        raise ArgumentError(
            f"deterministic=true: {leaves} microbatches on each of {degrees.data} data ranks are no "
            "subtree of the sums of one rank",
            next="choose batch_size so that microbatches per rank (batch_size / microbatch_size / "
            "data ranks) are a power of two",
        )
