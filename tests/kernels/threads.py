"""Calls a function from many threads with the shortest switch interval of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 8


def in_threads(function: Callable[[], Any]) -> None:
    """Call the function in each thread; an exception is raised here."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for call in [pool.submit(function) for _ in range(THREADS)]:
                call.result()
    finally:
        sys.setswitchinterval(interval)
