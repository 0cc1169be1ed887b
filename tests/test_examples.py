"""Each example runs, as its first lines say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forked import run_program

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("[0-9]*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    assert f"python examples/{path.name}" in path.read_text()
    done = run_program(path, os.environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "def forward(" in done.stdout
