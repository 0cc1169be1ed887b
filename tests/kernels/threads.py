"""A function called by many threads that take turns as often as Python lets them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 8


def in_threads(function: Callable[[], Any]) -> None:
    """Call it in each of them; what one raises is raised here."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for call in [pool.submit(function) for _ in range(THREADS)]:
                call.result()
    finally:
        sys.setswitchinterval(interval)
