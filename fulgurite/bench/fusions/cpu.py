"""Suite `fusions` on the CPU: fused kernels against eager and torch.compile.

In: nothing. Out, for each case: time per call, percent of the copy bandwidth, time of the first call, time of lowering
with a warm kernel cache, and peak memory of a call; and the geomean speedup over torch.compile. Outputs are freed
before the next call, as in a training loop. Candidates take turns.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import Progress

from fulgurite import device, native, timing
from fulgurite.bench import results
from fulgurite.bench.fusions.cpu_cases import Case, make_cases
from fulgurite.bench.fusions.gpu import run_fusions_gpu
from fulgurite.bench.measure import (
    geomean,
    read_process_status,
    reset_peak_memory,
    time_first_call,
)
from fulgurite.fuse import Fused, fuse
from fulgurite.fuser import lower_cpu
from fulgurite.fuser.runtime import memory_pool
from fulgurite.fuser.runtime.cpu_region import FusedRegion
from fulgurite.trace.region import Region


def run_fusions(options: argparse.Namespace) -> None:
    """Suite `fusions`."""
    if options.device.startswith("cuda"):
        run_fusions_gpu(options)
        return
    os.environ.update(results.fresh_cache_environment())
    wanted = make_cases(1024 if options.quick else 4096)
    copy = device.measure_copy_bandwidth(torch.get_num_threads())
    found: list[dict[str, Any]] = []
    with Progress(transient=True) as progress, torch.no_grad():
        bar = progress.add_task("fusions", total=len(wanted))
        for case in wanted:
            progress.update(bar, description=case.name)
            found.append(measure_case(case, copy))
            path = results.save_results(
                "fusions", options.device, found, options.output
            )  # partial results survive an interrupt
            progress.advance(bar)
    print(f"float32 · {torch.get_num_threads()} threads · copy {copy / 1e9:.1f} GB/s")
    print(format_table(found))
    print(f"written to {path}")


def measure_case(case: Case, copy: float) -> dict[str, Any]:
    """Measure one case: one row of the table."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = case.inputs()
    compiled, compile_seconds = time_first_call(lambda f: torch.compile(f), case.function, inputs)
    ours, our_seconds = time_first_call(fuse, case.function, inputs)
    seconds = timing.median_times(
        {
            "eager": lambda: case.function(*inputs),
            "torch.compile": lambda: compiled(*inputs),
            "fulgurite": lambda: ours(*inputs),
        },
        repeats=7,
        budget=0.35,
    )
    moved = sum(kernel.bytes_moved for kernel in ours.kernels)
    memory_pool.release_pool()
    peaks = {
        "eager": _measure_peak_memory(lambda: case.function(*inputs)),
        "torch_compile": _measure_peak_memory(lambda: compiled(*inputs)),
        "fulgurite": _measure_peak_memory(lambda: ours(*inputs)),
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
        "warm_ms": 1e3 * _time_warm_lowering(ours),
        "peak_mb": {name: value / 2**20 for name, value in peaks.items()},
        "kernels": [str(kernel.schedule) for kernel in ours.kernels],
    }


def _time_warm_lowering(ours: Fused) -> float:
    """Seconds to lower the regions again while their kernels are in the disk cache."""
    calls = [
        node.target.call
        for trace in ours.history
        if trace.stage == "final"
        for node in trace.graph.nodes
        if isinstance(node.target, Region) and isinstance(node.target.call, FusedRegion)
    ]
    native.clear_loaded()
    start = time.perf_counter()
    for call in calls:
        lower_cpu(call.region).wait()
    return time.perf_counter() - start


def _measure_peak_memory(call: Callable[[], Any]) -> float:
    """Peak resident memory that a call adds, in bytes; NaN where /proc does not tell."""
    try:
        reset_peak_memory()
        before = read_process_status("VmRSS")
        call()
        return read_process_status("VmHWM") - before
    except OSError:
        return math.nan


def format_table(rows: list[dict[str, Any]]) -> str:
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
    mean = geomean([row["times_torch_compile"] for row in rows])
    cold = geomean([row["torch_compile_s"] / row["compile_s"] for row in rows])
    last = ["geomean", "", "", "", "", f"{mean:.2f}×", f"{cold:.1f}× faster", "", ""]
    return results.format_table([head, *body, last])
