"""Waiting for a condition that another thread or process makes true, never for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come true within {seconds:g} s"
        time.sleep(0.005)


async def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """`wait_for` in an event loop."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come true within {seconds:g} s"
        await asyncio.sleep(0.005)
