"""Many ranks: a device mesh, sharded weights, experts spread over ranks.

torchrun or launch ─▶ Mesh (data, tensor, expert) ─▶ parallelize(model, mesh, plan_of(model.config))
                                                        │ tensor.py: weights, heads, vocabulary
                                                        │ expert.py: experts, by a Transport
load of experts ─ rebalance ─▶ Placement ───────────────┘

`models.load_share` does the same to a checkpoint of which each rank reads its share only. `channel.py` is how rank 0
tells the others what to do, `others.py` starts them beside a process that is alone, `health.py` names who is gone.
"""

from __future__ import annotations

from fulgurite.parallel.expert import ExpertParallel, spread_experts
from fulgurite.parallel.launch import Ranks, launch
from fulgurite.parallel.mesh import Axis, Mesh, MeshShape
from fulgurite.parallel.placement import Placement
from fulgurite.parallel.shares import Shares
from fulgurite.parallel.tensor import parallelize
from fulgurite.parallel.transport import Collective, Transport

__all__ = [
    "Axis",
    "Collective",
    "ExpertParallel",
    "Mesh",
    "MeshShape",
    "Placement",
    "Ranks",
    "Shares",
    "Transport",
    "launch",
    "parallelize",
    "spread_experts",
]
