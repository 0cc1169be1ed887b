"""How fast fused kernels are, beside eager and torch.compile in the same run.

In: nothing. Out: for each case the time of a call, what part of the copy bandwidth that is (bytes that must move
over the time), the time of the first call, of lowering from the kernel cache, and the memory a call needs at its
height; and the geometric mean of the speed over torch.compile's. Results of a call are dropped before the next,
as in a training loop; candidates take turns.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from fulgurite import device, native, timing
from fulgurite.bench import results
from fulgurite.bench.fusions_cpu_cases import Case, cases
from fulgurite.bench.fusions_cuda import fusions_cuda
from fulgurite.fuse import Fused, fuse
from fulgurite.fuser import lower_region
from fulgurite.fuser.runtime import memory_pool
from fulgurite.fuser.runtime.cpu_region import FusedRegion
from fulgurite.trace.region import Region


def fusions(options: argparse.Namespace) -> None:
    """Suite `fusions`."""
    if options.device.startswith("cuda"):
        fusions_cuda(options)
        return
    os.environ.update(results.fresh_caches())
    wanted = cases(1024 if options.quick else 4096)
    copy = device.measure_copy_bandwidth(torch.get_num_threads())
    found: list[dict[str, Any]] = []
    with Progress(transient=True) as progress, torch.no_grad():
        bar = progress.add_task("fusions", total=len(wanted))
        for case in wanted:
            progress.update(bar, description=case.name)
            found.append(measure(case, copy))
            path = results.save("fusions", options.device, found, options.output)  # as far as it is
            progress.advance(bar)
    print(f"float32 · {torch.get_num_threads()} threads · copy {copy / 1e9:.1f} GB/s")
    print(_table(found))
    print(f"written to {path}")


def measure(case: Case, copy: float) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = case.inputs()
    compiled, compile_seconds = _first_call(lambda f: torch.compile(f), case.function, inputs)
    ours, our_seconds = _first_call(fuse, case.function, inputs)
    seconds = timing.compare(
        {
            "eager": lambda: case.function(*inputs),
            "torch.compile": lambda: compiled(*inputs),
            "fulgurite": lambda: ours(*inputs),
        },
        repeats=7,
        budget=0.35,
    )
    moved = sum(kernel.bytes for kernel in ours.kernels)
    memory_pool.release()
    peaks = {
        "eager": _peak(lambda: case.function(*inputs)),
        "torch_compile": _peak(lambda: compiled(*inputs)),
        "fulgurite": _peak(lambda: ours(*inputs)),
    }
    return {
        "case": case.name,
        "eager_ms": 1e3 * seconds["eager"],
        "torch_compile_ms": 1e3 * seconds["torch.compile"],
        "fulgurite_ms": 1e3 * seconds["fulgurite"],
        "of_copy": moved / copy / seconds["fulgurite"],
        "times_torch_compile": seconds["torch.compile"] / seconds["fulgurite"],
        "times_eager": seconds["eager"] / seconds["fulgurite"],
        "compile_s": our_seconds,
        "torch_compile_s": compile_seconds,
        "warm_ms": 1e3 * _warm(ours),
        "peak_mb": {name: value / 2**20 for name, value in peaks.items()},
        "kernels": [str(kernel.schedule) for kernel in ours.kernels],
    }


def _first_call(
    compile_: Callable[..., Any], function: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> tuple[Any, float]:
    compiled = compile_(function)
    start = time.perf_counter()
    compiled(*inputs)
    return compiled, time.perf_counter() - start


def _warm(ours: Fused) -> float:
    """Seconds to lower the regions of a function again, with their kernels in the cache on disk."""
    calls = [
        node.target.call
        for trace in ours.history
        if trace.stage == "final"
        for node in trace.graph.nodes
        if isinstance(node.target, Region) and isinstance(node.target.call, FusedRegion)
    ]
    native.forget()
    start = time.perf_counter()
    for call in calls:
        lower_region(call.region).wait()
    return time.perf_counter() - start


def _peak(call: Callable[[], Any]) -> float:
    """Bytes that a call adds to the resident memory at its height; NaN where the system doesn't say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the height from here on
        before = _resident("VmRSS")
        call()
        return _resident("VmHWM") - before
    except OSError:
        return math.nan


def _resident(which: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return float(line.split()[1]) * 1024
    return math.nan


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["case", "eager", "torch.compile", "fulgurite", "of copy", "× torch.compile", "compile"]
    head += ["warm", "peak"]
    body = [
        [
            row["case"],
            f"{row['eager_ms']:.2f} ms",
            f"{row['torch_compile_ms']:.2f} ms",
            f"{row['fulgurite_ms']:.2f} ms",
            f"{100 * row['of_copy']:.0f}%",
            f"{row['times_torch_compile']:.2f}×",
            f"{row['compile_s']:.2f} s",
            f"{row['warm_ms']:.0f} ms",
            f"{row['peak_mb']['fulgurite']:.0f} MiB",
        ]
        for row in rows
    ]
    mean = _mean([row["times_torch_compile"] for row in rows])
    cold = _mean([row["torch_compile_s"] / row["compile_s"] for row in rows])
    last = ["geomean", "", "", "", "", f"{mean:.2f}×", f"{cold:.1f}× faster", "", ""]
    return results.table([head, *body, last])
