"""What the fusion benchmark on a GPU shows: tables, an image, and neighbours that are not equally fast.

In: its rows; a row has `NAME_percent` for every candidate that was timed. Out: text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fulgurite.bench import fusions_matmul, results
from fulgurite.bench.plot import Point, plot

Row = dict[str, Any]
CANDIDATES = {
    "eager": "eager",
    "torch_compile": "torch.compile",
    "max_autotune": "max-autotune",
    "liger": "liger",
    "fulgurite": "fulgurite",
}
NEIGHBOURS = (4096, 4098, 4100, 4104)  # widths that should be equally fast
LARGE = 64 << 20  # bytes from which on they are looked at
SLOWER = 1.1  # times as long for a byte, and it is told


def report(rows: Sequence[Row]) -> str:
    """A table a group, and the neighbours that are slower."""
    parts = []
    for group in dict.fromkeys(row["group"] for row in rows):
        found = [row for row in rows if row["group"] == group]
        table = fusions_matmul.table(found) if group == "matmul" else _table(found)
        parts.append(f"\n{group}\n{table}")
    swept = [row for row in rows if row["group"] == "sizes"]
    if swept:
        slower = list(neighbours(swept)) or ["none"]
        parts.append("\n  ".join(["\nneighbours", *slower]))
    return "\n".join(parts)


def neighbours(rows: Sequence[Row]) -> Iterator[str]:
    """Large cases that take longer for a byte than the fastest of almost the same width."""
    groups: dict[tuple[str, str], list[tuple[float, Row]]] = {}
    for row in rows:
        name, size = row["case"].rsplit(" ", 1)
        height, width = size.split("x")
        if int(width) in NEIGHBOURS and row["bytes"] >= LARGE:
            pace = row["fulgurite_ms"] / row["bytes"]
            groups.setdefault((name, height), []).append((pace, row))
    for found in groups.values():
        best, fastest = min(found, key=lambda each: each[0])
        for pace, row in found:
            if pace > SLOWER * best:
                more = 100 * (pace / best - 1)
                yield f"{row['case']} takes {more:.0f}% longer for a byte than {fastest['case']}"


def bandwidth_plot(rows: Sequence[Row]) -> str:
    """Percent of the copy bandwidth against bytes, of every candidate that was timed."""
    series: dict[str, list[Point]] = {name: [] for name in reversed(CANDIDATES.values())}
    for row in rows:
        for name, percent in percents(row).items():
            point = Point(f"{row['group']} {row['case']}", row["bytes"], percent)
            series[name].append(point)
    found = {name: points for name, points in series.items() if points}
    return plot("Fused kernels: percent of the copy bandwidth", found)


def percents(row: Row) -> dict[str, float]:
    """By the names of candidates, of those that were timed."""
    found = {name: row.get(f"{key}_percent") for key, name in CANDIDATES.items()}
    return {name: percent for name, percent in found.items() if percent is not None}


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _table(rows: Sequence[Row]) -> str:
    """Means are of candidates that have all cases: others' would be of other cases than ours."""
    found = [percents(row) for row in rows]
    names = [n for n in CANDIDATES.values() if any(n in each for each in found)]
    table = [["case", *names, "ms", "compile"]]
    for row, each in zip(rows, found, strict=True):
        shown = [f"{each[n]:.0f}" if n in each else "" for n in names]
        last = [f"{row['fulgurite_ms']:.3f}", f"{row['compile_s']:.1f} s"]
        table.append([row["case"], *shown, *last])
    columns = [[each[n] for each in found if n in each] for n in names]
    means = [f"{_mean(column):.1f}" if len(column) == len(rows) else "" for column in columns]
    table.append(["geomean", *means, "", ""])
    return results.table(table)
