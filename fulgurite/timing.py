"""Honest timers, shared by tuning, explain and bench.

In: functions without arguments. Out: seconds a call, as medians. Candidates take turns, so that a slow moment of
the machine hits all of them alike; on a GPU the device is awaited before and after each reading.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]


def synchronize() -> None:
    """Wait for the GPU, where there is one in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def once(call: Call) -> float:
    """Seconds of one call."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def compare_on(
    functions: Mapping[str, Callable[..., Any]], *args: Any, **kwargs: Any
) -> dict[str, float]:
    """`compare` for functions called with the same arguments, without gradients."""
    with torch.no_grad():
        return compare({k: functools.partial(f, *args, **kwargs) for k, f in functions.items()})


def compare(
    calls: Mapping[str, Call], *, repeats: int = 15, budget: float = 1.0, warmups: int = 2
) -> dict[str, float]:
    """The median seconds of each call, measured in turns within about `budget` seconds a candidate.

    Short calls are timed in batches long enough for the clock.
    """
    batch: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(warmups):
            call()
        single = max(once(call), 1e-7)
        batch[name] = max(
            1, min(10_000, int(budget / repeats / single / 2), int(2e-3 / single) or 1)
        )
    readings: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        spent = 0.0
        for _ in range(repeats):
            for name, call in calls.items():
                synchronize()
                start = time.perf_counter()
                for _ in range(batch[name]):
                    call()
                synchronize()
                elapsed = time.perf_counter() - start
                readings[name].append(elapsed / batch[name])
                spent += elapsed
            if spent > budget * len(calls):
                break
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(values) for name, values in readings.items()}
