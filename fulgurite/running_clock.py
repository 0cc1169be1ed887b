"""`RunningClock`: seconds in which this process ran, to measure how long others have been silent.

    clock.now()        at least every second from some thread

A process that is suspended (Ctrl-Z, a debugger, a paused container) sees all others silent when it goes
on: they were suspended, too, or could not be heard. So a long time between two calls counts as
`max_pause` seconds. It counts at all, since calls may be slow for ever on an overloaded machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_PAUSE = 3.0  # seconds between two calls that count


class RunningClock:
    """A monotonic clock without the pauses of this process."""

    def __init__(
        self, read: Callable[[], float] = time.monotonic, max_pause: float = MAX_PAUSE
    ) -> None:
        self.read, self.max_pause = read, max_pause
        self.last, self.paused = read(), 0.0
        self.lock = threading.Lock()

    def now(self) -> float:
        with self.lock:
            last, self.last = self.last, self.read()
            self.paused += max(0.0, self.last - last - self.max_pause)
            return self.last - self.paused
