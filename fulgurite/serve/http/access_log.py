"""The access log: one JSON line a request on stdout. Neither bodies nor keys are written."""

from __future__ import annotations

import sys
import time

import msgspec
from starlette.requests import Request


class AccessLog:
    """Writes lines if it is enabled."""

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled

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
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
