"""Ctrl-C waits for the end of a block that must not be left halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Handle ctrl-C at the end of the block; a second one at once.

    Only in the main thread, the one that Python interrupts.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    received: list[FrameType | None] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(frame)
        if len(received) > 1:
            previous(number, frame)

    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if len(received) == 1:
            previous(signal.SIGINT, received[0])
