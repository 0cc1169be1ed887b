"""Parallelism over ranks: a device mesh, sharded weights, distributed experts.

torchrun or launch ─▶ Mesh (data, tensor, expert) ─▶ parallelize(model, mesh, rules)
                                                        │ tensor.py: weights, heads, vocabulary
                                                        │ expert.py: experts, with a TokenDispatcher
expert load ─ rebalance_experts ─▶ Placement ───────────┘

`load_shard` of models does the same to a checkpoint of which each rank reads its shard only. channel.py
broadcasts messages of rank 0, workers.py starts worker processes, health.py finds ranks that failed.
"""

from __future__ import annotations

from fulgurite.parallel.dispatcher import AllToAllDispatcher, TokenDispatcher
from fulgurite.parallel.expert import ExpertParallel, apply_expert_parallel
from fulgurite.parallel.launch import RankPool, launch
from fulgurite.parallel.mesh import Axis, Mesh, MeshShape
from fulgurite.parallel.placement import Placement
from fulgurite.parallel.sharding import Sharding
from fulgurite.parallel.tensor import parallelize

__all__ = [
    "AllToAllDispatcher",
    "Axis",
    "ExpertParallel",
    "Mesh",
    "MeshShape",
    "Placement",
    "RankPool",
    "Sharding",
    "TokenDispatcher",
    "apply_expert_parallel",
    "launch",
    "parallelize",
]
