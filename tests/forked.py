"""Runs pytest and Python programs in processes of their own that have imported torch already.

Tests of Triton kernels need another process: TRITON_INTERPRET is read when kernels are imported. So do
tests of what happens when Fulgurite is imported. A fresh process imports torch, TorchDynamo, Triton and
pytest's plugins for about 5 s. Here one server per kind of process imports them once, and forks a
process for each run, which gets the environment of the call. A forked pytest imports test modules and
conftest files, a forked program also imports Fulgurite.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent
PRELOADED = {
    "program": ("torch._dynamo", "torch._inductor.compile_fx", "torch.profiler"),
    "pytest": (
        "tests.garbage",
        *("torch._dynamo", "torch.profiler", "triton", "hypothesis", "pytest"),
        *(
            "fulgurite.compile",
            "fulgurite.kernels.moe.ops",
            "fulgurite.plan.kv_cache",
            "tests.ranks",
        ),
    ),
}


@dataclass(frozen=True)
class Outcome:
    returncode: int  # the process's, or the negative number of the signal that ended it
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_pytest(*arguments: str, **variables: str) -> Outcome:
    """Run `pytest ARGUMENTS` with these environment variables added to those of this process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return _request("pytest", environment, list(arguments), cwd=ROOT)


def run_program(
    program: Path | str, environment: Mapping[str, str], *, cwd: Path | None = None
) -> Outcome:
    """Run a file, or the text of a program, as `python FILE` or `python -c TEXT` would."""
    is_file = isinstance(program, Path)
    arguments = [str(program.resolve()) if is_file else "-c", "" if is_file else program]
    return _request("program", {**environment}, arguments, cwd=cwd or Path.cwd())


def _request(kind: str, environment: dict[str, str], arguments: list[Any], *, cwd: Path) -> Outcome:
    server = _start_server(kind, environment.get("TRITON_INTERPRET") == "1")
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="fulgurite-tests-") as folder:
        request = {"arguments": arguments, "environment": environment, "cwd": str(cwd)}
        server.stdin.write(json.dumps({**request, "folder": folder}) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the server of forked processes ended with status {server.wait()}"
        texts = [Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr")]
        return Outcome(int(answer), *texts)


@functools.cache
def _start_server(kind: str, is_interpreted: bool) -> subprocess.Popen[str]:
    """A server lives until this process ends and its standard input closes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # one thread, so that it can fork
    environment.pop("TRITON_INTERPRET", None)
    if is_interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.forked", kind]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def main(kind: str) -> None:
    """The server: one request per line on standard input, one status per line on standard output."""
    for name in PRELOADED[kind]:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    run = {"pytest": _run_pytest, "program": _run_program}[kind]
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _prepare(request)
            run(request["arguments"])
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _prepare(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    folder = Path(request["folder"])
    with (
        open(os.devnull, "rb") as nothing,
        open(folder / "stdout", "wb") as stdout,
        open(folder / "stderr", "wb") as stderr,
    ):
        for target, source in enumerate((nothing, stdout, stderr)):
            os.dup2(source.fileno(), target)


def _run_pytest(arguments: list[str]) -> NoReturn:
    """Run the tests, and end without freeing every object: that took 1.3 s, more than most runs."""
    import pytest

    gc.freeze()  # collections don't copy the pages of the server's objects
    unused = ("cacheprovider", "schemathesis", "anyio", "platformdirs")
    plugins = [word for name in unused for word in ("-p", f"no:{name}")]
    status = int(pytest.main([*plugins, *arguments]))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_program(arguments: list[str]) -> NoReturn:
    file, text = arguments
    sys.argv = [file]
    if text:
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(file)
        runpy.run_path(file, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    main(sys.argv[1])
