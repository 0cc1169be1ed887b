"""The process of an engine: a `LoadModel` in, a process that loads it and its socket out.

A server launches its engines before anything else. They import torch and read weights while the server
imports its own packages.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fulgurite.lifeline import BoundProcess
from fulgurite.serve.remote.channel import encode_frame
from fulgurite.serve.remote.messages import LoadModel

IMPORTED_AT = time.perf_counter()


@dataclass(frozen=True)
class LaunchedEngine:
    """An engine that has begun to load. `socket` is the other end of its commands and reports."""

    load: LoadModel
    env: Mapping[str, str]
    process: subprocess.Popen[bytes]
    socket: socket.socket

    def kill(self) -> None:
        """End it, if it still runs."""
        self.process.kill()
        self.process.wait()


def launch_engine(load: LoadModel, env: Mapping[str, str]) -> LaunchedEngine:
    """Start an engine and tell it what to load. `env`: of its process, in addition."""
    own, other = socket.socketpair()
    try:
        process = launch_process(other, env)
    finally:
        other.close()
    own.sendall(encode_frame(load))
    return LaunchedEngine(load, env, process, own)


def launch_process(sock: socket.socket, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of an engine that reads commands from `sock`."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "fulgurite.serve.remote.engine_main", str(sock.fileno())]
    return BoundProcess(
        command,
        pass_fds=[sock.fileno()],
        env={**os.environ, **paths, **env},
        start_new_session=True,
    )


def read_process_age() -> float:
    """Seconds since this process was started; without /proc: since this module was imported."""
    try:
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.perf_counter() - IMPORTED_AT
    started = int(stat[19]) / os.sysconf("SC_CLK_TCK")  # seconds after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
