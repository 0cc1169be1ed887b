"""`scripts/gpu` without a GPU: a stand-in for Python tells what it was called with."""

from __future__ import annotations

import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAND_IN = """#!/usr/bin/env bash
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
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return path


def run(python: Path, folder: Path, *stages: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHON": str(python), **variables}
    command = [str(ROOT / "scripts" / "gpu"), str(folder), *stages]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert not done.stderr, done.stderr
    return done.stdout


def test_logs_and_figures(python: Path, tmp_path: Path) -> None:
    """Tests that fail are told, and the next stage runs; without xdist one test runs at a time."""
    told = run(python, tmp_path / "out", "rest", "moe:50")
    assert "rest: exit 1" in told and "test_y - because" in told and "moe: exit 0" in told
    log = (tmp_path / "out" / "rest.log").read_text()
    assert "-m gpu" in log and "tests/test_gpu.py" in log and " -n " not in log
    assert "tests/fuser" not in log  # a stage of its own
    assert (tmp_path / "out" / "moe.json").read_text() == "figures of moe\n"


def test_what_was_saved_before_the_limit(python: Path, tmp_path: Path) -> None:
    told = run(python, tmp_path / "out", "mla:1")
    assert "mla: exit 124 after" in told
    assert (tmp_path / "out" / "mla.json").read_text() == "half\n"


def test_one_archive(python: Path, tmp_path: Path) -> None:
    """Of what is done; suites that run ahead of their turn leave nothing, and are not waited for."""
    begun = time.monotonic()
    run(python, tmp_path / "out", "kernels", "moe", "quant", PACK="1", AHEAD="quant mla")
    assert time.monotonic() - begun < 19  # mla would take longer
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["done.tgz"]
    with tarfile.open(tmp_path / "out" / "done.tgz") as archive:
        names = {Path(name).name for name in archive.getnames()} - {"", "."}
    assert names == {"kernels.log", "moe.json", "moe.log", "quant.json", "quant.log"}


def test_a_limit_for_all(python: Path, tmp_path: Path) -> None:
    assert "moe: no time left" in run(python, tmp_path / "out", "moe", TOTAL="2")
