"""The numbers of an explanation as tables and small bars.

In: summaries and programs. Out: markup. Numbers stand in columns of their own, aligned to the right; a bar is
drawn to the scale of the largest value beside it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fulgurite.capture.dynamo import GraphBreak
from fulgurite.executors.torch import TORCH
from fulgurite.executors.tune import Decision
from fulgurite.explain import (
    Explanation,
    GraphSummary,
    ProgramSummary,
    grouped_kernels,
    of_limit_text,
)
from fulgurite.fuser import Kernel
from fulgurite.report.graph import colour_of
from fulgurite.report.markup import Markup, element, join
from fulgurite.report.stages import Program, Stage
from fulgurite.trace import Trace
from fulgurite.trace.cost import (
    bytes_text,
    count_text,
    flops_text,
    is_view,
    node_bytes,
    node_flops,
    seconds_text,
)


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, and whether it holds numbers."""

    head: str
    number: bool = False


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]], class_: str = "") -> Markup:
    """A table whose first column names the row."""
    head = element("tr", *(_cell("th", c.head, c, scope="col") for c in columns))
    body = []
    for row in rows:
        cells = [_cell("td", value, c) for c, value in zip(columns[1:], row[1:], strict=True)]
        body.append(element("tr", _cell("th", row[0], columns[0], scope="row"), *cells))
    content = element(
        "table", element("thead", head), element("tbody", *body), class_=class_ or None
    )
    return element("div", content, class_="table")


def _cell(name: str, value: object, column: Column, scope: str | None = None) -> Markup:
    return element(name, value, class_="number" if column.number else None, scope=scope)


def bar(value: float, largest: float, class_: str = "") -> Markup:
    """A bar as long as its share of the largest value."""
    share = 100 * value / largest if largest else 0.0
    inner = element("span", style=f"width:{share:.1f}%", class_=class_ or None)
    return element("span", inner, class_="bar", aria_hidden="true")


def swatch(executor: str, executors: Sequence[str]) -> Markup:
    dot = element("i", class_=f"swatch x{colour_of(executor, executors)}")
    return join([dot, executor])


# ---- the whole -----------------------------------------------------------------------------------


def times_table(times: dict[str, float]) -> Markup:
    """Seconds a call, and how much faster than eager."""
    longest = max(times.values(), default=0.0)
    eager = times.get("eager")
    rows = [
        (
            name,
            seconds_text(seconds),
            f"{eager / seconds:.2f}×" if eager and seconds else "",
            bar(seconds, longest, "accent" if name == "fulgurite" else ""),
        )
        for name, seconds in times.items()
    ]
    columns = [
        Column("time a call"),
        Column("median", True),
        Column("speed", True),
        Column(""),
    ]
    return table(columns, rows, "with-bars")


def graphs_table(graphs: Sequence[GraphSummary]) -> Markup:
    """One row a program; its name leads to it."""
    rows = []
    for graph in graphs:
        for program in graph.programs:
            name = join([graph.index, program.kind], " · ")
            rows.append(
                (
                    element("a", name, href=f"#{anchor(graph.index, program.kind)}"),
                    element("code", graph.where),
                    program.captured_ops,
                    sum(program.calls.values()),
                    bytes_text(program.bytes_in),
                    bytes_text(program.bytes_out),
                    seconds_text(program.seconds),
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
    return table(columns, rows)


def kernels_list(summary: ProgramSummary) -> Markup | str:
    """The generated kernels: what each moves and why it ends; below, schedule and source behind a click."""
    if not summary.kernels:
        return ""
    columns = [Column("kernel"), Column("ops"), Column("bytes", True), Column("predicted", True)]
    measured = any(kernel.seconds is not None for kernel in summary.kernels)
    columns += [Column("measured", True), Column("of limit", True)] if measured else []
    rows, sources = [], []
    for kernel, count in grouped_kernels(summary.kernels):
        made = kernel.kernel
        name = f"{kernel.name} ×{count}" if count > 1 else kernel.name
        row = [name, _ops_text(made), bytes_text(made.bytes), seconds_text(made.predicted)]
        row += [seconds_text(kernel.seconds or 0.0), of_limit_text(kernel)] if measured else []
        rows.append([*row, kernel.reason])
        sources.append(_kernel_source(f"{kernel.name} · {made.schedule}", made))
    listed = table([*columns, Column("why it ends here")], rows)
    return element("div", listed, element("div", *sources, class_="sources"), class_="kernels")


def _ops_text(kernel: Kernel, most: int = 6) -> str:
    ops = list(dict.fromkeys(op.strip("_") for op in kernel.ops))
    return ", ".join(ops[:most]) + (f" and {len(ops) - most} more" if len(ops) > most else "")


def _kernel_source(title: str, kernel: Kernel) -> Markup:
    source = element("pre", kernel.source, class_="printed")
    return element("details", element("summary", title), source)


def anchor(graph: int, kind: str) -> str:
    return f"graph-{graph}-{kind}"


def breaks_list(breaks: Sequence[GraphBreak]) -> Markup:
    """Each graph break: where, the user's line, why, and what to do."""
    if not breaks:
        return element("p", "None: everything was captured.", class_="quiet")
    return element("ol", *map(_break, breaks), class_="breaks")


def _break(found: GraphBreak) -> Markup:
    place = f"{found.file}:{found.line}"
    line = element("pre", element("code", found.code or "(no source)"), class_="source")
    parts = [element("div", place, class_="place"), line, element("p", found.reason)]
    if found.hint:
        parts.append(element("p", element("b", "Instead "), found.hint, class_="hint"))
    return element("li", *parts)


# ---- one graph -----------------------------------------------------------------------------------


def saved_table(graph: GraphSummary, remat: str) -> Markup:
    """Bytes saved for backward under each policy."""
    largest = max(graph.saved_bytes.values(), default=0)
    rows = [
        (
            element("b", policy) if policy == remat else policy,
            bytes_text(count),
            bar(count, largest, "accent" if policy == remat else ""),
        )
        for policy, count in graph.saved_bytes.items()
    ]
    columns = [Column("saved for backward"), Column("bytes", True), Column("")]
    return table(columns, rows, "with-bars")


def decisions_table(decisions: Sequence[Decision]) -> Markup:
    """Regions that were timed on several executors; open where torch got one back."""
    names = sorted({name for decision in decisions for name in decision.seconds})
    columns = [Column("region"), *(Column(name, number=True) for name in names), Column("runs on")]
    rows = []
    for decision, count in _grouped_decisions(decisions):
        name = f"{decision.region} ×{count}" if count > 1 else decision.region
        times = (seconds_text(decision.seconds[n]) if n in decision.seconds else "–" for n in names)
        rows.append([name, *times, decision.winner])
    wins = Counter(decision.winner for decision in decisions)
    won = ", ".join(f"{count} on {name}" for name, count in wins.most_common())
    summary = f"{count_text(len(decisions), 'region')} compared, {won}"
    return element(
        "details",
        element("summary", summary),
        table(columns, rows),
        class_="compared",
        open=wins[TORCH.name] > 0,
    )


def _grouped_decisions(decisions: Sequence[Decision]) -> list[tuple[Decision, int]]:
    """Equal regions (of equal layers) were timed once: one line with their number."""
    groups: defaultdict[object, list[Decision]] = defaultdict(list)
    for decision in decisions:
        groups[decision.winner, *decision.seconds.items()].append(decision)
    return [(group[0], len(group)) for group in groups.values()]


def executors_table(program: ProgramSummary, final: Trace, executors: Sequence[str]) -> Markup:
    """Who runs the final trace: calls, bytes moved, floating-point operations."""
    moved: dict[str, int] = defaultdict(int)
    flops: dict[str, int] = defaultdict(int)
    views = 0
    for node in final.ops:
        if is_view(node):
            views += 1
            continue
        executor = str(node.meta.get("executor", "?"))
        moved[executor] += node_bytes(node)
        flops[executor] += node_flops(node)
    most = max(program.calls.values(), default=0)
    rows: list[Sequence[object]] = [
        (
            swatch(name, executors),
            count,
            bytes_text(moved[name]),
            flops_text(flops[name]) if flops[name] else "–",
            bar(count, most, f"x{colour_of(name, executors)}"),
        )
        for name, count in sorted(program.calls.items())
    ]
    if views:
        quiet = element("span", "views", class_="quiet")
        rows.append((quiet, views, "–", "–", ""))
    columns = [
        Column("runs on"),
        Column("calls", True),
        Column("moved", True),
        Column("flops", True),
        Column(""),
    ]
    return table(columns, rows, "with-bars")


def stages_table(program: Program) -> Markup:
    """Each stage: its time, and the lines it added, removed and changed."""
    longest = max((stage.trace.seconds for stage in program.stages), default=0.0)
    rows = [_stage_row(number, stage, longest) for number, stage in enumerate(program.stages)]
    columns = [
        Column("stage"),
        Column("ms", True),
        Column(""),
        Column("lines", True),
        Column("against the one before"),
    ]
    return table(columns, rows, "with-bars stage-table")


def _stage_row(number: int, stage: Stage, longest: float) -> Sequence[object]:
    return (
        element("button", stage.trace.stage, type="button", class_="link", data_stage=number),
        f"{1e3 * stage.trace.seconds:.1f}",
        bar(stage.trace.seconds, longest),
        len(stage.lines) - 1,
        changes(stage) if number else "",
    )


def changes(stage: Stage) -> Markup:
    """`+4 −2 ~3`, in colour."""
    parts = [
        element("span", f"{sign}{count}", class_=class_)
        for sign, count, class_ in (
            ("+", stage.added, "added"),
            ("−", stage.removed, "removed"),
            ("~", stage.changed, "changed"),
        )
        if count
    ]
    return join(parts, " ") if parts else element("span", "same", class_="quiet")


def headline(explanation: Explanation) -> str:
    """The whole in a line: `2 graphs, 1 graph break`."""
    graphs, breaks = len(explanation.graphs), len(explanation.breaks)
    seconds = seconds_text(sum(graph.seconds for graph in explanation.graphs))
    return (
        f"{graphs} graph{'' if graphs == 1 else 's'}, "
        f"{breaks or 'no'} graph break{'' if breaks == 1 else 's'}, compiled in {seconds}"
    )
