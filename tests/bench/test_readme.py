"""`fulgurite bench report`: the newest file of every suite, with the suite's own tables and notes."""

from __future__ import annotations

import json
from pathlib import Path

from fulgurite.bench.readme import find_newest_results, format_readme, format_zoo_page
from fulgurite.cli import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {
    "date": "2026-01-02",
    "torch": "2.13.0",
    "processor": "a processor",
    "threads": 2,
    "command": "fulgurite bench compile",
}


def save(folder: Path, date: str, call_us: float) -> None:
    rows = [{"case": "eager", "call_us": call_us}]
    content = {"machine": {**MACHINE, "date": date}, "rows": rows}
    (folder / f"{date}-compile-cpu.json").write_text(json.dumps(content))


def test_only_the_newest_run_of_a_suite_is_shown(tmp_path):
    save(tmp_path, "2026-01-02", 11.0)
    save(tmp_path, "2026-01-10", 22.0)
    (tmp_path / "2026-01-11-unknown-cpu.json").write_text("{}")
    (result,) = find_newest_results(tmp_path)
    assert result.machine["date"] == "2026-01-10"
    text = format_readme(tmp_path)
    assert "22.0 µs" in text and "11.0 µs" not in text


def test_notes_follow_the_tables(tmp_path, capsys):
    save(tmp_path, "2026-01-02", 11.0)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "compile.md").write_text("What was tried.\n")
    assert main(["bench", "report", "--output", str(tmp_path)]) == 0
    assert "README.md" in capsys.readouterr().out
    text = (tmp_path / "README.md").read_text()
    assert text.index("11.0 µs") < text.index("What was tried.")


def test_a_missing_folder_is_an_error(tmp_path, capsys):
    assert main(["bench", "report", "--output", str(tmp_path / "none")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_the_committed_page_is_up_to_date():
    found = (BENCHMARKS / "README.md").read_text()
    assert found == format_readme(BENCHMARKS), "run `fulgurite bench report`"


def test_the_page_of_the_model_zoo_is_up_to_date():
    found = (BENCHMARKS.parent / "docs" / "zoo.md").read_text()
    assert found == format_zoo_page(BENCHMARKS), "run `fulgurite bench report`"
