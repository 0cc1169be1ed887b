"""The watchdog restarts an engine that reports nothing, and only that one."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import pytest

from fulgurite.serve.remote import watchdog


class Engine:
    """An engine that the tests drive by the looks of its watchdog."""

    def __init__(self, stall_timeout: float) -> None:
        self.stall_timeout, self.last_report = stall_timeout, 0.0
        self.is_silent_by_intent = False
        self.restarts: list[int] = []  # at which look
        self.looks = 0

    def restart_stalled(self) -> None:
        self.restarts.append(self.looks)


def watch(engine: Engine, reports: set[int], silent: range, looks: int, monkeypatch) -> list[float]:
    """Run so many looks, with reports before some of them; the waits between them."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        engine.looks += 1
        if engine.looks > looks:
            raise asyncio.CancelledError
        if engine.looks in reports:
            engine.last_report += 1.0
        engine.is_silent_by_intent = engine.looks in silent

    monkeypatch.setattr(watchdog.asyncio, "sleep", sleep)
    with suppress(asyncio.CancelledError):
        asyncio.run(watchdog.watch_stalls(engine))
    return waits


@pytest.mark.parametrize(("timeout", "interval"), [(300.0, 1.0), (0.5, 0.05)])
def test_an_engine_that_is_silent_is_restarted(timeout, interval, monkeypatch):
    engine = Engine(timeout)
    needed = round(timeout / interval)
    waits = watch(engine, set(), range(0), 2 * needed + 5, monkeypatch)
    assert engine.restarts == [needed, 2 * needed]
    assert set(waits) == {interval}


def test_reports_and_expected_silence_start_the_count_again(monkeypatch):
    engine = Engine(10.0)
    reports = set(itertools.chain(range(1, 20, 9), range(60, 200, 9)))
    watch(engine, reports, range(20, 60), 200, monkeypatch)
    assert engine.restarts == []
