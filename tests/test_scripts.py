"""`scripts/gpu` without a GPU: a fake `python` prints its arguments."""

from __future__ import annotations

import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 $2 $4" in
-c*) exit 1 ;;
*fulgurite\\ mla) echo half >"${@: -1}" && exec sleep 20 ;;
*fulgurite*) echo "figures of $4" >"${@: -1}" ;;
*) echo "$*" && echo "FAILED tests/test_x.py::test_y - because" && exit 1 ;;
esac
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(FAKE_PYTHON)
    path.chmod(0o755)
    return path


def run(python: Path, folder: Path, *steps: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHON": str(python), **variables}
    command = [str(ROOT / "scripts" / "gpu"), str(folder), *steps]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert not done.stderr, done.stderr
    return done.stdout


def test_logs_and_results(python: Path, tmp_path: Path) -> None:
    """Failing tests are listed and the next step runs; without xdist, tests run one at a time."""
    output = run(python, tmp_path / "out", "rest", "moe:50")
    assert "rest: exit 1" in output and "test_y - because" in output and "moe: exit 0" in output
    log = (tmp_path / "out" / "rest.log").read_text()
    assert "-m gpu" in log and "tests/test_gpu.py" in log and " -n " not in log
    assert "tests/fuser" not in log  # has its own step
    assert (tmp_path / "out" / "moe.json").read_text() == "figures of moe\n"


def test_partial_results_survive_the_time_limit(python: Path, tmp_path: Path) -> None:
    output = run(python, tmp_path / "out", "mla:1")
    assert "mla: exit 124 after" in output
    assert (tmp_path / "out" / "mla.json").read_text() == "half\n"


def test_archive_of_finished_stages(python: Path, tmp_path: Path) -> None:
    """The archive holds finished steps; precompiling suites leave nothing and are not awaited."""
    start = time.monotonic()
    run(python, tmp_path / "out", "kernels", "moe", "quant", ARCHIVE="1", PRECOMPILE="quant mla")
    assert time.monotonic() - start < 19  # mla would take longer
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["done.tgz"]
    with tarfile.open(tmp_path / "out" / "done.tgz") as archive:
        names = {Path(name).name for name in archive.getnames()} - {"", "."}
    assert names == {"kernels.log", "moe.json", "moe.log", "quant.json", "quant.log"}


def test_total_time_limit(python: Path, tmp_path: Path) -> None:
    assert "moe: no time left" in run(python, tmp_path / "out", "moe", TIME_LIMIT="2")
