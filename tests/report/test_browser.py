"""The page in a real browser, where there is one: what its script makes of the data."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fulgurite.explain import Explanation
from fulgurite.report.html import render_page
from fulgurite.report.stages import group_stages
from tests.report.support import Page
from tests.report.test_html import walk

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--virtual-time-budget=8000",
    "--dump-dom",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]


def after_running(page: str, script: str, folder: Path) -> Page:
    """The page's tree once the script has run at its end."""
    assert CHROMIUM is not None
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Page(done.stdout)


def report(expression: str) -> str:
    """A script that leaves a value in the page, as JSON."""
    return f"""
      const result = document.createElement("pre");
      result.id = "result";
      try {{ result.textContent = JSON.stringify({expression}); }}
      catch (error) {{ result.textContent = JSON.stringify(String(error)); }}
      document.body.append(result);
    """


def result_of(page: Page) -> object:
    (found,) = [e for e in page.root.all("pre") if e.attributes.get("id") == "result"]
    return json.loads(found.text)


def test_rows_of_any_two_stages(explained: Explanation, tmp_path: Path) -> None:
    """The script's comparison of every pair of stages is the one this file's Python makes."""
    script = report(
        "data.programs.map((p) => p.stages.flatMap((before, i) => p.stages.slice(i).map((after) =>"
        " compare(before, after).map(({ a, b }) => [a ?? null, b ?? null]))))"
    )
    seen = result_of(after_running(render_page(explained), script, tmp_path))
    expected = [
        [
            [list(row) for row in walk(before, after)[:-1]]  # the empty line after the last newline
            for before, after in itertools.combinations_with_replacement(program.stages, 2)
        ]
        for program in group_stages(explained.traces)
    ]
    assert seen == expected


def test_a_pane_shows_its_stage_word_for_word(explained: Explanation, tmp_path: Path) -> None:
    script = report(
        "(() => { const v = page.viewers[0]; v.lines = 'all'; v.layout = 'beside'; v.show();"
        " return all('.pane', v.panes).map((pane) => all('.line:not(.blank) > span', pane)"
        ".map((line) => line.textContent)); })()"
    )
    seen = result_of(after_running(render_page(explained), script, tmp_path))
    stages = group_stages(explained.traces)[0].stages
    assert seen == [stages[-2].lines[:-1], stages[-1].lines[:-1]]


def test_search_marks_lines_and_nodes(explained: Explanation, tmp_path: Path) -> None:
    script = report(
        "(() => { search.value = 'ADDMM'; runSearch();"
        " return [[...page.hits].map((n) => data.lines[n]),"
        " page.pictures[0].ops.nodes.filter((n) => n.classList.contains('found')).length]; })()"
    )
    lines, nodes = result_of(after_running(render_page(explained), script, tmp_path))
    texts = {line for trace in explained.traces for line in trace.text.split("\n")}
    assert sorted(lines) == sorted(line for line in texts if "addmm" in line.lower())
    assert lines
    final = group_stages(explained.traces)[0].final
    reads_or_is = [
        node
        for node in final.ops
        if "addmm" in str(node.target) or any("addmm" in s.name for s in node.all_input_nodes)
    ]
    assert nodes >= sum("addmm" in str(node.target) for node in final.ops) > 0
    assert nodes <= len(reads_or_is)
