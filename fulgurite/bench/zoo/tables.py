"""Tables of the suite `zoo`.

In: rows. Out: text: counts of passed and failed rows by group, and times against eager and torch.compile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fulgurite.bench import results
from fulgurite.bench.measure import geomean
from fulgurite.bench.zoo.catalog import MODES
from fulgurite.bench.zoo.transformers_models import MOE
from fulgurite.bench.zoo.worker import Row

# rows that --resume does not measure again; all but `pass` say nothing about the compiler
SETTLED = ("pass", "unavailable", "eager fails", "eager varies", "eager inexact")
BASELINES = ("eager", "torch_compile", "reduce_overhead")
MIN_SPEED = 0.95  # of torch.compile


def row_key(row: Row) -> tuple[Any, ...]:
    """What identifies a row in a file."""
    sizes = row.get("size", "small"), row.get("batch", 2), row.get("dtype", "float32")
    return row["package"], row["model"], row["mode"], *sizes


def is_check(row: Row) -> bool:
    """Whether it is a row of a small model; the others are there for their times."""
    return row.get("size", "small") == "small"


def is_timed(row: Row) -> bool:
    """Whether it was timed beside torch.compile."""
    return "torch_compile_ms" in row and "fulgurite_ms" in row


def group_of(row: Row) -> str:
    """`timm`, `torchvision`, or `transformers TASK`."""
    package = row["package"]
    return f"{package} {row['family']}" if package == "transformers" else package


def format_row(row: Row) -> str:
    """One line, printed as the row comes."""
    line = f"{row['package']}/{row['model']} {row['mode']}: {row['status']}"
    if "first_s" in row:
        line += f", first call {row['first_s']:.1f} s, {row.get('graph_breaks', 0)} graph breaks"
    if row.get("fallbacks"):
        line += f", {len(row['fallbacks'])} fallbacks"
    for name in BASELINES:
        if f"{name}_ms" in row:
            line += f", {row[f'{name}_ms'] / row['fulgurite_ms']:.2f}x {name}"
    if row.get("error"):
        line += f"\n    {row['error']}"
    return line


# ---- passed and failed ---------------------------------------------------------------------------


def format_summary(rows: list[Row]) -> str:
    """Both tables: results of the small models, and times."""
    checks, timed = [r for r in rows if is_check(r)], [r for r in rows if is_timed(r)]
    parts = [format_checks(checks)] if checks else []
    parts += [format_times(timed), format_speed_summary(timed)] if timed else []
    return "\n\n".join(parts)


def format_checks(rows: list[Row]) -> str:
    """Counts by group and mode."""
    head = ["group", "mode", "models", "eager runs", "pass", "fail", "graph breaks", "fallbacks"]
    head += ["first call", "× eager"]
    body = []
    for group in dict.fromkeys(map(group_of, rows)):
        for mode in MODES:
            if chosen := [r for r in rows if group_of(r) == group and r["mode"] == mode]:
                body.append([group, mode, *_count(chosen)])
    body.append(["all", "", *_count(rows)])
    return results.format_table([head, *body])


def _count(rows: list[Row]) -> list[str]:
    counts = Counter(row["status"] for row in rows)
    checked = len(rows) - sum(counts[one] for one in SETTLED if one != "pass")
    firsts = sorted(row["first_s"] for row in rows if "first_s" in row)
    line = [len(rows), checked, counts["pass"], checked - counts["pass"]]
    line += [sum(row.get("graph_breaks", 0) for row in rows)]
    line += [sum(len(row.get("fallbacks", [])) for row in rows)]
    return [
        *map(str, line),
        f"{firsts[len(firsts) // 2]:.1f} s" if firsts else "",
        _format_geomean(rows, "eager", "ms"),
    ]


# ---- times ---------------------------------------------------------------------------------------


def format_times(rows: list[Row]) -> str:
    """One line per row: ours, and the others' times over ours."""
    head = ["model", "mode", "batch", "ms", "device ms", "kernels", "launches"]
    head += ["× eager", "× compile", "× reduce-overhead", "device × compile", "first call"]
    head += ["first × compile", "peak MB", "compile's"]
    body = [_format_times_row(row) for row in rows]
    return results.format_table([head, *body])


def _format_times_row(row: Row) -> list[str]:
    def figure(name: str, digits: int = 2) -> str:
        return f"{row[name]:.{digits}f}" if name in row else ""

    name = row["model"] if row.get("size") == "default" else f"{row['model']} (small)"
    return [
        name,
        row["mode"],
        str(row.get("batch", 2)),
        figure("fulgurite_ms"),
        figure("fulgurite_device_ms"),
        figure("fulgurite_kernels", 0),
        figure("fulgurite_launches", 0),
        *(_format_geomean([row], name, "ms") for name in BASELINES),
        _format_geomean([row], "torch_compile", "device_ms"),
        figure("first_s", 1),
        _format_geomean([row], "torch_compile", "first_s"),
        figure("fulgurite_peak_mb", 0),
        figure("torch_compile_peak_mb", 0),
    ]


SELECTIONS: dict[str, Callable[[Row], bool]] = {
    "inference": lambda row: row["mode"] == "inference",
    "training": lambda row: row["mode"] == "training",
    "MoE inference": lambda row: row["model"] in MOE and row["mode"] == "inference",
    "MoE training": lambda row: row["model"] in MOE and row["mode"] == "training",
}


def format_speed_summary(rows: list[Row]) -> str:
    """Geometric means of the others' figures over ours, and how many rows miss a bound."""
    head = ["", "rows", "× eager", "× compile", "× reduce-overhead", "device × compile"]
    head += ["first × compile", "peak ÷ compile's", "slower than eager", f"< {MIN_SPEED} compile"]
    body = []
    for title, selects in SELECTIONS.items():
        if chosen := [row for row in rows if selects(row)]:
            body.append([title, str(len(chosen)), *_summarize_speed(chosen)])
    return results.format_table([head, *body])


def _summarize_speed(rows: list[Row]) -> list[str]:
    memory = [
        row["fulgurite_peak_mb"] / row["torch_compile_peak_mb"]
        for row in rows
        if row.get("fulgurite_peak_mb") and row.get("torch_compile_peak_mb")
    ]
    return [
        *(_format_geomean(rows, name, "ms") for name in BASELINES),
        _format_geomean(rows, "torch_compile", "device_ms"),
        _format_geomean(rows, "torch_compile", "first_s"),
        f"{geomean(memory):.2f}" if memory else "",
        str(sum(row["fulgurite_ms"] > row["eager_ms"] for row in rows)),
        str(sum(row["torch_compile_ms"] < MIN_SPEED * row["fulgurite_ms"] for row in rows)),
    ]


def _format_geomean(rows: list[Row], baseline: str, figure: str) -> str:
    ours, other = f"fulgurite_{figure}", f"{baseline}_{figure}"
    ratios = [row[other] / row[ours] for row in rows if row.get(other) and row.get(ours)]
    return f"{geomean(ratios):.2f}" if ratios else ""
