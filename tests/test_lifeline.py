"""Child processes end with their parent, in whatever state they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fulgurite.lifeline import BoundProcess
from tests.waiting import wait_for

# Starts one child as a command and one through a fork server, and forks one of its own; prints their pids.
PARENT = """
import multiprocessing, os, signal, sys, time
from fulgurite.lifeline import BoundProcess, Lifeline

CHILD = {
    "sleeps": "import time; time.sleep(600)",
    "holds the GIL": "9**9**9",
    "is stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "ignores signals": "import signal, time\\n"
    "for one in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(one, signal.SIG_IGN)\\n"
    "time.sleep(600)",
}

def run(child_end, code):
    exec(code)

if __name__ == "__main__":
    code = CHILD[sys.argv[1]]
    bound = BoundProcess([sys.executable, "-c", code])
    lifeline = Lifeline()
    served = multiprocessing.get_context("forkserver").Process(target=run, args=(lifeline.child_end, code))
    served.start()
    lifeline.attach(served.pid)
    forked = os.fork()
    if not forked:
        os.close(1)
        time.sleep(600)
    print(bound.pid, served.pid, forked, flush=True)
    time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    """Also if nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("state", ["sleeps", "holds the GIL", "is stopped", "ignores signals"])
def test_children_of_a_killed_process(tmp_path: Path, state: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen(
        [sys.executable, str(script), state], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    bound, served, forked = map(int, parent.stdout.readline().split())
    try:
        assert not any(map(has_ended, (bound, served, forked)))
        parent.kill()
        parent.wait()
        wait_for(lambda: has_ended(bound) and has_ended(served), 10.0)
        assert not has_ended(forked)
    finally:
        for pid in (forked, bound, served):
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
        parent.stdout.close()


# Is killed before it can attach the child that its fork server starts; prints the pid of that one.
KILLED_PARENT = """
import multiprocessing, pathlib, sys, time
from fulgurite.lifeline import Lifeline, bind

def run(child_end, is_late, mark):
    while is_late and not mark.exists():
        time.sleep(0.01)
    bind(child_end)
    time.sleep(600)

if __name__ == "__main__":
    lifeline = Lifeline()
    arguments = (lifeline.child_end, sys.argv[1] == "late", pathlib.Path(sys.argv[2]))
    served = multiprocessing.get_context("forkserver").Process(target=run, args=arguments)
    served.start()
    lifeline.child_end.close()
    print(served.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel sends such signals on Linux")
@pytest.mark.parametrize("moment", ["early", "late"])
def test_a_child_that_starts_after_its_parent_was_killed(tmp_path: Path, moment: str) -> None:
    script, mark = tmp_path / "parent.py", tmp_path / "mark"
    script.write_text(KILLED_PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), moment, str(mark)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        assert moment == "early" or not has_ended(child)
        mark.touch()
        wait_for(lambda: has_ended(child), 10.0)
    finally:
        if not has_ended(child):
            os.kill(child, signal.SIGKILL)


def test_a_child_outlives_the_thread_that_started_it() -> None:
    found: list[BoundProcess] = []
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    thread = threading.Thread(
        target=lambda: found.append(BoundProcess(command, stdin=subprocess.PIPE))
    )
    thread.start()
    thread.join()
    process = found[0]
    assert process.stdin is not None and process.poll() is None
    process.stdin.close()
    assert process.wait(30) == 0
