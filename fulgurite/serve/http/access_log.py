"""The access log: one JSON line a request on stdout. Neither bodies nor keys are written."""

from __future__ import annotations

import os
import sys
import time

import msgspec
from starlette.requests import Request

from fulgurite.logs import LOG


class AccessLog:
    """Writes lines if it is enabled."""

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.has_failed = False  # the last line could not be written

    def write(self, request: Request, path: str, id: str, status: int, seconds: float) -> None:
        if not self.is_enabled:
            return
        line = {
            "time": round(time.time(), 3),
            "client": request.client.host if request.client is not None else None,
            "method": request.method,
            "path": path,
            "status": status,
            "milliseconds": round(1e3 * seconds, 1),
            "request_id": id,
            **getattr(request.state, "log", {}),
        }
        try:
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
            sys.stdout.flush()
        except OSError as error:
            self._handle_failure(error)
        else:
            self.has_failed = False

    def _handle_failure(self, error: OSError) -> None:
        """Requests go on without the log. A pipe without a reader never comes back; a disk may."""
        if not self.has_failed:
            LOG.warning("the access log can't be written: %s", error.strerror)
        self.has_failed = True
        if isinstance(error, BrokenPipeError):
            self.is_enabled = False
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # for what is still buffered
            os.close(nowhere)
