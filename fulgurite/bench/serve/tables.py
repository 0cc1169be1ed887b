"""Prints rows of the suite `serve`: one table for each group of rows that was measured together."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

from fulgurite.bench import results
from fulgurite.bench.serve.idle import format_idle_streams
from fulgurite.bench.serve.summary import PERCENTILES

Row = dict[str, Any]
HEADER = ["req/s", "out tok/s", "all tok/s", "ttft", "itl", "e2e", "client"]
LEGEND = "p50/p90/p99; client: its share of the CPU"


def format_tables(rows: list[Row]) -> str:
    """All groups, in the order of the rows."""
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["group"])]
    return "\n\n".join(
        format_idle_streams(group) if "idle_streams" in group[0] else format_group(group)
        for group in groups
    )


def format_group(rows: Sequence[Row]) -> str:
    """Title, table, and lines about what the table has no room for."""
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    is_closed = all("client" in row["load"] for row in rows)
    lines = [["clients" if is_closed else "load", *HEADER]]
    for row in rows:
        load = row["load"].split()[0] if is_closed else row["load"]
        label = load if len(names) == 1 else f"{load} · {row['candidate']}"
        lines.append([label, *_format_cells(row)])
    repeats = rows[0]["repeats"]
    title = f"{rows[0]['group']} · {f'medians of {repeats}' if repeats > 1 else 'one run'}"
    parts = [title, results.format_table(lines), LEGEND]
    parts += _format_ratios(rows, names)
    parts += [line for row in rows for line in _format_notes(row)]
    return "\n".join(parts)


def _format_cells(row: Row) -> list[str]:
    return [
        f"{row['requests_per_s']:,.1f}",
        f"{row['output_tokens_per_s']:,.0f}",
        f"{row['total_tokens_per_s']:,.0f}",
        *(format_percentiles(row[f"{name}_ms"]) for name in ("ttft", "itl", "e2e")),
        f"{row['client_cpu_share']:.0%}",
    ]


def format_percentiles(found: dict[str, float] | None) -> str:
    """`12/15/41 ms`; in seconds if the largest is 10 s or more."""
    if found is None:
        return ""
    values = [found[f"p{rank}"] for rank in PERCENTILES]
    if values[-1] >= 10_000:
        return "/".join(f"{value / 1e3:.1f}" for value in values) + " s"
    digits = 1 if values[-1] < 10 else 0
    return "/".join(f"{value:.{digits}f}" for value in values) + " ms"


def _format_ratios(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Output tokens per second of the first candidate over those of each other one."""
    speeds = {(row["candidate"], row["load"]): row["output_tokens_per_s"] for row in rows}
    lines = []
    for other in names[1:]:
        pairs = [(load, speed, speeds.get((other, load)))
                 for (name, load), speed in speeds.items() if name == names[0]]  # fmt: skip
        found = [f"{speed / theirs:.2f} ({load})" for load, speed, theirs in pairs if theirs]
        if found:
            lines.append(f"{names[0]} ÷ {other}, out tok/s: {', '.join(found)}")
    return lines


def _format_notes(row: Row) -> list[str]:
    """Prefix hits, goodput, CPU of the server, replies that are too short, errors."""
    notes = []
    if row["cached_tokens"]:
        share = row["cached_tokens"] / max(row["prompt_tokens"], 1)
        notes.append(f"{share:.0%} of prompt tokens from the prefix cache")
    if row.get("goodput_per_s") is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in row["goodput"].items())
        notes.append(f"goodput {row['goodput_per_s']:.1f} req/s ({limits})")
    if row["server_cpu_s"]:
        notes.append(f"server {row['server_cpu_s'] / row['seconds']:.2f} cores")
    if row["reconnects"]:
        notes.append(f"{row['reconnects']:g} reconnects")
    if row["short_replies"]:
        notes.append(f"{row['short_replies']:g} replies shorter than asked")
    for kind, count in row["errors"].items():
        notes.append(f"{count} × {kind}")
    if row["first_error"]:
        notes.append(f"first error: {row['first_error'][:120]}")
    label = f"{row['load']}, {row['candidate']}"
    return textwrap.wrap(f"{label}: {' · '.join(notes)}", 100) if notes else []
