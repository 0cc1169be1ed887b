"""`fulgurite plan --expert-load`: recorded expert load in, the load balance of ranks out.

Three placements are compared by their busiest rank: experts in order, rebalanced, and rebalanced with
redundant slots for the busiest experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.models.loading.hub import name_model
from fulgurite.parallel.experts.placement import (
    Placement,
    check_model_name,
    contiguous_placement,
    count_moves,
    read_expert_load,
    read_model_name,
    save_placement,
    simulate_rank_load,
)
from fulgurite.parallel.experts.rebalance import rebalance_experts
from fulgurite.plan.search import ClusterPlan, PlanQuery
from fulgurite.units import format_bytes


@dataclass(frozen=True)
class NamedPlacement:
    name: str
    placement: Placement


def format_expert_load(
    query: PlanQuery, plan: ClusterPlan, path: Path, placement_path: str | None
) -> str:
    """The comparison as a table; the best placement is saved if a path is given."""
    load_LE = read_expert_load(path)
    name = name_model(query.name)
    _check_load_shape(query, plan, load_LE)
    check_model_name(str(path), read_model_name(path), name)
    candidates = _candidate_placements(query, plan, load_LE)
    layers, experts = load_LE.shape
    lines = [
        f"expert load of {path.name} · {layers} layers of {experts} experts on "
        f"{plan.mesh_shape.expert} ranks"
    ]
    in_order = candidates[0].placement
    rows = [("", "busiest rank", "worst layer", "slots a rank", "moved experts", "")]
    for candidate in candidates:
        load = simulate_rank_load(load_LE, candidate.placement)
        worst = int(load.imbalance_L.argmax())
        moves = count_moves(in_order, candidate.placement)
        rows.append(
            (
                candidate.name,
                f"{load.imbalance:.2f} × mean",
                f"{float(load.imbalance_L[worst]):.2f} (layer {worst})",
                str(candidate.placement.slots_per_rank),
                f"{moves:,}",
                f"{format_bytes(moves * _expert_bytes(query, plan))} in total" if moves else "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "   ".join(cells).rstrip())
    if placement_path is not None:
        best = replace(candidates[-1].placement, model=name)
        saved = save_placement(best, Path(placement_path))
        lines.append(f"written to {saved}")
    return "\n".join(lines)


def _check_load_shape(query: PlanQuery, plan: ClusterPlan, load_LE: Tensor) -> None:
    moe = query.config.moe
    assert moe is not None, "an expert load needs a model with experts"
    moe_layers = sum(layer.is_moe for layer in query.config.layers)
    if tuple(load_LE.shape) != (moe_layers, moe.num_experts):
        raise ArgumentError(
            f"an expert load of shape {list(load_LE.shape)} does not belong to {query.name}",
            next=f"it has {moe_layers} layers with {moe.num_experts} experts each",
        )
    if plan.mesh_shape.expert == 1:
        raise ArgumentError(
            "this mesh has all experts on every rank, so there is nothing to place",
            next="distribute the experts with --expert",
        )


def _candidate_placements(
    query: PlanQuery, plan: ClusterPlan, load_LE: Tensor
) -> list[NamedPlacement]:
    moe, ranks = query.config.moe, plan.mesh_shape.expert
    assert moe is not None, "an expert load needs a model with experts"
    nodes, groups = -(-ranks // query.cluster.gpus_per_node), moe.num_groups
    if ranks % nodes or groups % nodes:
        nodes = groups = 1  # expert groups can't be kept on one node each
    in_order = contiguous_placement(load_LE.shape[0], moe.num_experts, ranks)
    slots = in_order.slots_LS.shape[1]
    rebalanced = rebalance_experts(load_LE, ranks, slots=slots, nodes=nodes, groups=groups)
    candidates = [
        NamedPlacement("experts in order", in_order),
        NamedPlacement("rebalanced", rebalanced),
    ]
    more_slots = max(plan.shard_spec.expert_slots, slots + ranks)
    if more_slots <= moe.num_experts * ranks:
        name = f"with {more_slots - moe.num_experts} redundant"
        redundant = rebalance_experts(load_LE, ranks, slots=more_slots, nodes=nodes, groups=groups)
        candidates.append(NamedPlacement(name, redundant))
    return candidates


def _expert_bytes(query: PlanQuery, plan: ClusterPlan) -> int:
    moe_layers = sum(layer.is_moe for layer in query.config.layers)
    local_slots = plan.shard_spec.expert_slots // plan.mesh_shape.expert
    return plan.weights["experts"] // (moe_layers * local_slots)
