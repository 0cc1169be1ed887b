"""Worker processes that answer one JSON line with another, and start again after their death."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIN_FREE_BYTES = 4 << 30  # of a file system in memory


def make_cache_folder() -> str:
    """A folder for compiled kernels, in memory if there is room."""
    memory = "/dev/shm"
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= MIN_FREE_BYTES
    return tempfile.mkdtemp(prefix="fulgurite-fuzz-", dir=memory if has_room else None)


class WorkerProcess:
    """A Python module in a process of its own, with a private folder for kernels.

    module      gets `arguments`, then `--cache FOLDER`; reads questions on stdin, answers on stdout
    max_asked   questions after which a new process starts, because torch's caches grow
    autotune    whether regions are timed, as in users' calls, and may fall back to torch
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        max_asked: int,
        autotune: bool = False,
        **environment: str,
    ) -> None:
        self.command = [sys.executable, "-m", module, *arguments]
        self.log, self.max_asked = log, max_asked
        fixed = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        fixed["FULGURITE_AUTOTUNE"] = "auto" if autotune else "0"
        self.environment = {**os.environ, **fixed, **environment}
        self.process: subprocess.Popen[str] | None = None
        self.log_start = 0  # where the lines of the latest process begin
        self.cache = ""
        self.asked = 0

    def start(self) -> subprocess.Popen[str]:
        self.cache = make_cache_folder()
        self.asked = 0
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        return subprocess.Popen(
            [*self.command, "--cache", self.cache],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("a"),
            text=True,
            env=self.environment,
        )

    def ask(self, question: Any, seconds: float = 1e6) -> dict[str, Any] | None:
        """The answer; None if the process died, or was killed after so many seconds."""
        if self.asked == self.max_asked:
            self.stop()
        if self.process is None:
            self.process = self.start()
        self.asked += 1
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        timer.cancel()
        if not answer:
            self.stop()
            return None
        return json.loads(answer)  # type: ignore[no-any-return]

    def kill(self) -> None:
        """End the process now, also from another thread: `ask` then returns None."""
        if self.process is not None:
            self.process.kill()

    def stop(self) -> None:
        """Let the process end, and remove its kernels."""
        if self.process is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died with a question unread
                self.process.stdin.close()
            self.process.wait()
            self.process = None
            shutil.rmtree(self.cache, ignore_errors=True)

    def last_words(self) -> str:
        """Why the latest process died: the first line of its log that says so."""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        fatal = [line for line in lines if line.startswith("Fatal") or "Error" in line]
        return (fatal[0] if fatal else lines[-1] if lines else "no message")[:160]
