"""Parallelism over ranks: a device mesh, sharded weights, distributed experts.

torchrun or launch ─▶ Mesh (data, tensor, expert) ─▶ parallelize(model, mesh, rules)
                                                        │ tensor.py: weights, heads, vocabulary
                                                        │ experts/: experts, with a TokenDispatcher
expert load ─ rebalance_experts ─▶ Placement ───────────┘

`load_shard` of models does the same to a checkpoint of which each rank reads its shard only.

    mesh.py, topology.py, health.py    who the ranks are, on which nodes, and which of them failed
    processes/                         how ranks start, and how rank 0 talks to them
    collectives.py, symmetric/         messages of all ranks, by torch.distributed or on the device
    dispatch/, experts/                tokens to experts and back; which rank has which expert
    tensor.py, pipeline.py, context.py the other axes; layers.py, sharding.py and gradients.py serve them
"""

from __future__ import annotations

from fulgurite.parallel.dispatch.all_to_all import AllToAllDispatcher
from fulgurite.parallel.dispatch.dispatcher import TokenDispatcher
from fulgurite.parallel.experts.expert_parallel import ExpertParallel, apply_expert_parallel
from fulgurite.parallel.experts.placement import Placement
from fulgurite.parallel.mesh import Axis, Mesh, MeshShape
from fulgurite.parallel.processes.launch import RankPool, launch
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
