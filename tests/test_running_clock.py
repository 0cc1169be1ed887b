"""A clock that stands still while its process is suspended, and never for ever."""

from __future__ import annotations

from fulgurite.running_clock import RunningClock


def test_pauses_are_left_out() -> None:
    seconds = 100.0
    clock = RunningClock(lambda: seconds, max_pause=3.0)
    start = clock.now()
    for _ in range(5):
        seconds += 1.0
        clock.now()
    assert clock.now() - start == 5.0
    seconds += 3600.0
    assert clock.now() - start == 8.0


def test_slow_looks_count() -> None:
    """A watcher that needs longer for each look must still find a stall."""
    seconds = 0.0
    clock = RunningClock(lambda: seconds, max_pause=3.0)
    for _ in range(10):
        seconds += 5.0
        clock.now()
    assert clock.now() == 30.0
