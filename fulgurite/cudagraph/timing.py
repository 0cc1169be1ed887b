"""Host and device time of one call.

In: a function. Out: its result and the seconds that the host, or the device, needs for it. A call that
waits for nothing returns before its kernels have run, so both are measured by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

SLEEP_CYCLES_PER_SECOND = 2.0e9  # upper bound of the clock rate of GPUs that run Triton


@dataclass(frozen=True)
class CallTime:
    """Seconds of one call."""

    host: float
    device: float

    @property
    def bound(self) -> float:
        """Seconds of a call in a loop of such calls: the slower of the two decides."""
        return max(self.host, self.device)

    def __str__(self) -> str:
        return f"host {1e6 * self.host:.0f} µs, device {1e6 * self.device:.0f} µs"


class Stopwatch(Protocol):
    def time_host(self, call: Callable[[], Any]) -> tuple[Any, float]: ...

    def time_device(self, call: Callable[[], Any], host: float) -> tuple[Any, float]: ...


class CudaStopwatch:
    """Measures calls on the current stream."""

    def time_host(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The seconds until the call returns. It starts with an empty queue: a full one blocks it."""
        torch.cuda.current_stream().synchronize()
        started = time.perf_counter()
        result = call()
        return result, time.perf_counter() - started

    def time_device(self, call: Callable[[], Any], host: float) -> tuple[Any, float]:
        """The seconds of its kernels without gaps: the device sleeps until all are launched.

        host   seconds that the host needs to launch them
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int((2 * host + 1e-4) * SLEEP_CYCLES_PER_SECOND))
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return result, 1e-3 * start.elapsed_time(end)
