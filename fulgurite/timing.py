"""Timers for autotuning, `explain` and benchmarks.

In: functions without arguments. Out: seconds per call. Candidates are timed in turns, so that a slow
moment of the machine affects all of them. On a GPU, each reading synchronizes the device before and
after.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Thunk = Callable[[], Any]
Clock = Callable[[], float]  # seconds


def synchronize() -> None:
    """Wait for the GPU if one is in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def time_once(call: Thunk) -> float:
    """Time one call, in seconds."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def median_times_on(functions: Mapping[str, Callable[..., Any]], *args: Any) -> dict[str, float]:
    """`median_times` of functions called with the same arguments, without gradients."""
    with torch.no_grad():
        return median_times({k: functools.partial(f, *args) for k, f in functions.items()})


def best_times_on(
    functions: Mapping[str, Callable[..., Any]],
    *args: Any,
    rounds: int = 25,
    budget: float = 0.1,
    clock: Clock = time.perf_counter,
) -> dict[str, float] | None:
    """The shortest time per call of each function, from few readings: at least three rounds in turns.

    Readings are short, so that some fall between two interruptions on a busy machine. Returns None if
    the two shortest readings of a function still differ by more than 20% after `rounds` rounds or
    `budget` seconds.
    """
    calls = {k: functools.partial(f, *args) for k, f in functions.items()}
    with torch.no_grad():
        for call in calls.values():
            call()
        batch = {name: max(1, min(20, int(1e-4 / time_once(call)))) for name, call in calls.items()}
        readings: dict[str, list[float]] = {name: [] for name in calls}
        started = time.perf_counter()
        for done in range(1, rounds + 1):
            for name, call in calls.items():
                readings[name].append(_time_batch(call, batch[name], clock))
            shortest = [sorted(values)[:2] for values in readings.values()]
            if done >= 3 and all(second <= 1.2 * first for first, second in shortest):
                return {name: min(values) for name, values in readings.items()}
            if done >= 3 and time.perf_counter() - started > budget:
                break
    return None


def _time_batch(call: Thunk, batch: int, clock: Clock = time.perf_counter) -> float:
    """Seconds per call, over `batch` calls."""
    synchronize()
    start = clock()
    for _ in range(batch):
        call()
    synchronize()
    return (clock() - start) / batch


def median_times(
    calls: Mapping[str, Thunk], *, repeats: int = 15, budget: float = 1.0, warmups: int = 2
) -> dict[str, float]:
    """The median seconds of each call, timed in turns for about `budget` seconds per candidate.

    Short calls are timed in batches that are long enough for the clock.
    """
    batch: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(warmups):
            call()
        single = max(time_once(call), 1e-7)
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
                readings[name].append(_time_batch(call, batch[name]))
                spent += readings[name][-1] * batch[name]
            if spent > budget * len(calls):
                break
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(values) for name, values in readings.items()}
