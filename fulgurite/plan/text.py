"""A plan as people read it, and as programs do: splits in, text or a dictionary for JSON out."""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.plan.cluster import RESULT, Bound, Question, Split, parameters
from fulgurite.plan.memory import SHARE, size
from fulgurite.plan.rank_model import share_heads

OTHERS_SHOWN = 8


def headline(question: Question, whole_bytes: int) -> str:
    """What is planned, and for what."""
    count, active = parameters(question)
    numbers = f"{_count(count)} parameters"
    if active < count:
        numbers += f", {_count(active)} met by a token"
    gpu = question.cluster.gpu
    count_text = "" if question.batch is None else f"{question.batch:,} "
    return "\n".join(
        (
            f"{question.name} · {numbers} · {question.format} · {size(whole_bytes)}",
            f"{question.cluster} · {gpu.memory * SHARE:.1f} GiB of {gpu.memory:g} to use on each"
            f" · {count_text}requests of {question.context:,} tokens",
        )
    )


def split_text(question: Question, split: Split) -> str:
    """The memory of one GPU, line by line, and what fits into it."""
    plan = split.plan
    notes = _notes(question, split)
    rows = [(part, bytes, notes.get(part, "")) for part, bytes in split.weights.items() if bytes]
    rows += [
        ("activations", plan.activations, notes["activations"]),
        ("dispatch", plan.dispatch, notes.get("dispatch", "")),
        ("workspaces", plan.workspaces, ""),
        ("KV cache", plan.cache, notes["KV cache"]),
        ("all", plan.total, f"of {size(plan.available)}"),
    ]
    lines = [f"on each GPU with {split.shape}" if split.shape.ranks > 1 else "on the GPU"]
    for name, bytes, text in rows:
        if bytes or name in ("KV cache", "all"):
            lines.append(f"  {name:<15} {size(bytes):>10}   {text}".rstrip())
    return "\n".join(lines)


def _notes(question: Question, split: Split) -> dict[str, str]:
    config, shape, limits = question.config, split.shape, split.plan.limits
    heads, experts, vocabulary = config.heads, config.experts, config.vocabulary
    kept, slots = share_heads(config, shape.tensor)[0], split.cut.slots
    dtype = str(limits.kv_dtype).removeprefix("torch.")
    notes = {
        "attention": _cut(f"{kept} of {heads} heads", shape.tensor),
        "dense MLP": _cut(f"1/{shape.tensor} of each", shape.tensor),
        "embedding": _cut(f"1/{shape.tensor} of {vocabulary:,} tokens", shape.tensor),
        "activations": f"{limits.step_tokens:,} tokens a step, logits of {limits.max_sequences}",
        "KV cache": f"{split.plan.cache_tokens:,} tokens in blocks of {limits.block_size}, {dtype}"
        if split.fits
        else f"no room for one request of {limits.context:,} tokens",
    }
    if experts is not None:
        notes["experts"] = f"{slots // shape.expert} of {experts.count} a layer"
        if slots > experts.count:
            notes["experts"] += f", {slots - experts.count} of all {slots} redundant"
        if shape.expert == 1 and shape.tensor > 1:
            notes["experts"] = f"1/{shape.tensor} of each of {experts.count} a layer"
    if split.buffers is not None:
        queue = split.buffers
        notes["dispatch"] = (
            f"2 × {queue.ranks} ranks × {queue.rows:,} rows of {queue.header + queue.row_bytes:,} B "
            f"({question.wire}), and results ({RESULT})"
        )
    return notes


def _cut(text: str, tensor: int) -> str:
    return text if tensor > 1 else ""


def room_text(question: Question, split: Split) -> str:
    """How many requests fit, and how fast they can be at best."""
    assert split.bound is not None, "only a plan that fits has room"
    longest = min(split.plan.cache_tokens, question.config.max_positions)
    data = f" ({split.shape.data} data ranks)" if split.shape.data > 1 else ""
    each = " on each" if split.shape.data > 1 else ""
    return "\n".join(
        (
            f"room for {split.requests:,} requests of {question.context:,} tokens{data}, "
            f"or one of up to {longest:,}{each}",
            f"decoding {split.bound.requests:,} at once: {bound_text(split.bound)}",
        )
    )


def bound_text(bound: Bound) -> str:
    links = f" and {bound.link_seconds * 1e3:.2f} ms of links" if bound.link_seconds else ""
    return (
        f"at most {bound.tokens_per_second:,.0f} tokens/s, a step needs "
        f"{bound.memory_seconds * 1e3:.2f} ms of memory{links}"
    )


def why(splits: Sequence[Split]) -> str:
    """Why the first of several is the one."""
    good = [split for split in splits if split.bound is not None]
    if len(splits) == 1:
        return "the only split there is to choose from"
    if len(good) == 1:
        return f"the only one of {len(splits)} splits that fits"
    first, second = good[0].bound, good[1].bound
    assert first is not None and second is not None, "both fit"
    ratio = first.tokens_per_second / second.tokens_per_second
    how = f"{ratio:.2f}× the next one" if ratio > 1.005 else "level with the next one"
    return f"chosen of {len(good)} splits that fit: the highest bound on decoding, {how}"


def others_text(splits: Sequence[Split]) -> str:
    """The splits that were not chosen, a line each."""
    rows = [("other splits", "weights", "requests", "ms a step", "tokens/s", "")]
    for split in splits[:OTHERS_SHOWN]:
        mesh = f"data {split.shape.data} x tensor {split.shape.tensor}"
        if split.shape.expert > 1:
            mesh += f", experts over {split.shape.expert}"
        weights = size(split.plan.weights)
        if split.bound is None:
            rows.append((mesh, weights, "0", "", "", "does not fit"))
            continue
        bound = split.bound
        limit = "memory" if bound.memory_seconds >= bound.link_seconds else "links"
        figures = (f"{bound.seconds * 1e3:.2f}", f"{bound.tokens_per_second:,.0f}")
        rows.append((mesh, weights, f"{split.requests:,}", *figures, limit))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True)]
        lines.append("   ".join((*cells, row[5])).rstrip())
    if len(splits) > OTHERS_SHOWN:
        lines.append(f"and {len(splits) - OTHERS_SHOWN} more")
    return "\n".join(lines)


def as_json(question: Question, splits: Sequence[Split]) -> dict[str, object]:
    """Everything as plain values, bytes and seconds."""
    count, active = parameters(question)
    cluster = question.cluster
    return {
        "model": question.name,
        "family": question.family.name,
        "parameters": count,
        "active_parameters": active,
        "format": question.format,
        "context": question.context,
        "kv_dtype": str(question.kv_dtype).removeprefix("torch."),
        "gpu": cluster.gpu.name,
        "gpus_per_node": cluster.per_node,
        "nodes": cluster.nodes,
        "available_bytes": question.available,
        "splits": [_split_json(split) for split in splits],
    }


def _split_json(split: Split) -> dict[str, object]:
    plan, bound = split.plan, split.bound
    return {
        "data": split.shape.data,
        "tensor": split.shape.tensor,
        "expert": split.shape.expert,
        "fits": split.fits,
        "weights": split.weights,
        "activations": plan.activations,
        "dispatch": plan.dispatch,
        "workspaces": plan.workspaces,
        "cache": plan.cache,
        "total": plan.total,
        "cache_tokens": plan.cache_tokens,
        "requests": split.requests,
        "decode_requests": bound.requests if bound else 0,
        "memory_seconds": bound.memory_seconds if bound else None,
        "link_seconds": bound.link_seconds if bound else None,
    }


def _count(number: int) -> str:
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return (
                f"{number / scale:.1f}{unit}"
                if number < 100 * scale
                else f"{number / scale:.0f}{unit}"
            )
    return str(number)
