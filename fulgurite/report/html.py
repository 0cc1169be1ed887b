"""The HTML page of `fulgurite explain --html`: its tables, a diff of stages, and the drawn graph.

In: an `Explanation`. Out: one HTML file, written whole or not at all, that needs neither network nor other files.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fulgurite.explain import CompiledGraphSummary, Explanation, GraphSummary
from fulgurite.files import write_atomically
from fulgurite.report import tables
from fulgurite.report.graph import draw_trace
from fulgurite.report.markup import Markup, make_element, make_json_script
from fulgurite.report.stages import StageHistory, build_payload, group_stages
from fulgurite.trace.cost import format_seconds
from fulgurite.version import VERSION

SCRIPTS = ("shared.js", "stages.js", "picture.js", "page.js")  # one script, in this order
MAX_OPEN_GRAPHS = 4  # with more graphs, only the first is expanded


def write_html(explanation: Explanation, path: str | Path) -> Path:
    """Write the HTML page of an explanation to a file."""
    return write_atomically(Path(path), render_page(explanation))


def render_page(explanation: Explanation) -> str:
    """The HTML text of the page."""
    programs = group_stages(explanation.traces)
    body = make_element(
        "body",
        _make_toolbar(),
        make_element(
            "main", _make_overview(explanation), *_make_graphs(explanation, programs), id="top"
        ),
        make_element("div", class_="tooltip", role="status", hidden=True),
        make_json_script("data", build_payload(programs)),
        make_element("script", Markup("\n".join(map(_read_package_file, SCRIPTS)))),
    )
    title = f"fulgurite explain: {tables.format_headline(explanation)}"
    head = make_element(
        "head",
        make_element("meta", charset="utf-8"),
        make_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        make_element("meta", name="generator", content=f"fulgurite {VERSION}"),
        make_element("title", title),
        make_element("style", Markup(_read_package_file("page.css"))),
    )
    return f"<!doctype html>\n{make_element('html', head, body, lang='en')}\n"


def _read_package_file(name: str) -> str:
    return resources.files("fulgurite.report").joinpath(name).read_text(encoding="utf-8")


# ---- the top -------------------------------------------------------------------------------------


def _make_toolbar() -> Markup:
    search = make_element(
        "input",
        type="search",
        id="search",
        placeholder="Search every stage and node",
        aria_label="Search every stage and node",
        autocomplete="off",
        spellcheck="false",
    )
    return make_element(
        "header",
        make_element(
            "a", "fulgurite", make_element("span", "explain"), href="#top", class_="brand"
        ),
        make_element(
            "div",
            search,
            make_element("kbd", "/", title="press / to search"),
            make_element("div", id="found", hidden=True, aria_live="polite"),
            class_="search",
            role="search",
        ),
        make_element(
            "button", "auto", type="button", id="theme", title="light, dark or as the system"
        ),
        class_="top",
    )


def _make_overview(explanation: Explanation) -> Markup:
    breaks = explanation.breaks
    parts = [
        make_element("h1", tables.format_headline(explanation)),
        make_element("p", explanation.options, class_="options"),
        make_element("p", explanation.granularity, class_="quiet"),
        make_element(
            "noscript",
            make_element("p", "Stages and search need JavaScript; tables and pictures don't."),
        ),
    ]
    columns = [tables.make_graphs_table(explanation.graphs)] if explanation.graphs else []
    columns += [tables.make_times_table(explanation.times)] if explanation.times else []
    parts.append(make_element("div", *columns, class_="columns"))
    count = make_element("small", len(breaks)) if breaks else ""
    parts += [
        make_element("h2", "Graph breaks", count, id="breaks"),
        tables.make_breaks_list(breaks),
    ]
    printed = make_element("pre", str(explanation), class_="printed")
    parts.append(
        make_element("details", make_element("summary", "As fulgurite explain prints it"), printed)
    )
    return make_element("section", *parts, class_="overview")


# ---- one graph -----------------------------------------------------------------------------------


def _make_graphs(explanation: Explanation, programs: Sequence[StageHistory]) -> list[Markup]:
    executors = sorted({n for g in explanation.graphs for p in g.compiled_graphs for n in p.calls})
    few = len(explanation.graphs) <= MAX_OPEN_GRAPHS
    numbered = {(program.graph, program.kind): n for n, program in enumerate(programs)}
    sections = []
    for position, graph in enumerate(explanation.graphs):
        inner = [
            _make_program(
                summary,
                number := numbered[graph.index, summary.kind],
                programs[number],
                executors,
            )
            for summary in graph.compiled_graphs
        ]
        content = make_element("div", *_make_graph_numbers(graph, explanation.remat), *inner)
        summary = make_element("summary", _make_graph_title(graph))
        sections.append(
            make_element(
                "details",
                summary,
                content,
                class_="graph",
                id=f"graph-{graph.index}",
                open=few or position == 0,
            )
        )
    return sections


def _make_graph_title(graph: GraphSummary) -> Markup:
    return make_element(
        "h2",
        f"Graph {graph.index}",
        make_element("code", graph.where),
        make_element("span", f"compiled in {format_seconds(graph.seconds)}", class_="quiet"),
    )


def _make_graph_numbers(graph: GraphSummary, remat: str) -> list[Markup]:
    parts = []
    if graph.saved_bytes:
        parts.append(make_element("div", tables.make_saved_table(graph, remat), class_="columns"))
    if graph.decisions:
        parts.append(tables.make_decisions_table(graph.decisions))
    return parts


def _make_program(
    summary: CompiledGraphSummary, number: int, program: StageHistory, executors: Sequence[str]
) -> Markup:
    name = tables.program_anchor(program.graph, program.kind)
    calls = sum(summary.calls.values())
    return make_element(
        "section",
        make_element(
            "h3",
            program.kind.capitalize(),
            make_element("span", f"{summary.captured_ops} ops → {calls} calls", class_="quiet"),
        ),
        make_element(
            "div",
            tables.make_executors_table(summary, program.final, executors),
            tables.make_stages_table(program),
            class_="columns",
        ),
        tables.make_kernels_list(summary),
        make_element(
            "figure",
            make_element("div", class_="toolbar"),
            draw_trace(program.final, executors),
            class_="picture",
            aria_label=f"{program.kind} {program.graph} as a graph",
        ),
        _make_stages(program),
        class_="program",
        id=name,
        data_program=number,
    )


def _make_stages(program: StageHistory) -> Markup:
    """The container in which the page's script shows two stages; the selects work without it."""
    last = len(program.stages) - 1
    chosen = make_element(
        "div",
        _make_stage_select("from", program, max(last - 1, 0)),
        make_element("span", "→", class_="quiet", aria_hidden="true"),
        _make_stage_select("to", program, last),
        class_="toolbar",
    )
    return make_element("div", chosen, make_element("div", class_="panes"), class_="stages")


def _make_stage_select(name: str, program: StageHistory, selected: int) -> Markup:
    options = [
        make_element("option", stage.trace.stage, value=number, selected=number == selected)
        for number, stage in enumerate(program.stages)
    ]
    label = "compare stage" if name == "from" else "with stage"
    return make_element("select", *options, class_=name, aria_label=label)
