"""Layouts of ranks: a model in, a sharded model and reduced gradients out.

config.parallel, ranks ─ build_layout ─▶ Layout ─ shard(model) ─▶ run_microbatches ─▶ gradients

layout_base.py   degrees, meshes, sums, norms    reduction.py   buckets, sums in the order of a tree
data.py          replicated weights              fsdp.py        FSDP2 and HSDP
expert.py        experts over data ranks         build.py       which layout a config means
tensor.py        matrices over ranks             tensor_layers.py, vocab_loss.py   its modules and loss
context.py       one sequence over ranks         model_layouts.py   tensor and context with data ranks
pipeline.py      schedules of stages of layers   stages.py, deferred.py, pipeline_layouts.py   its parts
compiled.py      compiled layers, with collectives as ops of their graphs
"""

from __future__ import annotations

from fulgurite.train.parallel.build import build_layout
from fulgurite.train.parallel.data import ReplicatedData
from fulgurite.train.parallel.fsdp import ShardedData
from fulgurite.train.parallel.layout_base import Degrees, ParallelLayout, RankMesh, resolve_degrees

__all__ = [
    "Degrees",
    "ParallelLayout",
    "RankMesh",
    "ReplicatedData",
    "ShardedData",
    "build_layout",
    "resolve_degrees",
]
