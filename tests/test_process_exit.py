"""Programs end with the output, the status and the `atexit` functions of `sys.exit`, and no more."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fulgurite"
# Programs that import no torch in the process that ends, or are run by hand for a benchmark.
OTHER_PROGRAMS = {
    "bench/generate/engines.py",
    "bench/serve/engine_main.py",
    "fuser/runtime/compile_worker.py",
    "models/chat_template.py",
}
PROGRAM = """
import atexit, ctypes, sys, threading, time
from fulgurite.process_exit import run_program

class Module:
    def __del__(self):
        print("freed")

module = Module()
module.itself = module
atexit.register(print, "atexit")

def work():
    time.sleep(0.05)
    print("thread")

def main():
    print("main")
    ctypes.CDLL(None).printf(b"library\\n")
    threading.Thread(target=work).start()
    if sys.argv[1] == "raise":
        raise ValueError("of main")
    return int(sys.argv[1])

run_program(main)
"""


def run(argument: str, **streams: int) -> subprocess.CompletedProcess[str]:
    options = {"stdout": subprocess.PIPE} | streams
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, argument],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "PYTHONUNBUFFERED": ""},
        **options,  # type: ignore[call-overload, no-any-return]
    )


@pytest.mark.parametrize("status", [0, 3])
def test_what_a_program_does_at_its_end(status: int) -> None:
    done = run(str(status))
    assert done.stdout.split() == ["main", "thread", "atexit", "library"]
    assert done.returncode == status


def test_an_exception_of_main() -> None:
    done = run("raise")
    assert done.returncode == 1 and "ValueError: of main" in done.stderr
    assert {*done.stdout.split()} >= {"main", "thread", "atexit"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_output_that_can_not_be_written() -> None:
    with open("/dev/full", "w") as full:
        done = run("0", stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr == "the output can't be written: No space left on device\n"


def test_a_reader_that_has_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run("0", stdout=writer)
    os.close(writer)
    assert done.returncode == 1 and not done.stderr


def test_processes_of_the_package_end_without_freeing_modules() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                calls = [ast.unparse(one) for one in node.body]
                if calls not in (["run_program(main)"], ["run()"]):
                    found.add(str(path.relative_to(PACKAGE)))
    assert found == OTHER_PROGRAMS
