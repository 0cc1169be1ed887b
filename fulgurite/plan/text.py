"""Cluster plans as text and as JSON: `ClusterPlan`s in, strings or plain dictionaries out."""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.kernels.dispatch.buffers import NUM_BUFFERS
from fulgurite.plan.memory import GPU_MEMORY_UTILIZATION
from fulgurite.plan.search import (
    COMBINE_FORMAT,
    ClusterPlan,
    DecodeBound,
    PlanQuery,
    count_parameters,
)
from fulgurite.plan.shard import local_heads
from fulgurite.trace.cost import format_bytes

MAX_SHOWN_MESHES = 8


def format_headline(query: PlanQuery, model_bytes: int) -> str:
    """The model, the cluster and the intended use, in two lines."""
    count, active = count_parameters(query)
    parameters = f"{_format_count(count)} parameters"
    if active < count:
        parameters += f", {_format_count(active)} active"
    gpu = query.cluster.gpu
    batch = "" if query.batch is None else f"{query.batch:,} "
    return "\n".join(
        (
            f"{query.name} · {parameters} · {query.format} · {format_bytes(model_bytes)}",
            f"{query.cluster} · {gpu.memory_gib * GPU_MEMORY_UTILIZATION:.1f} of "
            f"{gpu.memory_gib:g} GiB usable on each · {batch}requests of {query.context:,} tokens",
        )
    )


def format_memory(query: PlanQuery, plan: ClusterPlan) -> str:
    """The memory of one GPU, one line a purpose."""
    memory = plan.memory
    notes = _memory_notes(query, plan)
    rows = [(name, count, notes.get(name, "")) for name, count in plan.weights.items() if count]
    rows += [
        ("activations", memory.activations, notes["activations"]),
        ("dispatch", memory.dispatch_buffers, notes.get("dispatch", "")),
        ("workspaces", memory.workspaces, ""),
        ("states", memory.states, f"of {memory.limits.max_sequences} requests"),
        ("KV cache", memory.kv_cache, notes["KV cache"]),
        ("total", memory.total, f"of {format_bytes(memory.available)}"),
    ]
    many = plan.mesh_shape.world_size > 1
    lines = [f"on each GPU with {plan.mesh_shape}" if many else "on the GPU"]
    for name, count, note in rows:
        if count or name in ("KV cache", "total"):
            lines.append(f"  {name:<15} {format_bytes(count):>10}   {note}".rstrip())
    return "\n".join(lines)


def _memory_notes(query: PlanQuery, plan: ClusterPlan) -> dict[str, str]:
    config, mesh_shape, limits = query.config, plan.mesh_shape, plan.memory.limits
    tensor, moe, slots = mesh_shape.tensor, config.moe, plan.shard_spec.expert_slots
    dtype = str(limits.kv_dtype).removeprefix("torch.")
    notes = {
        "activations": f"{limits.max_batched_tokens:,} tokens a step, "
        f"logits of {limits.max_sequences}",
        "KV cache": f"{plan.memory.cache_tokens:,} tokens in blocks of {limits.block_size}, {dtype}"
        if plan.fits
        else f"too small for one request of {limits.context:,} tokens",
    }
    if tensor > 1:
        notes["attention"] = f"{local_heads(config, tensor)[0]} of {config.num_heads} heads"
        notes["dense MLP"] = f"1/{tensor} of each"
        notes["embedding"] = f"1/{tensor} of {config.vocab_size:,} tokens"
    if moe is not None:
        notes["experts"] = f"{slots // mesh_shape.expert} of {moe.num_experts} a layer"
        if slots > moe.num_experts:
            notes["experts"] += f", {slots - moe.num_experts} of all {slots} redundant"
        if mesh_shape.expert == 1 and tensor > 1:
            notes["experts"] = f"1/{tensor} of each of {moe.num_experts} a layer"
    if plan.dispatch_buffers is not None:
        buffers = plan.dispatch_buffers
        row_bytes = buffers.header_bytes + buffers.row_bytes
        notes["dispatch"] = (
            f"{NUM_BUFFERS} × {buffers.num_ranks} ranks × {buffers.rows:,} rows of {row_bytes:,} B "
            f"({query.dispatch_format}), and results ({COMBINE_FORMAT})"
        )
    return notes


def format_capacity(query: PlanQuery, plan: ClusterPlan) -> str:
    """How many requests fit, and the bound on decode speed."""
    assert plan.bound is not None, "only a plan that fits has capacity"
    longest = min(plan.memory.cache_tokens, query.config.max_positions)
    data = f" ({plan.mesh_shape.data} data ranks)" if plan.mesh_shape.data > 1 else ""
    each = " on each" if plan.mesh_shape.data > 1 else ""
    return "\n".join(
        (
            f"capacity: {plan.max_requests:,} requests of {query.context:,} tokens{data}, "
            f"or one of up to {longest:,}{each}",
            f"decode of {plan.bound.requests:,} at once: {format_bound(plan.bound)}",
        )
    )


def format_bound(bound: DecodeBound) -> str:
    links = f" and {bound.link_seconds * 1e3:.2f} ms of links" if bound.link_seconds else ""
    return (
        f"at most {bound.tokens_per_second:,.0f} tokens/s, a step needs "
        f"{bound.memory_seconds * 1e3:.2f} ms of memory{links}"
    )


def format_choice(plans: Sequence[ClusterPlan]) -> str:
    """Why the first plan was chosen."""
    fitting = [plan for plan in plans if plan.bound is not None]
    if len(plans) == 1:
        return "the only possible mesh"
    if len(fitting) == 1:
        return f"the only one of {len(plans)} meshes that fits"
    first, second = fitting[0].bound, fitting[1].bound
    assert first is not None and second is not None, "both fit"
    ratio = first.tokens_per_second / second.tokens_per_second
    lead = f"{ratio:.2f}× the next one" if ratio > 1.005 else "equal to the next one"
    return f"chosen of {len(fitting)} meshes that fit: the highest decode bound, {lead}"


def format_other_meshes(plans: Sequence[ClusterPlan]) -> str:
    """The meshes that were not chosen, one a line."""
    rows = [("other meshes", "weights", "requests", "ms a step", "tokens/s", "")]
    for plan in plans[:MAX_SHOWN_MESHES]:
        mesh = f"data {plan.mesh_shape.data} x tensor {plan.mesh_shape.tensor}"
        if plan.mesh_shape.expert > 1:
            mesh += f", experts over {plan.mesh_shape.expert}"
        weights = format_bytes(plan.memory.weights)
        if plan.bound is None:
            rows.append((mesh, weights, "0", "", "", "does not fit"))
            continue
        bound = plan.bound
        limit = "memory" if bound.memory_seconds >= bound.link_seconds else "links"
        speed = (f"{bound.seconds * 1e3:.2f}", f"{bound.tokens_per_second:,.0f}")
        rows.append((mesh, weights, f"{plan.max_requests:,}", *speed, limit))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True)]
        lines.append("   ".join((*cells, row[5])).rstrip())
    if len(plans) > MAX_SHOWN_MESHES:
        lines.append(f"and {len(plans) - MAX_SHOWN_MESHES} more")
    return "\n".join(lines)


def to_json(query: PlanQuery, plans: Sequence[ClusterPlan]) -> dict[str, object]:
    """Everything as plain values, in bytes and seconds."""
    count, active = count_parameters(query)
    cluster = query.cluster
    return {
        "model": query.name,
        "family": query.family.name,
        "parameters": count,
        "active_parameters": active,
        "format": query.format,
        "context": query.context,
        "kv_dtype": str(query.kv_dtype).removeprefix("torch."),
        "gpu": cluster.gpu.name,
        "gpus_per_node": cluster.gpus_per_node,
        "nodes": cluster.num_nodes,
        "available_bytes": query.available_bytes,
        "meshes": [_plan_to_json(plan) for plan in plans],
    }


def _plan_to_json(plan: ClusterPlan) -> dict[str, object]:
    memory, bound = plan.memory, plan.bound
    return {
        "data": plan.mesh_shape.data,
        "tensor": plan.mesh_shape.tensor,
        "expert": plan.mesh_shape.expert,
        "fits": plan.fits,
        "weights": plan.weights,
        "activations": memory.activations,
        "dispatch_buffers": memory.dispatch_buffers,
        "workspaces": memory.workspaces,
        "states": memory.states,
        "kv_cache": memory.kv_cache,
        "total": memory.total,
        "cache_tokens": memory.cache_tokens,
        "max_requests": plan.max_requests,
        "decode_requests": bound.requests if bound else 0,
        "memory_seconds": bound.memory_seconds if bound else None,
        "link_seconds": bound.link_seconds if bound else None,
    }


def _format_count(number: int) -> str:
    """`671B`, `3.4B`, `135M`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= scale:
            digits = 1 if number < 100 * scale else 0
            return f"{number / scale:.{digits}f}{unit}"
    return str(number)
