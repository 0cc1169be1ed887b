"""Tables and bars of the numbers of an explanation.

In: summaries and programs. Out: markup. Numbers stand in columns of their own, aligned to the right; a bar is
drawn to the scale of the largest value beside it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fulgurite.capture.dynamo import GraphBreak
from fulgurite.executors.torch import TORCH
from fulgurite.explain import (
    CompiledGraphSummary,
    Explanation,
    GraphSummary,
    format_roofline_fraction,
    group_equal_kernels,
)
from fulgurite.fuser import Kernel
from fulgurite.report.graph import executor_colour
from fulgurite.report.markup import Markup, join_markup, make_element
from fulgurite.report.stages import Stage, StageHistory
from fulgurite.trace import Trace
from fulgurite.trace.cost import (
    format_count,
    format_flops,
    format_seconds,
    is_view,
    node_bytes,
    node_flops,
)
from fulgurite.trace.decisions import Decision
from fulgurite.trace.node_meta import executor_of
from fulgurite.units import format_bytes


@dataclass(frozen=True)
class Column:
    """A column: its header, and whether it holds numbers."""

    head: str
    number: bool = False


def make_table(
    columns: Sequence[Column], rows: Iterable[Sequence[object]], class_: str = ""
) -> Markup:
    """A table whose first column names the row."""
    head = make_element("tr", *(_cell("th", c.head, c, scope="col") for c in columns))
    body = []
    for row in rows:
        cells = [_cell("td", value, c) for c, value in zip(columns[1:], row[1:], strict=True)]
        body.append(make_element("tr", _cell("th", row[0], columns[0], scope="row"), *cells))
    content = make_element(
        "table", make_element("thead", head), make_element("tbody", *body), class_=class_ or None
    )
    return make_element("div", content, class_="table")


def _cell(name: str, value: object, column: Column, scope: str | None = None) -> Markup:
    return make_element(name, value, class_="number" if column.number else None, scope=scope)


def make_bar(value: float, largest: float, class_: str = "") -> Markup:
    """A bar, scaled to the largest value."""
    share = 100 * value / largest if largest else 0.0
    inner = make_element("span", style=f"width:{share:.1f}%", class_=class_ or None)
    return make_element("span", inner, class_="bar", aria_hidden="true")


def make_swatch(executor: str, executors: Sequence[str]) -> Markup:
    dot = make_element("i", class_=f"swatch x{executor_colour(executor, executors)}")
    return join_markup([dot, executor])


# ---- the whole -----------------------------------------------------------------------------------


def make_times_table(times: dict[str, float]) -> Markup:
    """Seconds per call, and speedup over eager."""
    longest = max(times.values(), default=0.0)
    eager = times.get("eager")
    rows = [
        (
            name,
            format_seconds(seconds),
            f"{eager / seconds:.2f}×" if eager and seconds else "",
            make_bar(seconds, longest, "accent" if name == "fulgurite" else ""),
        )
        for name, seconds in times.items()
    ]
    columns = [
        Column("time a call"),
        Column("median", True),
        Column("speed", True),
        Column(""),
    ]
    return make_table(columns, rows, "with-bars")


def make_graphs_table(graphs: Sequence[GraphSummary]) -> Markup:
    """One row per compiled graph; its name links to it."""
    rows = []
    for graph in graphs:
        for program in graph.compiled_graphs:
            name = join_markup([graph.index, program.kind], " · ")
            rows.append(
                (
                    make_element("a", name, href=f"#{program_anchor(graph.index, program.kind)}"),
                    make_element("code", graph.where),
                    program.captured_ops,
                    sum(program.calls.values()),
                    format_bytes(program.bytes_in),
                    format_bytes(program.bytes_out),
                    format_seconds(program.seconds),
                )
            )
    columns = [
        Column("graph"),
        Column("starts at"),
        Column("ops", True),
        Column("calls", True),
        Column("in", True),
        Column("out", True),
        Column("stage time", True),
    ]
    return make_table(columns, rows)


def make_kernels_list(summary: CompiledGraphSummary) -> Markup | str:
    """Generated kernels: bytes moved and why each ends; schedule and source are collapsed."""
    if not summary.kernels:
        return ""
    columns = [Column("region"), Column("kernel"), Column("ops")]
    columns += [Column("bytes", True), Column("predicted", True)]
    measured = any(kernel.seconds is not None for kernel in summary.kernels)
    columns += [Column("measured", True), Column("roofline", True)] if measured else []
    rows, sources = [], []
    for kernel, count in group_equal_kernels(summary.kernels):
        made = kernel.kernel
        name = f"{kernel.name} ×{count}" if count > 1 else kernel.name
        row = [
            kernel.call,
            name,
            _ops_text(made),
            format_bytes(made.bytes_moved),
            format_seconds(made.predicted_seconds),
        ]
        row += (
            [format_seconds(kernel.seconds or 0.0), format_roofline_fraction(kernel)]
            if measured
            else []
        )
        rows.append([*row, kernel.reason])
        sources.append(_kernel_source(f"{kernel.name} · {made.schedule}", made))
    listed = make_table([*columns, Column("fusion boundary")], rows)
    return make_element(
        "div", listed, make_element("div", *sources, class_="sources"), class_="kernels"
    )


def _ops_text(kernel: Kernel, most: int = 6) -> str:
    ops = list(dict.fromkeys(op.strip("_") for op in kernel.ops))
    return ", ".join(ops[:most]) + (f" and {len(ops) - most} more" if len(ops) > most else "")


def _kernel_source(title: str, kernel: Kernel) -> Markup:
    source = make_element("pre", kernel.source, class_="printed")
    return make_element("details", make_element("summary", title), source)


def program_anchor(graph: int, kind: str) -> str:
    return f"graph-{graph}-{kind}"


def make_breaks_list(breaks: Sequence[GraphBreak]) -> Markup:
    """Graph breaks: location, source line, reason, and what to do."""
    if not breaks:
        return make_element("p", "None: everything was captured.", class_="quiet")
    return make_element("ol", *map(_break, breaks), class_="breaks")


def _break(found: GraphBreak) -> Markup:
    place = f"{found.file}:{found.line}"
    line = make_element("pre", make_element("code", found.code or "(no source)"), class_="source")
    parts = [make_element("div", place, class_="place"), line, make_element("p", found.reason)]
    if found.hint:
        parts.append(make_element("p", make_element("b", "Instead "), found.hint, class_="hint"))
    return make_element("li", *parts)


# ---- one graph -----------------------------------------------------------------------------------


def make_saved_table(graph: GraphSummary, remat: str) -> Markup:
    """Bytes saved for backward under each policy."""
    largest = max(graph.saved_bytes.values(), default=0)
    rows = [
        (
            make_element("b", policy) if policy == remat else policy,
            format_bytes(count),
            make_bar(count, largest, "accent" if policy == remat else ""),
        )
        for policy, count in graph.saved_bytes.items()
    ]
    columns = [Column("saved for backward"), Column("bytes", True), Column("")]
    return make_table(columns, rows, "with-bars")


def make_decisions_table(decisions: Sequence[Decision]) -> Markup:
    """Regions that were timed on several executors; open if one fell back to torch."""
    names = sorted({name for decision in decisions for name in decision.seconds})
    columns = [Column("region"), *(Column(name, number=True) for name in names), Column("runs on")]
    rows = []
    for decision, count in _grouped_decisions(decisions):
        name = f"{decision.region} ×{count}" if count > 1 else decision.region
        times = (
            format_seconds(decision.seconds[n]) if n in decision.seconds else "–" for n in names
        )
        rows.append([name, *times, decision.winner])
    wins = Counter(decision.winner for decision in decisions)
    won = ", ".join(f"{count} on {name}" for name, count in wins.most_common())
    summary = f"{format_count(len(decisions), 'region')} compared, {won}"
    return make_element(
        "details",
        make_element("summary", summary),
        make_table(columns, rows),
        class_="compared",
        open=wins[TORCH.name] > 0,
    )


def _grouped_decisions(decisions: Sequence[Decision]) -> list[tuple[Decision, int]]:
    """Equal regions (of equal layers) are timed once: one row with their count."""
    groups: defaultdict[object, list[Decision]] = defaultdict(list)
    for decision in decisions:
        groups[decision.winner, *decision.seconds.items()].append(decision)
    return [(group[0], len(group)) for group in groups.values()]


def make_executors_table(
    program: CompiledGraphSummary, final: Trace, executors: Sequence[str]
) -> Markup:
    """Per executor of the final trace: calls, bytes moved, FLOPs."""
    moved: dict[str, int] = defaultdict(int)
    flops: dict[str, int] = defaultdict(int)
    views = 0
    for node in final.ops:
        if is_view(node):
            views += 1
            continue
        executor = str(executor_of(node) or "?")
        moved[executor] += node_bytes(node)
        flops[executor] += node_flops(node)
    most = max(program.calls.values(), default=0)
    rows: list[Sequence[object]] = [
        (
            make_swatch(name, executors),
            count,
            format_bytes(moved[name]),
            format_flops(flops[name]) if flops[name] else "–",
            make_bar(count, most, f"x{executor_colour(name, executors)}"),
        )
        for name, count in sorted(program.calls.items())
    ]
    if views:
        quiet = make_element("span", "views", class_="quiet")
        rows.append((quiet, views, "–", "–", ""))
    columns = [
        Column("runs on"),
        Column("calls", True),
        Column("moved", True),
        Column("flops", True),
        Column(""),
    ]
    return make_table(columns, rows, "with-bars")


def make_stages_table(program: StageHistory) -> Markup:
    """Per stage: time, and lines added, removed and changed."""
    longest = max((stage.trace.seconds for stage in program.stages), default=0.0)
    rows = [_stage_row(number, stage, longest) for number, stage in enumerate(program.stages)]
    columns = [
        Column("stage"),
        Column("ms", True),
        Column(""),
        Column("lines", True),
        Column("against the one before"),
    ]
    return make_table(columns, rows, "with-bars stage-table")


def _stage_row(number: int, stage: Stage, longest: float) -> Sequence[object]:
    return (
        make_element("button", stage.trace.stage, type="button", class_="link", data_stage=number),
        f"{1e3 * stage.trace.seconds:.1f}",
        make_bar(stage.trace.seconds, longest),
        len(stage.lines) - 1,
        format_changes(stage) if number else "",
    )


def format_changes(stage: Stage) -> Markup:
    """`+4 −2 ~3`, in colour."""
    parts = [
        make_element("span", f"{sign}{count}", class_=class_)
        for sign, count, class_ in (
            ("+", stage.added, "added"),
            ("−", stage.removed, "removed"),
            ("~", stage.changed, "changed"),
        )
        if count
    ]
    return join_markup(parts, " ") if parts else make_element("span", "same", class_="quiet")


def format_headline(explanation: Explanation) -> str:
    """One-line summary: `2 graphs, 1 graph break`."""
    graphs, breaks = len(explanation.graphs), len(explanation.breaks)
    seconds = format_seconds(sum(graph.seconds for graph in explanation.graphs))
    return (
        f"{graphs} graph{'' if graphs == 1 else 's'}, "
        f"{breaks or 'no'} graph break{'' if breaks == 1 else 's'}, compiled in {seconds}"
    )
