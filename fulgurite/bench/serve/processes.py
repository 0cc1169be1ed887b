"""Servers that the suite starts: `fulgurite serve`, and llama.cpp's `llama-server`.

In: a command line. Out: the address of a server that is ready, and the CPU seconds of its processes. It is
stopped at the end of the `with` block, with all processes that it started.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from fulgurite.bench.serve.http_client import Address
from fulgurite.bench.serve.load import get, run_coroutine
from fulgurite.errors import ArgumentError, FulguriteError

HOST = "127.0.0.1"
START_SECONDS = 600.0  # a cold cache compiles kernels first
STOP_SECONDS = 20.0
TICKS = os.sysconf("SC_CLK_TCK")


class ServerError(FulguriteError):
    """A server ended or did not become ready. `where` has the end of its output."""


@dataclass(frozen=True)
class Server:
    """A running server. `pid` is None if somebody else started it."""

    address: Address
    pid: int | None = None

    def cpu_seconds(self) -> float | None:
        """Of the process and its descendants so far."""
        return None if self.pid is None else read_cpu_seconds(self.pid)


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def fulgurite_command(port: int, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "fulgurite", "serve", "--port", str(port), *arguments]


def llama_command(
    binary: Path, model: Path, port: int, threads: int, parallel: int, context: int
) -> list[str]:
    """`llama-server` with continuous batching: `parallel` slots of `context` tokens each."""
    return [
        str(binary), "--model", str(model), "--host", HOST, "--port", str(port),
        "--threads", str(threads), "--threads-batch", str(threads),
        "--parallel", str(parallel), "--ctx-size", str(parallel * context), "--cont-batching",
    ]  # fmt: skip


def find_llama_server(path: str | None) -> Path:
    """The binary of `--llama-cpp PATH`, of LLAMA_SERVER, or on the PATH."""
    name = path or os.environ.get("LLAMA_SERVER") or "llama-server"
    found = shutil.which(name)
    if found is None:
        raise ArgumentError(
            f"there is no program {name}",
            next="build llama-server, and give --llama-cpp PATH or set LLAMA_SERVER",
        )
    return Path(found)


def thread_environment(threads: int | None) -> dict[str, str]:
    """The environment of a process with this many threads; None: its own default."""
    if threads is None:
        return dict(os.environ)
    return {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "FULGURITE_NUM_THREADS"), str(threads)),
    }


@contextmanager
def run_server(command: Sequence[str], port: int, threads: int | None = None) -> Iterator[Server]:
    """Start a server and wait until `/health` is 200."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=thread_environment(threads),
            start_new_session=True,  # ctrl-C ends the benchmark first, which then stops the server
        )
        try:
            address = Address(HOST, port)
            deadline = time.monotonic() + START_SECONDS
            while not is_ready(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(_describe_failure(process, command), where=_read_end(output))
                time.sleep(0.1)
            yield Server(address, process.pid)
        finally:
            stop(process)


def _describe_failure(process: subprocess.Popen[bytes], command: Sequence[str]) -> str:
    program = " ".join(command[:5])
    if process.poll() is None:
        return f"{program} … is not ready after {START_SECONDS:.0f} s"
    return f"{program} … has ended with status {process.returncode}"


def _read_end(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")[-1500:].strip() or "it printed nothing"


def is_ready(address: Address) -> bool:
    status, _ = run_coroutine(get(address, "/health", timeout=5.0))
    return status == 200


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and what it started: SIGTERM, then SIGKILL."""
    descendants = list_descendants(process.pid)
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid, started in descendants:
        if read_start_time(pid) == started:  # still there, and no other process of this number
            os.kill(pid, signal.SIGKILL)


@contextmanager
def exit_on_terminate() -> Iterator[None]:
    """SIGTERM raises SystemExit in this block, so that servers are stopped on the way out."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- /proc ---------------------------------------------------------------------------------------


def _read_stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def read_start_time(pid: int) -> int | None:
    stat = _read_stat(pid)
    return None if stat is None or stat[0] == "Z" else int(stat[19])


def list_descendants(pid: int) -> list[tuple[int, int]]:
    """(pid, start time) of all processes below this one."""
    parents: dict[int, list[tuple[int, int]]] = {}
    for entry in Path("/proc").glob("[0-9]*"):  # none on other systems than Linux
        stat = _read_stat(int(entry.name))
        if stat is not None:
            parents.setdefault(int(stat[1]), []).append((int(entry.name), int(stat[19])))
    found, unseen = [], [pid]
    while unseen:
        children = parents.get(unseen.pop(), [])
        found += children
        unseen += [child for child, _ in children]
    return found


def read_cpu_seconds(pid: int) -> float:
    """User and system time of a process and its descendants."""
    stats = [_read_stat(one) for one in (pid, *(child for child, _ in list_descendants(pid)))]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats if stat is not None) / TICKS


def read_resident_bytes(pid: int) -> int:
    """Resident memory of one process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])
