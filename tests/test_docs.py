"""The pages: links lead somewhere, Python blocks run in order, printed output is what they print.

A block of Python runs unless the line before it is `<!-- not run: REASON -->`. A block after `<!-- output -->` is
compared with what the page's blocks printed since the last one; times may differ.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from collections import Counter
from pathlib import Path

import pytest

from fulgurite.kernels import registry

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*?) -->\n+)?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```", re.S | re.M
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
TIME = re.compile(r"\d+(?:\.\d+)? (?:ns|µs|ms|s)\b")
OUTPUT = "output"


def without_blocks(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text))


def comparable(text: str) -> list[str]:
    """Lines without times, file folders and trailing blanks."""
    text = TIME.sub("TIME", text)
    return [
        " ".join(re.sub(r"\S*/model\.py", "model.py", line).split())
        for line in text.strip().splitlines()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(without_blocks(page.read_text())):
        if not re.match(r"https?://|mailto:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_fallbacks", Counter())  # a process records a limited number
    file = str(tmp_path / "model.py")
    namespace: dict[str, object] = {"__name__": "docs_page"}
    printed = io.StringIO()
    for match in BLOCK.finditer(page.read_text()):
        mark, text = match["mark"] or "", match["text"]
        line = page.read_text()[: match.start("text")].count("\n") + 1
        if mark == OUTPUT:
            assert comparable(text) == comparable(printed.getvalue()), f"{page.name}:{line}"
            printed = io.StringIO()
        elif match["language"] == "python" and not mark.startswith("not run"):
            Path(file).write_text(text)
            linecache.checkcache(file)
            with contextlib.redirect_stdout(printed):
                exec(compile(text, file, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_at_most_100_columns(page):
    for number, line in enumerate(without_blocks(page.read_text()).splitlines(), 1):
        is_table_or_link = line.startswith("|") or "](" in line
        assert len(line) <= 100 or is_table_or_link, (
            f"{page.name}, line {number} without blocks: {line}"
        )


def test_a_wrong_output_is_found():
    assert comparable("a 1.0 ms\nb") == comparable("a 2.5 ms\nb\n")
    assert comparable("a 1.0 ms\nb") != comparable("a 1.0 ms\nc")
