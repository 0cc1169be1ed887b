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


def compare_on(functions: Mapping[str, Callable[..., Any]], *args: Any) -> dict[str, float]:
    """`compare` for functions called with the same arguments, without gradients."""
    with torch.no_grad():
        return compare({k: functools.partial(f, *args) for k, f in functions.items()})


def best_on(
    functions: Mapping[str, Callable[..., Any]], *args: Any, rounds: int = 25, budget: float = 0.1
) -> dict[str, float] | None:
    """The least seconds of a call of each, soon known: three rounds in turns, more until the readings settle.

    Readings are short, so that some fall between two interruptions of a busy machine. None where the two least
    readings of a function still differ by more than a fifth after `rounds`, or after `budget` seconds.
    """
    calls = {k: functools.partial(f, *args) for k, f in functions.items()}
    with torch.no_grad():
        for call in calls.values():
            call()
        batch = {name: max(1, min(20, int(1e-4 / once(call)))) for name, call in calls.items()}
        readings: dict[str, list[float]] = {name: [] for name in calls}
        started = time.perf_counter()
        for done in range(1, rounds + 1):
            for name, call in calls.items():
                readings[name].append(_reading(call, batch[name]))
            least = [sorted(values)[:2] for values in readings.values()]
            if done >= 3 and all(two <= 1.2 * one for one, two in least):
                return {name: min(values) for name, values in readings.items()}
            if done >= 3 and time.perf_counter() - started > budget:
                break
    return None


def _reading(call: Call, batch: int) -> float:
    """Seconds of a call, over a few."""
    synchronize()
    start = time.perf_counter()
    for _ in range(batch):
        call()
    synchronize()
    return (time.perf_counter() - start) / batch


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
                readings[name].append(_reading(call, batch[name]))
                spent += readings[name][-1] * batch[name]
            if spent > budget * len(calls):
                break
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(values) for name, values in readings.items()}
