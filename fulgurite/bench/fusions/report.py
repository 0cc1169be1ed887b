"""Tables and the plot of the GPU fusion suite, and cliffs between neighbouring sizes.

In: rows; a row has `NAME_percent` for every candidate that was timed. Out: text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fulgurite.bench import results
from fulgurite.bench.fusions import gemm_epilogues
from fulgurite.bench.fusions.plot import Point, draw_plot
from fulgurite.bench.measure import geomean

Row = dict[str, Any]
CANDIDATES = {
    "eager": "eager",
    "torch_compile": "torch.compile",
    "max_autotune": "max-autotune",
    "liger": "liger",
    "fulgurite": "fulgurite",
}
NEIGHBOUR_WIDTHS = (4096, 4098, 4100, 4104)  # should be equally fast
MIN_CLIFF_BYTES = 64 << 20  # smaller cases are bound by launch latency
CLIFF_RATIO = 1.1  # time per byte over the fastest neighbour


def format_report(rows: Sequence[Row]) -> str:
    """One table per group, and the size cliffs."""
    parts = []
    for group in dict.fromkeys(row["group"] for row in rows):
        found = [row for row in rows if row["group"] == group]
        table = gemm_epilogues.format_table(found) if group == "matmul" else _table(found)
        parts.append(f"\n{group}\n{table}")
    swept = [row for row in rows if row["group"] == "sizes"]
    if swept:
        slower = list(find_size_cliffs(swept)) or ["none"]
        parts.append("\n  ".join(["\nsize cliffs", *slower]))
    return "\n".join(parts)


def find_size_cliffs(rows: Sequence[Row]) -> Iterator[str]:
    """Large cases that need more time per byte than the fastest case of almost the same width."""
    groups: dict[tuple[str, str], list[tuple[float, Row]]] = {}
    for row in rows:
        name, size = row["case"].rsplit(" ", 1)
        height, width = size.split("x")
        if int(width) in NEIGHBOUR_WIDTHS and row["bytes"] >= MIN_CLIFF_BYTES:
            pace = row["fulgurite_ms"] / row["bytes"]
            groups.setdefault((name, height), []).append((pace, row))
    for found in groups.values():
        best, fastest = min(found, key=lambda each: each[0])
        for pace, row in found:
            if pace > CLIFF_RATIO * best:
                more = 100 * (pace / best - 1)
                yield f"{row['case']} takes {more:.0f}% longer per byte than {fastest['case']}"


def plot_bandwidth(rows: Sequence[Row]) -> str:
    """Percent of the copy bandwidth over bytes moved, for every candidate that was timed."""
    series: dict[str, list[Point]] = {name: [] for name in reversed(CANDIDATES.values())}
    for row in rows:
        for name, percent in percent_by_candidate(row).items():
            point = Point(f"{row['group']} {row['case']}", row["bytes"], percent)
            series[name].append(point)
    found = {name: points for name, points in series.items() if points}
    return draw_plot("Fused kernels: percent of the copy bandwidth", found)


def percent_by_candidate(row: Row) -> dict[str, float]:
    """Candidate name → percent of the copy bandwidth, for those that were timed."""
    found = {name: row.get(f"{key}_percent") for key, name in CANDIDATES.items()}
    return {name: percent for name, percent in found.items() if percent is not None}


def _table(rows: Sequence[Row]) -> str:
    """The geomean is shown only for candidates that ran every case: otherwise the cases would differ."""
    found = [percent_by_candidate(row) for row in rows]
    names = [n for n in CANDIDATES.values() if any(n in each for each in found)]
    table = [["case", *names, "ms", "compile"]]
    for row, each in zip(rows, found, strict=True):
        shown = [f"{each[n]:.0f}" if n in each else "" for n in names]
        last = [f"{row['fulgurite_ms']:.3f}", f"{row['compile_s']:.1f} s"]
        table.append([row["case"], *shown, *last])
    columns = [[each[n] for each in found if n in each] for n in names]
    means = [f"{geomean(column):.1f}" if len(column) == len(rows) else "" for column in columns]
    table.append(["geomean", *means, "", ""])
    return results.format_table(table)
