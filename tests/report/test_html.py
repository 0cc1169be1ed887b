"""The page: well-formed, self-contained, complete, and not to be broken by what a user wrote."""

from __future__ import annotations

import html
import importlib.util
import itertools
import os
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fulgurite
from fulgurite.capture.dynamo import GraphBreak
from fulgurite.explain import Explanation
from fulgurite.report import write_html
from fulgurite.report.html import render_page
from fulgurite.report.markup import Markup, escape_text, make_element, make_json_script
from fulgurite.report.stages import (
    TITLE_ID,
    Stage,
    group_stages,
    line_keys,
    match_lines,
    match_stages,
)
from fulgurite.report.tables import make_decisions_table
from fulgurite.trace.cost import format_seconds
from fulgurite.trace.decisions import Decision
from fulgurite.units import format_bytes
from tests.report.support import Element, Page, chain, chain_explanation
from tests.report.test_graph import count_calls

HOSTILE = """</script><script>alert(1)</script></title></svg><img src=x onerror=alert(2)>"'&lt;&"""


# ---- the file ------------------------------------------------------------------------------------


def test_written_whole_or_not_at_all(
    plain: Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_html(plain, tmp_path / "folder" / "page.html")
    assert path.read_text(encoding="utf-8") == render_page(plain)
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError("disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk is gone"):
        write_html(plain, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]


def test_page_is_well_formed_and_self_contained(explained: Explanation) -> None:
    written = render_page(explained)
    assert written.startswith("<!doctype html>")
    page = Page(written)
    everything = page.root.all()
    identities = [e.attributes["id"] for e in everything if "id" in e.attributes]
    assert len(identities) == len(set(identities))
    for found in everything:
        assert found.tag not in ("link", "img", "iframe", "object", "embed", "base", "image")
        assert "src" not in found.attributes
        target = found.attributes.get("href")
        assert target is None or target[1:] in identities, f"{target} leads nowhere"
        assert not any("://" in (value or "") for value in found.attributes.values())
    styles = "".join(e.text for e in page.root.all("style"))
    scripts = "".join(e.text for e in page.root.all("script") if "id" not in e.attributes)
    assert not re.search(r"url\(|@import|://", styles)
    assert not re.search(r"://|\bfetch\(|XMLHttpRequest|\bimport\b ?\(|\beval\(", scripts)
    assert "innerHTML" not in scripts


def test_every_stage_is_in_the_page_word_for_word(explained: Explanation) -> None:
    texts = Page(render_page(explained)).stage_texts()
    assert {trace.text for trace in explained.traces} == set(texts)
    assert (
        texts.count(explained.traces[0].text) == 2
    )  # captured: before forward and before backward


def test_page_shows_what_explain_prints(explained: Explanation) -> None:
    page = Page(render_page(explained))
    (printed,) = page.root.all("pre", class_="printed")
    assert printed.text == str(explained)
    cells = Counter(cell.text for cell in page.root.all("td"))
    for graph in explained.graphs:
        for program in graph.compiled_graphs:
            for number in (program.captured_ops, *program.calls.values()):
                assert cells[str(number)]
            assert cells[format_bytes(program.bytes_in)] and cells[format_bytes(program.bytes_out)]
            assert cells[format_seconds(program.seconds)]
            stages = [f"{1e3 * seconds:.1f}" for _, seconds in program.stages]
            assert all(cells[stage] for stage in stages)
    assert explained.times
    for name, seconds in explained.times.items():
        assert cells[format_seconds(seconds)] and name in page.root.text


def rows_under(page: Page, head: str) -> list[list[Element]]:
    for table in page.root.all("table"):
        if table.all("th")[0].text == head:
            return [row.all("th") + row.all("td") for row in table.all("tbody")[0].all("tr")]
    raise AssertionError(f"no table starts with {head}")


def test_bars_are_to_scale(plain: Explanation) -> None:
    saved = {"none": 4096, "mincut": 1024, "full": 0}
    graph = replace(plain.graphs[0], saved_bytes=saved)
    page = Page(render_page(replace(plain, graphs=[graph], remat="mincut")))
    rows = rows_under(page, "saved for backward")
    assert [[cell.text for cell in row] for row in rows] == [
        ["none", "4.0 KiB", ""],
        ["mincut", "1.0 KiB", ""],
        ["full", "0 B", ""],
    ]
    bars = [row[2].all("span")[1].attributes for row in rows]
    assert [bar["style"] for bar in bars] == ["width:100.0%", "width:25.0%", "width:0.0%"]
    assert [bar.get("class") for bar in bars] == [None, "accent", None]


def test_breaks_tell_reason_line_and_hint() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        if y.sum() > 100:
            y = y + 1
        return y.cos()

    compiled = fulgurite.compile(function)
    explanation = compiled.explain(torch.ones(3))
    (found,) = explanation.breaks
    page = Page(render_page(explanation))
    (shown,) = page.root.all("ol", class_="breaks")[0].all("li")
    assert shown.all("pre")[0].text == "if y.sum() > 100:"
    assert shown.all("div")[0].text == f"{found.file}:{found.line}"
    assert found.reason in shown.text and found.hint in shown.text
    assert "1 graph break," in page.root.all("h1")[0].text


# ---- escaping ------------------------------------------------------------------------------------


def load_source(tmp_path: Path, name: str, comment: str) -> ModuleType:
    path = tmp_path / f"{name}.py"
    path.write_text(f"def function(x):\n    y = x.sin()  # {comment}\n    return y.cos()\n")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape_of(page: Page) -> list[tuple[str, tuple[str, ...]]]:
    """The page's structure without its text."""
    return [(found.tag, tuple(found.attributes)) for found in page.root.all()]


def test_a_hostile_source_line_stays_text(tmp_path: Path) -> None:
    pages = []
    for name, comment in (("tame", "harmless"), ("wild", HOSTILE)):
        compiled = fulgurite.compile(load_source(tmp_path, name, comment).function)
        compiled(torch.ones(2))
        found = GraphBreak(comment, comment, str(tmp_path / f"{name}.py"), 2)
        explanation = replace(
            compiled.explain(), options=comment, granularity=comment, breaks=[found]
        )
        pages.append(Page(render_page(explanation)))
        assert comment in explanation.traces[-1].text
        assert pages[-1].stage_texts() == [trace.text for trace in explanation.traces]
        assert [e.text for e in pages[-1].root.all("p", class_="options")] == [comment]
        titles = [e.text for e in pages[-1].root.all("title")]
        assert any(f"y = x.sin()  # {comment}" in title for title in titles)
    tame, wild = pages
    assert shape_of(tame) == shape_of(wild)


def test_markup_escapes_what_is_not_markup() -> None:
    inner = make_element("b", "<&>")
    assert inner == "<b>&lt;&amp;&gt;</b>"
    made = make_element("p", inner, '"', class_='a"b', hidden=True, id=None, data_line=3)
    assert made == '<p class="a&quot;b" hidden data-line="3"><b>&lt;&amp;&gt;</b>&quot;</p>'
    assert escape_text(Markup("<i>")) == "<i>"
    assert escape_text("caf\udce9") == "caf?"  # a file name that isn't UTF-8


def test_data_cannot_end_its_script() -> None:
    hostile = {"</script>": ["<!--<script>", "\u2028&\udce9"]}
    script = make_json_script("data", hostile)
    assert not set("<>&") & set(
        script.removeprefix('<script type="application/json" id="data">')[:-9]
    )
    assert Page(f"<body>{script}</body>").data == hostile


# ---- stages --------------------------------------------------------------------------------------


def walk(before: Stage, after: Stage) -> list[tuple[int | None, int | None]]:
    """Rows of two stages as the page's script makes them: one walk, no search."""
    here, there = set(before.threads), set(after.threads)
    rows: list[tuple[int | None, int | None]] = []
    a = b = 0
    while a < len(before.lines) or b < len(after.lines):
        if a < len(before.lines) and before.threads[a] not in there:
            rows.append((a, None))
            a += 1
        elif b < len(after.lines) and after.threads[b] not in here:
            rows.append((None, b))
            b += 1
        else:
            assert before.threads[a] == after.threads[b], "threads lost their order"
            rows.append((a, b))
            a, b = a + 1, b + 1
    return rows


def test_any_two_stages_align(explained: Explanation) -> None:
    """The walk meets every line of both, and lines it pairs say the same thing about the same value."""
    for program in group_stages(explained.traces):
        for before, after in itertools.combinations_with_replacement(program.stages, 2):
            rows = walk(before, after)
            assert [a for a, _ in rows if a is not None] == list(range(len(before.lines)))
            assert [b for _, b in rows if b is not None] == list(range(len(after.lines)))
            keys = line_keys(before.lines), line_keys(after.lines)
            assert all(keys[0][a] == keys[1][b] for a, b in rows if None not in (a, b))


def test_counts_of_a_stage_are_those_of_its_rows(explained: Explanation) -> None:
    for program in group_stages(explained.traces):
        for before, after in itertools.pairwise(program.stages):
            rows = walk(before, after)
            added = sum(a is None for a, _ in rows)
            removed = sum(b is None for _, b in rows)
            changed = sum(
                before.lines[a] != after.lines[b]
                for a, b in rows
                if a is not None and b is not None and after.threads[b] != TITLE_ID
            )
            assert (after.added, after.removed, after.changed) == (added, removed, changed)


def test_a_stage_that_changes_nothing_says_so(plain: Explanation) -> None:
    """Between claimed and functional, lines get their executor: changed, never added or removed."""
    (forward, *_) = group_stages(plain.traces)
    by_name = {stage.trace.stage: stage for stage in forward.stages}
    folding = by_name["fold_constants"]
    assert (folding.added, folding.removed, folding.changed) == (0, 0, 0)
    claimed = by_name["claimed"]
    assert (claimed.added, claimed.removed) == (0, 0)
    assert claimed.changed == len(forward.final.ops) - sum(
        node.target.__name__ == "getitem" for node in forward.final.ops
    )


def test_an_op_put_between_two_others_is_one_added_line() -> None:
    before = chain(30)

    def insert(graph) -> None:
        node = next(n for n in graph.nodes if n.name == "add_tensor_12")
        with graph.inserting_after(node):
            new = graph.call_function(torch.ops.aten.neg.default, (node,))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    after = before.edit(insert)
    _, stage = match_stages([before, after])
    assert (stage.added, stage.removed) == (1, 0)
    uses = sum(len(n.users) for n in after.graph.nodes if n.name == "neg_default")
    assert 0 < stage.changed <= uses + 1


@pytest.mark.parametrize("seed", range(20))
def test_match_pairs_equal_keys_in_order(seed: int) -> None:
    chance = random.Random(seed)
    old = [f"v{chance.randrange(40)}" for _ in range(chance.randrange(60))]
    new = [key for key in old if chance.random() < 0.7]
    for _ in range(chance.randrange(10)):
        new.insert(chance.randint(0, len(new)), f"v{chance.randrange(40)}")
    pairs = match_lines(old, new)
    assert all(old[a] == new[b] for a, b in pairs)
    for (a, b), (next_a, next_b) in itertools.pairwise(pairs):
        assert a < next_a and b < next_b
    assert match_lines(old, old) == [(i, i) for i in range(len(old))]


def test_match_keeps_the_longest_common_order_of_values() -> None:
    old = ["a =", "b =", "c =", "d =", "e ="]
    assert match_lines(old, ["c =", "a =", "b =", "d =", "x =", "e ="]) == [
        (0, 1),
        (1, 2),
        (3, 3),
        (4, 5),
    ]


# ---- large ---------------------------------------------------------------------------------------


def test_a_large_trace_makes_a_page_of_bounded_size_and_work() -> None:
    """Page and work grow with the trace, not with its square; 2000 lines stay under 2.5 MB."""
    work, sizes = [], []
    for length in (400, 800):
        explanation = chain_explanation(length)
        assert all(trace.text for trace in explanation.traces)  # printing is not what is measured
        work.append(count_calls(render_page, explanation))
        sizes.append(len(render_page(explanation)))
    assert work[1] < 2.2 * work[0]
    assert sizes[1] < 2.2 * sizes[0]
    large = chain_explanation(2000)
    written = render_page(large)
    page = Page(written)
    assert len(large.traces[-1].text.splitlines()) > 2000
    assert len(written.encode()) < 2_500_000
    assert page.stage_texts()[-1] == large.traces[-1].text
    assert len(page.root.all("g", class_="node")) == 2001


def test_generated_kernels_are_listed_with_their_source() -> None:
    compiled: Any = fulgurite.compile(
        lambda x: torch.softmax(x, -1) * 2, executors=["fuser", "torch"]
    )
    compiled(torch.randn(4, 16))
    explanation = compiled.explain()
    page = render_page(explanation)
    (kernel,) = explanation.graphs[0].compiled_graphs[0].kernels
    assert kernel.name in page and str(kernel.kernel.schedule) in html.unescape(page)
    assert html.escape(kernel.kernel.source.splitlines()[-2].strip()) in page
    assert "fusion boundary" in page


# ---- regions that were timed ---------------------------------------------------------------------


def test_equal_regions_are_one_line() -> None:
    times = {"fuser": 2e-6, "torch": 31.8e-3}
    made = [Decision(f"silu_{k}", "fuser", times, k > 0) for k in range(3)]
    rows = [row.text for row in Page(make_decisions_table(made)).root.all("tr")]
    assert rows == ["regionfusertorchruns on", "silu_0 ×32.0 µs31.80 msfuser"]
    assert "3 regions compared, 3 on fuser" in make_decisions_table(made)
    assert "<details class=compared open>" not in make_decisions_table(made).replace('"', "")


def test_what_torch_got_back_is_open() -> None:
    made = [
        Decision("sum_0", "torch", {"fuser": 5e-6, "torch": 4e-6}, False),
        Decision("sin_0", "fuser", {"fuser": 5e-6, "inductor": 6e-6}, False),
    ]
    page = make_decisions_table(made)
    assert "2 regions compared, 1 on torch, 1 on fuser" in page
    assert [row.text for row in Page(page).root.all("tr")][1:] == [
        "sum_05.0 µs–4.0 µstorch",
        "sin_05.0 µs6.0 µs–fuser",
    ]
    assert page.replace('"', "").startswith("<details class=compared open")
