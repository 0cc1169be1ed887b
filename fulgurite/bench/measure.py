"""Timers and small statistics that the suites share.

In: calls. Out: seconds. GPU times are taken inside a CUDA graph, so that the host does not count; timers that
include the host are in `fulgurite.timing`.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]
COMPILE_THREADS = 8


def round_robin(calls: Sequence[Call]) -> Call:
    """A call that runs the given calls in turn, so that no cache holds the operands of the next one."""
    order = itertools.cycle(calls)
    return lambda: next(order)()


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def time_first_call(
    compile_: Callable[..., Any], function: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[Any, float]:
    """The compiled function, and the seconds of its first call: compilation included."""
    compiled = compile_(function)
    _synchronize()
    start = time.perf_counter()
    compiled(*inputs)
    _synchronize()
    return compiled, time.perf_counter() - start


def read_process_status(field: str) -> int:
    """A field of /proc/self/status in bytes: `VmRSS` (resident) or `VmHWM` (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise OSError(f"no {field} in /proc/self/status")


def reset_peak_memory() -> None:
    """`VmHWM` counts from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


# ---- GPU -----------------------------------------------------------------------------------------


def time_in_cuda_graph(calls: Sequence[Call], replays: int = 5) -> float:
    """Seconds per call: the median replay of one CUDA graph that holds all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = _capture_calls(calls)
    graph.replay()
    readings = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        readings.append(start.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(readings)


def _capture_calls(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One graph of all calls. `torch.cuda.graph` would first empty the allocator's cache: 0.2 s each time."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    return graph


def compile_in_parallel(calls: Iterable[Call]) -> None:
    """Run each call once, on threads: their kernels are compiled at the same time."""

    def run_one(call: Call) -> None:
        with torch.no_grad():  # grad mode is per thread
            call()

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        for _ in pool.map(run_one, calls):
            pass
    torch.cuda.synchronize()


def measure_gpu_copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by `Tensor.copy_`."""
    sources = [torch.randn(1 << 26, device="cuda") for _ in range(3)]
    target = torch.empty_like(sources[0])
    seconds = time_in_cuda_graph([partial(target.copy_, x) for x in sources])
    return 2 * target.numel() * target.element_size() / seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
