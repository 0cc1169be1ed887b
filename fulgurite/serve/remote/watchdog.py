"""The watchdog of an engine: reports in, a restart out if there are none for too long.

A step that never ends (a deadlock, a kernel that hangs) blocks the engine's loop, which then reports
nothing. Nothing inside its process can be relied on any more, so the process is ended from outside.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

MAX_INTERVAL = 1.0  # seconds between two looks
LOOKS = 10  # at least, before an engine is restarted


class WatchedEngine(Protocol):
    """What the watchdog needs of an `EngineClient`."""

    stall_timeout: float
    last_report: float

    @property
    def is_silent_by_intent(self) -> bool:
        """Whether no reports are expected: it loads a model, or restarts its ranks."""
        ...

    def restart_stalled(self) -> None: ...


async def watch_stalls(engine: WatchedEngine) -> None:
    """Restart the engine whenever it reports nothing for `stall_timeout` seconds.

    Time is counted look by look. So time in which this process was itself stopped does not count: after
    that, reports of a healthy engine are there to be read.
    """
    interval = min(MAX_INTERVAL, engine.stall_timeout / LOOKS)
    allowed = math.ceil(engine.stall_timeout / interval)
    silent, seen = 0, engine.last_report  # looks without a new report; the last one
    while True:
        await asyncio.sleep(interval)
        if engine.last_report != seen or engine.is_silent_by_intent:
            silent, seen = 0, engine.last_report
            continue
        silent += 1
        if silent >= allowed:
            silent = 0
            engine.restart_stalled()
