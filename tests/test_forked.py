"""pytest and programs run in forked processes: their status, output and environment."""

from __future__ import annotations

import os
from pathlib import Path

from tests.forked import run_program, run_pytest

FILE = """
import os, sys

def test_environment():
    assert os.environ["A_VARIABLE"] == "a value"
    assert os.environ.get("TRITON_INTERPRET") == os.environ["EXPECTED"]

def test_kernels_are_interpreted():
    import triton
    assert triton.knobs.runtime.interpret == (os.environ["EXPECTED"] == "1")

def test_exit():
    if os.environ["A_VARIABLE"] == "killed":
        os.kill(os.getpid(), 9)
"""


def test_status_output_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "test_file.py"
    file.write_text(FILE)
    for value in ("1", "0"):
        done = run_pytest(str(file), TRITON_INTERPRET=value, EXPECTED=value, A_VARIABLE="a value")
        assert done.returncode == 0 and "3 passed" in done.output, done.output
    failed = run_pytest(str(file), TRITON_INTERPRET="1", EXPECTED="1", A_VARIABLE="another")
    assert failed.returncode == 1 and "1 failed, 2 passed" in failed.output, failed.output
    killed = run_pytest(
        str(file), "-k", "exit", TRITON_INTERPRET="1", EXPECTED="1", A_VARIABLE="killed"
    )
    assert killed.returncode == -9
    assert "A_VARIABLE" not in os.environ


def test_programs(tmp_path: Path) -> None:
    """A program imports Fulgurite itself, and ends as in a process of its own."""
    program = "import os, sys; print(os.getcwd(), 'fulgurite' in sys.modules, __name__, sys.argv)"
    done = run_program(program, {"PATH": ""}, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.split() == [str(tmp_path), "False", "__main__", "['-c']"]
    file = tmp_path / "program.py"
    file.write_text(
        "import os, sys, neighbour\nprint(os.environ, sys.argv)\nsys.exit(neighbour.STATUS)"
    )
    (tmp_path / "neighbour.py").write_text("STATUS = 7")
    done = run_program(file, {"ONLY": "this"})
    assert done.returncode == 7 and done.stdout.split("environ")[1].startswith("({'ONLY': 'this'}")
    assert str([str(file)]) in done.stdout
    failed = run_program("raise ValueError('mine')", {})
    assert failed.returncode == 1 and failed.stderr.endswith("ValueError: mine\n")
