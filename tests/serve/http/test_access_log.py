"""The access log of a server whose disk is full, or whose reader has left."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys

import pytest
from starlette.requests import Request

from fulgurite.serve.http.access_log import AccessLog

REQUEST = Request({"type": "http", "method": "GET", "client": ("::1", 9), "headers": []})


class FullDisk:
    """A stdout that fails until there is room."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_full = True

    def write(self, text: str) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.lines.append(text)

    def flush(self) -> None:
        pass


def test_a_full_disk_is_reported_once_and_lines_come_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stdout = FullDisk()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(logging.getLogger("fulgurite"), "propagate", True)
    log = AccessLog(True)
    with caplog.at_level(logging.WARNING, logger="fulgurite"):
        for _ in range(3):
            log.write(REQUEST, "/health", "req-1", 200, 0.5)
    assert [one.getMessage() for one in caplog.records] == [
        "the access log can't be written: No space left on device"
    ]
    stdout.is_full = False
    log.write(REQUEST, "/health", "req-2", 200, 0.5)
    (line,) = map(json.loads, stdout.lines)
    assert (line["request_id"], line["milliseconds"], line["client"]) == ("req-2", 500.0, "::1")


PROGRAM = """
import os, sys
from tests.serve.http.test_access_log import REQUEST
from fulgurite.serve.http.access_log import AccessLog

reader, writer = os.pipe()
os.dup2(writer, sys.stdout.fileno())
os.close(writer), os.close(reader)
log = AccessLog(True)
for _ in range(3):
    log.write(REQUEST, "/health", "req-1", 200, 0.5)
print(log.is_enabled, file=sys.stderr)
"""


def test_a_closed_pipe_ends_the_log_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False" and "Traceback" not in done.stderr
