"""Runs pytest in a process of its own that has imported torch already.

Tests of Triton kernels need another process: TRITON_INTERPRET is read when kernels are imported. A
fresh one imports torch, TorchDynamo, Triton and pytest's plugins for about 5 s. Here one server per
setting of TRITON_INTERPRET imports them once, and forks a process for each run. Test modules and
conftest files are imported in the forked process, with the environment of the call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PRELOADED = (
    *("torch._dynamo", "torch.profiler", "triton", "hypothesis", "fulgurite.compile", "pytest"),
)


@dataclass(frozen=True)
class Outcome:
    returncode: int  # pytest's, or the negative number of the signal that ended the process
    output: str  # stdout and stderr


def run_pytest(*arguments: str, **variables: str) -> Outcome:
    """Run `pytest ARGUMENTS` with these environment variables added to those of this process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    server = _start_server(environment.get("TRITON_INTERPRET") == "1")
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="fulgurite-tests-") as folder:
        output = Path(folder) / "output.txt"
        request = {"arguments": arguments, "environment": environment, "output": str(output)}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the server of forked pytest runs ended with status {server.wait()}"
        return Outcome(int(answer), output.read_text(errors="replace"))


@functools.cache
def _start_server(is_interpreted: bool) -> subprocess.Popen[str]:
    """A server lives until this process ends and its standard input closes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # one thread, so that it can fork
    environment.pop("TRITON_INTERPRET", None)
    if is_interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.forked_pytest"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def main() -> None:
    """The server: one request per line on standard input, one status per line on standard output."""
    for name in PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            sys.exit(_run(**request))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(arguments: list[str], environment: dict[str, str], output: str) -> int:
    import pytest

    os.environ.clear()
    os.environ.update(environment)
    with open(output, "wb") as target, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
    return int(pytest.main(["-p", "no:cacheprovider", "-p", "no:schemathesis", *arguments]))


if __name__ == "__main__":
    main()
