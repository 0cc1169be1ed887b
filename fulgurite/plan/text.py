"""Cluster plans as text and as JSON: `ClusterPlan`s in, strings or plain dictionaries out."""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.kernels.dispatch.buffers import NUM_BUFFERS
from fulgurite.parallel.tensor import shard_heads
from fulgurite.plan.memory import GPU_MEMORY_UTILIZATION
from fulgurite.plan.search import ClusterPlan, PlanQuery, count_parameters
from fulgurite.plan.step_time import StepTime
from fulgurite.units import format_bytes

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
    lines = [_memory_title(plan)]
    for name, count, note in rows:
        if count or name in ("KV cache", "total"):
            lines.append(f"  {name:<15} {format_bytes(count):>10}   {note}".rstrip())
    return "\n".join(lines)


def _memory_title(plan: ClusterPlan) -> str:
    shape = plan.mesh_shape
    if shape.world_size == 1:
        return "on the GPU"
    if shape.pipeline == 1:
        return f"on each GPU with {shape}"
    return f"on each GPU of stage {plan.stage}, the fullest of {shape.pipeline}, with {shape}"


def _memory_notes(query: PlanQuery, plan: ClusterPlan) -> dict[str, str]:
    config, mesh_shape, limits = query.config, plan.mesh_shape, plan.memory.limits
    tensor, moe, slots = mesh_shape.tensor, config.moe, plan.shard_spec.expert_slots
    dtype = str(limits.kv_dtype).removeprefix("torch.")
    notes = {
        "activations": f"{limits.max_batched_tokens:,} tokens a step, "
        f"logits of {limits.max_sequences}",
        "KV cache": f"{plan.memory.cache_tokens:,} tokens in blocks of {limits.block_size}, {dtype}"
        + (f", 1/{mesh_shape.context} of each" if mesh_shape.context > 1 else "")
        if plan.fits
        else f"too small for one request of {limits.context:,} tokens",
    }
    if tensor > 1:
        heads = shard_heads(config.num_heads, config.num_kv_heads, 0, tensor)
        local = config.num_heads if heads is None else heads[0][1]
        notes["attention"] = f"{local} of {config.num_heads} heads"
        notes["dense MLP"] = f"1/{tensor} of each"
        notes["embedding"] = f"1/{tensor} of {config.vocab_size:,} tokens"
    if moe is not None:
        notes["experts"] = f"{slots // mesh_shape.expert} of {moe.num_experts} a layer"
        if slots > moe.num_experts:
            notes["experts"] += f", {slots - moe.num_experts} of all {slots} redundant"
        if mesh_shape.expert == 1 and tensor > 1:
            notes["experts"] = f"1/{tensor} of each of {moe.num_experts} a layer"
    if plan.experts is not None:
        notes["activations"] += f"; all {mesh_shape.expert} ranks' tokens to one rank"
        buffers = plan.experts.config.size_buffers(mesh_shape.expert)
        row_bytes = buffers.header_bytes + buffers.row_bytes
        notes["dispatch"] = (
            f"{NUM_BUFFERS} × {buffers.num_ranks} ranks × {buffers.rows:,} rows of {row_bytes:,} B, "
            "and results"
        )
    return notes


def format_capacity(query: PlanQuery, plan: ClusterPlan) -> str:
    """How many requests fit, and how fast they decode."""
    assert plan.decode is not None, "only a plan that fits has capacity"
    longest = min(plan.memory.cache_tokens, query.config.max_positions)
    data = f" ({plan.mesh_shape.data} data ranks)" if plan.mesh_shape.data > 1 else ""
    each = " on each" if plan.mesh_shape.data > 1 else ""
    return (
        f"capacity: {plan.max_requests:,} requests of {query.context:,} tokens{data}, "
        f"or one of up to {longest:,}{each}"
    )


# Parts of a step that are printed, and their fields in `StepTime`.
STEP_PARTS = (
    ("memory reads", "memory"),
    ("compute", "compute"),
    ("all-reduce", "all_reduce"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
    ("between stages", "transfers"),
)


def format_steps(query: PlanQuery, plan: ClusterPlan) -> str:
    """The predicted decode and prefill step by part, and the speeds that they assume."""
    decode, prefill = plan.decode, plan.prefill
    assert decode is not None and prefill is not None, "only a plan that fits has steps"
    rows: list[Sequence[str]] = [
        ("predicted step", f"decode of {decode.tokens:,}", f"prefill of {prefill.tokens:,}", "")
    ]
    notes = {
        "memory": "a layer takes the longer of these two" if decode.communication else "",
        "dispatch": "" if plan.experts is None else _describe_transport(plan),
    }
    if not decode.communication:
        notes["compute"] = "a layer takes the longer of these two"
    for name, field in STEP_PARTS:
        times = [getattr(step, field) for step in (decode, prefill)]
        if any(times):
            rows.append((f"  {name}", *map(_format_ms, times), notes.get(field, "")))
    rows.append(("  total", _format_ms(decode.total), _format_ms(prefill.total), ""))
    speeds = [f"{step.tokens_per_second:,.0f} tokens/s" for step in (decode, prefill)]
    rows.append(("", *speeds, ""))
    lines = _align(rows)
    if plan.mesh_shape.world_size > 1:
        lines.append(_describe_links(query))
    return "\n".join(lines)


def _describe_transport(plan: ClusterPlan) -> str:
    assert plan.experts is not None, "the mesh has no expert axis"
    return f"{plan.experts.transport.name}, {plan.experts.config.dispatch_format} rows"


def _describe_links(query: PlanQuery) -> str:
    cluster, gpu = query.cluster, query.cluster.gpu
    text = f"links {gpu.link_bandwidth:g} GB/s and {cluster.link_latency * 1e6:g} µs"
    if cluster.num_nodes > 1:
        text += f", network {gpu.network_bandwidth:g} GB/s and {cluster.network_latency * 1e6:g} µs"
    return f"{text}; memory and compute of the datasheet"


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds else ""


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first and the last one to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("   ".join((*cells, row[-1])).rstrip())
    return lines


def format_choice(plans: Sequence[ClusterPlan]) -> str:
    """Why the first plan was chosen."""
    fitting = [plan for plan in plans if plan.decode is not None]
    if len(plans) == 1:
        return "the only possible mesh"
    if len(fitting) == 1:
        return f"the only one of {len(plans)} meshes that fits"
    first, second = fitting[0].decode, fitting[1].decode
    assert first is not None and second is not None, "both fit"
    ratio = first.tokens_per_second / second.tokens_per_second
    lead = f"{ratio:.2f}× the next one" if ratio > 1.005 else "equal to the next one"
    return f"chosen of {len(fitting)} meshes that fit: the fastest decode, {lead}"


def format_other_meshes(plans: Sequence[ClusterPlan]) -> str:
    """The meshes that were not chosen, one a line."""
    rows = [("other meshes", "weights", "requests", "ms a step", "tokens/s", "mostly")]
    for plan in plans[:MAX_SHOWN_MESHES]:
        mesh = f"data {plan.mesh_shape.data} x tensor {plan.mesh_shape.tensor}"
        if plan.mesh_shape.expert > 1:
            mesh += f", experts over {plan.mesh_shape.expert}"
        weights, decode = format_bytes(plan.memory.weights), plan.decode
        if decode is None:
            rows.append((mesh, weights, "0", "", "", "does not fit"))
            continue
        speed = (f"{decode.total * 1e3:.2f}", f"{decode.tokens_per_second:,.0f}")
        rows.append((mesh, weights, f"{plan.max_requests:,}", *speed, largest_part(decode)))
    lines = _align(rows)
    if len(plans) > MAX_SHOWN_MESHES:
        lines.append(f"and {len(plans) - MAX_SHOWN_MESHES} more")
    return "\n".join(lines)


def largest_part(step: StepTime) -> str:
    """The part of a step that takes longest."""
    return max(STEP_PARTS, key=lambda part: float(getattr(step, part[1])))[0]


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
    memory, shape, experts = plan.memory, plan.mesh_shape, plan.experts
    return {
        "data": shape.data,
        "tensor": shape.tensor,
        "expert": shape.expert,
        "pipeline": shape.pipeline,
        "context_parallel": shape.context,
        "transport": experts.transport.name if experts else None,
        "wire": experts.config.dispatch_format if experts else None,
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
        "decode": _step_to_json(plan.decode),
        "prefill": _step_to_json(plan.prefill),
    }


def _step_to_json(step: StepTime | None) -> dict[str, float] | None:
    if step is None:
        return None
    parts = {field: getattr(step, field) for _, field in STEP_PARTS}
    return {"tokens": step.tokens, **parts, "seconds": step.total}


def _format_count(number: int) -> str:
    """`671B`, `3.4B`, `135M`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= scale:
            digits = 1 if number < 100 * scale else 0
            return f"{number / scale:.{digits}f}{unit}"
    return str(number)
