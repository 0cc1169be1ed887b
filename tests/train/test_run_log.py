"""Where warnings of a run go: before it has a folder, and after."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fulgurite.logs import LOG
from fulgurite.train.data.records import BadSamples
from fulgurite.train.run_log import RunLog


def test_what_is_skipped_before_the_folder_is_there_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = BadSamples(10)
    with RunLog(is_first=True) as log:
        bad.skip("a.jsonl:2", "not JSON")
        bad.report()
        log.open(tmp_path / "log.txt")
        bad.skip("a.jsonl:7", "not JSON")
        bad.report()
        bad.report()
    LOG.warning("after the run")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert "INFO skipped a sample: a.jsonl:2: not JSON" in lines[0]
    assert len(lines) == 5 and "after the run" not in lines[-1]
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        "warning: 1 sample is skipped, for example a.jsonl:2: not JSON",
        "warning: 2 samples are skipped, for example a.jsonl:2: not JSON; a.jsonl:7: not JSON",
    ]


def test_other_handlers_and_levels_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    level = LOG.level
    try:
        LOG.setLevel(logging.WARNING)
        with RunLog(is_first=True) as log:
            log.open(tmp_path / "log.txt")
            BadSamples(9).skip("a:1", "bad")
        BadSamples(9).skip("a:2", "bad")
        assert seen == [] and LOG.level == logging.WARNING and handler.level == logging.NOTSET
    finally:
        LOG.setLevel(level)
        LOG.removeHandler(handler)
    assert "a:1" in (tmp_path / "log.txt").read_text()


def test_ranks_after_the_first_one_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = BadSamples(9, count=3)
    with RunLog(is_first=False) as log:
        bad.report()
        log.open(tmp_path / "log.txt")
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().err
