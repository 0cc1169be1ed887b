"""Host, device and wall time of one call.

In: a function. Out: its result and the seconds that the host, or the device, needs for it. A call that
waits for nothing returns before its kernels have run, so both are measured by themselves. Wall time is that of
a caller who waits for the kernels.
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
    wall: float  # of a call by itself, until its kernels have run

    @property
    def bound(self) -> float:
        """Seconds of a call in a loop of such calls: the slower of the two decides."""
        return max(self.host, self.device)

    def __str__(self) -> str:
        host, device, wall = (
            round(1e6 * seconds) for seconds in (self.host, self.device, self.wall)
        )
        return f"host {host} µs, device {device} µs, wall {wall} µs"


class Stopwatch(Protocol):
    def time_call(self, call: Callable[[], Any]) -> tuple[Any, float, float]: ...

    def time_device(self, call: Callable[[], Any], host: float) -> tuple[Any, float]: ...


class CudaStopwatch:
    """Measures calls on the current stream."""

    def time_call(self, call: Callable[[], Any]) -> tuple[Any, float, float]:
        """The seconds until the call returns, and until its kernels have run.

        It starts with an empty queue: a full one blocks it.
        """
        stream = torch.cuda.current_stream()
        stream.synchronize()
        started = time.perf_counter()
        result = call()
        returned = time.perf_counter()
        stream.synchronize()
        return result, returned - started, time.perf_counter() - started

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
