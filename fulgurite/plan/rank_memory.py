"""The memory plans of all ranks: a shard of each in, one plan with the same KV cache on all out.

Ranks exchange their parts, so every rank can say which one has too little memory, and of what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fulgurite.errors import CapacityError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.models.layers import CausalLM
from fulgurite.parallel.collectives import all_gather
from fulgurite.parallel.dispatch.dispatcher import TokenDispatcher
from fulgurite.parallel.experts.transport import (
    ExpertOptions,
    TransportChoice,
    choose_transport,
    dispatch_buffer_bytes,
)
from fulgurite.parallel.mesh import Axis, Mesh
from fulgurite.plan.limits import EngineLimits
from fulgurite.plan.memory import (
    MemoryPlan,
    RankShapes,
    add_kv_cache,
    available_bytes,
    explain_shortage,
    plan_fixed_memory,
    suggest_smaller,
)
from fulgurite.plan.meta_dispatch import make_meta_dispatcher, plan_dispatch

# What ranks exchange of their plans.
FIELDS = (
    *("cache_tokens", "available", "loading", "weights", "activations", "workspaces"),
    *("dispatch_buffers", "states"),
)


def plan_rank_memory(
    shapes: RankShapes,
    limits: EngineLimits,
    device: torch.device,
    mesh: Mesh | None,
    loading: int = 0,
) -> MemoryPlan:
    """The memory plan of this rank's shard; with many ranks one that fits on every rank.

    `loading` are the temporary bytes of the load.
    """
    ranks = 1 if mesh is None else mesh.ranks_per_device
    available = available_bytes(device) // ranks
    plan = plan_fixed_memory(shapes, limits, device, available, loading)
    plan = add_kv_cache(plan, shapes.attention_specs)
    plans = [plan] if mesh is None else gather_plans(plan, mesh)
    check_plans(plans, shapes)
    smallest = min(one.cache_tokens for one in plans)
    if smallest == plan.cache_tokens:
        return plan
    limits = replace(plan.limits, cache_tokens=smallest)
    return add_kv_cache(
        replace(plan, limits=limits, kv_cache=0, group_blocks=(), cache_tokens=0),
        shapes.attention_specs,
    )


def gather_plans(plan: MemoryPlan, mesh: Mesh) -> list[MemoryPlan]:
    """The plans of all ranks, by rank; limits and device are this rank's."""
    own = torch.tensor([[getattr(plan, name) for name in FIELDS]])
    rows = all_gather(own, mesh.world, "all-gather of memory plans").tolist()
    return [replace(plan, **dict(zip(FIELDS, row, strict=True)), kv_cache=0) for row in rows]


def check_plans(plans: list[MemoryPlan], shapes: RankShapes) -> None:
    """CapacityError, the same on all ranks, that names the rank with the largest shortage."""
    short = [rank for rank, plan in enumerate(plans) if not plan.fits]
    if not short:
        return
    worst = max(short, key=lambda rank: plans[rank].total - plans[rank].available)
    plan = plans[worst]
    where = "" if len(plans) == 1 else f" on rank {worst} of {len(plans)}"
    others = [str(rank) for rank in short if rank != worst]
    raise CapacityError(
        f"the model does not fit{where}: {explain_shortage(plan)}",
        plan=plan.format_table(),
        others=f"nor on rank {', '.join(others)}" if others else None,
        next=suggest_smaller(plan, shapes),
    )


@dataclass(frozen=True)
class RankDispatch:
    """The transport of this rank's experts: the choice, what it is built for, and its buffers."""

    choice: TransportChoice
    config: DispatchConfig
    axis: Axis
    buffer_bytes: int

    def make_meta_dispatcher(self) -> TokenDispatcher:
        return make_meta_dispatcher(self.choice.name, self.axis, self.config)


def plan_rank_dispatch(
    options: ExpertOptions,
    model: CausalLM,
    limits: EngineLimits,
    mesh: Mesh,
    device: torch.device,
    num_slots: int | None = None,
) -> RankDispatch:
    """How the tokens of a model reach the experts of a mesh; `num_slots` as in `plan_dispatch`."""
    choice = choose_transport(options, mesh.expert, device)
    config = plan_dispatch(options, model.config, model.dtype, limits, mesh.shape, num_slots)
    buffers = dispatch_buffer_bytes(choice.name, config, mesh.expert.size)
    return RankDispatch(choice, config, mesh.expert, buffers)
