"""The page: what `fulgurite explain` prints, every stage beside the one before, the graph as a picture.

In: an `Explanation`. Out: one HTML file, written whole or not at all, that needs neither network nor other files.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fulgurite.explain import Explanation, GraphSummary, ProgramSummary
from fulgurite.report import tables
from fulgurite.report.graph import draw
from fulgurite.report.markup import Markup, element, json_script
from fulgurite.report.stages import Program, payload, programs_of
from fulgurite.trace.cost import seconds_text
from fulgurite.trace.text import write_text
from fulgurite.version import VERSION

SCRIPTS = ("shared.js", "stages.js", "picture.js", "page.js")  # one script, in this order
OPEN_GRAPHS = 4  # with more graphs than this, only the first is unfolded


def write_html(explanation: Explanation, path: str | Path) -> Path:
    """Write the page of an explanation to a file."""
    return write_text(Path(path), render_page(explanation))


def render_page(explanation: Explanation) -> str:
    """The page as text."""
    programs = programs_of(explanation.traces)
    body = element(
        "body",
        _bar(),
        element("main", _overview(explanation), *_graphs(explanation, programs), id="top"),
        element("div", class_="tooltip", role="status", hidden=True),
        json_script("data", payload(programs)),
        element("script", Markup("\n".join(map(_package_file, SCRIPTS)))),
    )
    title = f"fulgurite explain: {tables.headline(explanation)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=f"fulgurite {VERSION}"),
        element("title", title),
        element("style", Markup(_package_file("page.css"))),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _package_file(name: str) -> str:
    return resources.files("fulgurite.report").joinpath(name).read_text(encoding="utf-8")


# ---- the top -------------------------------------------------------------------------------------


def _bar() -> Markup:
    search = element(
        "input",
        type="search",
        id="search",
        placeholder="Search every stage and node",
        aria_label="Search every stage and node",
        autocomplete="off",
        spellcheck="false",
    )
    return element(
        "header",
        element("a", "fulgurite", element("span", "explain"), href="#top", class_="brand"),
        element(
            "div",
            search,
            element("kbd", "/", title="press / to search"),
            element("div", id="found", hidden=True, aria_live="polite"),
            class_="search",
            role="search",
        ),
        element("button", "auto", type="button", id="theme", title="light, dark or as the system"),
        class_="top",
    )


def _overview(explanation: Explanation) -> Markup:
    breaks = explanation.breaks
    parts = [
        element("h1", tables.headline(explanation)),
        element("p", explanation.options, class_="options"),
        element("p", explanation.regions, class_="quiet"),
        element(
            "noscript",
            element("p", "Stages and search need JavaScript; tables and pictures don't."),
        ),
    ]
    columns = [tables.graphs_table(explanation.graphs)] if explanation.graphs else []
    columns += [tables.times_table(explanation.times)] if explanation.times else []
    parts.append(element("div", *columns, class_="columns"))
    count = element("small", len(breaks)) if breaks else ""
    parts += [element("h2", "Graph breaks", count, id="breaks"), tables.breaks_list(breaks)]
    printed = element("pre", str(explanation), class_="printed")
    parts.append(element("details", element("summary", "As fulgurite explain prints it"), printed))
    return element("section", *parts, class_="overview")


# ---- one graph -----------------------------------------------------------------------------------


def _graphs(explanation: Explanation, programs: Sequence[Program]) -> list[Markup]:
    executors = sorted({n for g in explanation.graphs for p in g.programs for n in p.calls})
    few = len(explanation.graphs) <= OPEN_GRAPHS
    numbered = {(program.graph, program.kind): n for n, program in enumerate(programs)}
    sections = []
    for position, graph in enumerate(explanation.graphs):
        inner = [
            _program(
                summary,
                number := numbered[graph.index, summary.kind],
                programs[number],
                executors,
            )
            for summary in graph.programs
        ]
        content = element("div", *_graph_numbers(graph, explanation.remat), *inner)
        summary = element("summary", _graph_title(graph))
        sections.append(
            element(
                "details",
                summary,
                content,
                class_="graph",
                id=f"graph-{graph.index}",
                open=few or position == 0,
            )
        )
    return sections


def _graph_title(graph: GraphSummary) -> Markup:
    return element(
        "h2",
        f"Graph {graph.index}",
        element("code", graph.where),
        element("span", f"compiled in {seconds_text(graph.seconds)}", class_="quiet"),
    )


def _graph_numbers(graph: GraphSummary, remat: str) -> list[Markup]:
    parts = []
    if graph.saved_bytes:
        parts.append(element("div", tables.saved_table(graph, remat), class_="columns"))
    if graph.decisions:
        parts.append(tables.decisions_table(graph.decisions))
    return parts


def _program(
    summary: ProgramSummary, number: int, program: Program, executors: Sequence[str]
) -> Markup:
    name = tables.anchor(program.graph, program.kind)
    calls = sum(summary.calls.values())
    return element(
        "section",
        element(
            "h3",
            program.kind.capitalize(),
            element("span", f"{summary.captured_ops} ops → {calls} calls", class_="quiet"),
        ),
        element(
            "div",
            tables.executors_table(summary, program.final, executors),
            tables.stages_table(program),
            class_="columns",
        ),
        tables.kernels_list(summary),
        element(
            "figure",
            element("div", class_="toolbar"),
            draw(program.final, executors),
            class_="picture",
            aria_label=f"{program.kind} {program.graph} as a graph",
        ),
        _stages(program),
        class_="program",
        id=name,
        data_program=number,
    )


def _stages(program: Program) -> Markup:
    """The frame in which the page's script shows two stages; the choice is there without it."""
    last = len(program.stages) - 1
    chosen = element(
        "div",
        _stage_choice("from", program, max(last - 1, 0)),
        element("span", "→", class_="quiet", aria_hidden="true"),
        _stage_choice("to", program, last),
        class_="toolbar",
    )
    return element("div", chosen, element("div", class_="panes"), class_="stages")


def _stage_choice(name: str, program: Program, selected: int) -> Markup:
    options = [
        element("option", stage.trace.stage, value=number, selected=number == selected)
        for number, stage in enumerate(program.stages)
    ]
    label = "compare stage" if name == "from" else "with stage"
    return element("select", *options, class_=name, aria_label=label)
