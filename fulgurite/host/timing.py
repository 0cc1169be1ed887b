"""Host time: what a call costs around its kernels.

In: a call. Out: `HostTime`. On a GPU the host is the time until the call returns, and the device the sum over its
kernels: the larger one bounds a loop of calls. On a CPU the host is what remains without kernels and library calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fulgurite import timing
from fulgurite.host_api import load_library
from fulgurite.trace.cost import format_seconds

REPEATS = 10


@dataclass(frozen=True)
class HostTime:
    """Seconds of the host and of kernels in one call."""

    host: float
    device: float
    is_gpu: bool

    @property
    def bound(self) -> str:
        return "host" if self.host > self.device else "device" if self.is_gpu else "kernels"

    def __str__(self) -> str:
        kernels = "device" if self.is_gpu else "kernels"
        times = f"host {format_seconds(self.host)} · {kernels} {format_seconds(self.device)}"
        return f"{times} · bound by the {self.bound}"


def measure_host_time(call: Callable[[], Any], uses_gpu: bool) -> HostTime | None:
    """The host time of a call that has run before; None where nothing counts the kernels' time."""
    if uses_gpu:
        return HostTime(_time_issue(call), time_device(call), is_gpu=True)
    library = load_library()
    if library is None:
        return None
    call()
    library.library.set_timing(1)
    try:
        start = time.perf_counter()
        for _ in range(REPEATS):
            call()
        total = (time.perf_counter() - start) / REPEATS
    finally:
        kernels = library.library.set_timing(0) * 1e-9 / REPEATS
    return HostTime(max(total - kernels, 0.0), kernels, is_gpu=False) if kernels else None


def _time_issue(call: Callable[[], Any]) -> float:
    """Seconds until a call returns, without waiting for the device."""
    call()
    timing.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        call()
    seconds = (time.perf_counter() - start) / REPEATS
    timing.synchronize()
    return seconds


def time_device(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Device seconds of a call: the sum over its kernels and copies."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(repeats):
            call()
        timing.synchronize()
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return sum(event.device_time for event in kernels) / 1e6 / repeats


def uses_gpu(values: Any) -> bool:
    """Whether any of the tensors is on a GPU."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
