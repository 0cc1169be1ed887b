"""Idle streams: the row, its table, and limits."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from fulgurite import cli
from fulgurite.bench.serve.idle import format_idle_streams
from fulgurite.bench.serve.tables import format_tables


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    command = f"bench serve --device cpu --idle-streams 70 --output {path}"
    assert cli.main(command.split()) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["idle_streams"] == 70 and row["load"] == "70 streams"
    assert 20 << 20 < row["resident_bytes"] < 400 << 20
    assert row["resident_bytes_with_streams"] < row["resident_bytes"] + (100 << 20)
    text = capsys.readouterr().out
    assert "idle streams" in text and "resident memory of the HTTP process" in text


def test_the_table() -> None:
    row = {
        "group": "mock engine · idle streams", "idle_streams": 1000, "ready_s": 1.25,
        "resident_bytes": 100 << 20, "resident_bytes_with_streams": 150 << 20,
    }  # fmt: skip
    assert format_tables([row]) == format_idle_streams([row])
    line = format_tables([row]).splitlines()[2]
    assert line.split() == "1,000 100.0 MiB 150.0 MiB 51.2 KiB 1.2 s".split()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--idle-streams 0", "must be 1 or more"),
        ("--idle-streams 5 --routing", "give it alone"),
        (f"--idle-streams {1 << 40}", "open files"),
    ],
)
def test_arguments_that_are_refused(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if says == "open files" and hard == resource.RLIM_INFINITY:
        pytest.skip("this system has no limit")
    assert cli.main(["bench", "serve", "--device", "cpu", *arguments.split()]) == 1
    assert says in capsys.readouterr().err
