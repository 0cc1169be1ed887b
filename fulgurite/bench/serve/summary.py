"""Figures of a run: replies in, one row of numbers out.

Rates count replies that are whole; failures are counted by kind. Percentiles interpolate linearly.

    ttft   from when a request was due to the arrival of its first token
    itl    between arrivals of tokens; tokens that arrive in one read are one arrival
    tpot   of a reply: (end - first token) / (tokens - 1)
    e2e    from when a request was due to the end of its reply
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fulgurite.bench.serve.load import Run
from fulgurite.bench.serve.replies import OK, Reply
from fulgurite.errors import ArgumentError

Row = dict[str, Any]
PERCENTILES = (50, 90, 99)
GOODPUT_METRICS = ("ttft", "tpot", "e2e")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds, from `ttft:500` and the like."""
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in GOODPUT_METRICS or not limits[name] > 0:
            raise ArgumentError(
                f"--goodput {text} is no limit", next="--goodput ttft:500 tpot:50 e2e:5000 (ms)"
            )
    return limits


def measure_percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds: `p50`, `p90`, `p99` and the mean; None without values."""
    if not len(seconds):
        return None
    values = 1e3 * np.asarray(seconds)
    found = np.percentile(values, PERCENTILES)
    named = {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "mean": float(values.mean())}


def reply_times(reply: Reply) -> dict[str, float | None]:
    """Seconds of one whole reply; `tpot` needs two tokens."""
    after_first = reply.output_tokens - 1
    return {
        "ttft": reply.first_token - reply.start,
        "tpot": (reply.end - reply.first_token) / after_first if after_first > 0 else None,
        "e2e": reply.end - reply.start,
    }


def summarize(run: Run, goodput: Mapping[str, float], server_cpu: float | None = None) -> Row:
    """The figures of one run."""
    whole = [reply for reply in run.replies if reply.kind == OK]
    times = [reply_times(reply) for reply in whole]
    prompt = sum(reply.prompt_tokens for reply in whole)
    output = sum(reply.output_tokens for reply in whole)
    cached = [reply.cached_tokens for reply in whole if reply.cached_tokens is not None]
    row: Row = {
        "requests": len(run.replies),
        "ok": len(whole),
        "seconds": run.seconds,
        "requests_per_s": len(whole) / run.seconds,
        "output_tokens_per_s": output / run.seconds,
        "total_tokens_per_s": (prompt + output) / run.seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(cached) if cached else None,
        "short_replies": sum(reply.output_tokens < reply.wanted_tokens for reply in whole),
        "reconnects": sum(reply.reconnects for reply in run.replies),
        "errors": dict(Counter(reply.kind for reply in run.replies if reply.kind != OK)),
        "first_error": next((reply.detail for reply in run.replies if reply.kind != OK), None),
        "client_cpu_s": run.cpu_seconds,
        "client_cpu_share": run.cpu_seconds / run.seconds / count_cores(),
        "server_cpu_s": server_cpu,
    }
    for name in GOODPUT_METRICS:
        values = [one[name] for one in times]
        row[f"{name}_ms"] = measure_percentiles([value for value in values if value is not None])
    row["itl_ms"] = measure_percentiles([gap for reply in whole for gap in reply.gaps])
    if goodput:
        row["goodput"] = dict(goodput)
        row["goodput_per_s"] = sum(_is_good(one, goodput) for one in times) / run.seconds
    return row


def _is_good(times: Mapping[str, float | None], limits: Mapping[str, float]) -> bool:
    return all(1e3 * (times[name] or 0.0) <= limit for name, limit in limits.items())


def count_cores() -> int:
    return len(os.sched_getaffinity(0))


def take_medians(rows: Sequence[Row]) -> Row:
    """The row of several runs: medians of numbers; all errors; and every throughput."""
    merged = {name: _merge([row[name] for row in rows]) for name in rows[0]}
    errors: Counter[str] = Counter()
    for row in rows:
        errors.update(row["errors"])
    throughputs = [row["output_tokens_per_s"] for row in rows]
    return {**merged, "errors": dict(errors), "repeats_output_tokens_per_s": throughputs}


def _merge(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known or isinstance(known[0], str):
        return known[0] if known else None
    if isinstance(known[0], dict):
        return {name: _merge([value.get(name) for value in known]) for name in known[0]}
    return statistics.median(known)
