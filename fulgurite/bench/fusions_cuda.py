"""How near fused kernels come to the copy bandwidth of a GPU, beside eager and torch.compile.

In: nothing. Out: for each case of `fusion_cases`, forward and backward, the percent of the copy bandwidth
measured in the same run (bytes that must move over the time by CUDA events; calls take turns on several sets
of inputs, so that none finds its own in the cache), the time of the first call, and the same for sizes around.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from fulgurite.bench import results
from fulgurite.bench.fusion_cases import Case, backward, forward, sizes
from fulgurite.bench.fusions_matmul import difference, fusions_matmul, table
from fulgurite.bench.plot import Point, plot
from fulgurite.fuse import fuse
from fulgurite.trace.text import write_text

SETS = 3  # of inputs, which calls take turns on: what one leaves in the cache helps no other
BATCH = 12  # calls between two readings of the device's clock
BUSY_CYCLES = 4_000_000  # of the device: some 2 ms, in which the host issues a batch
MOST_BYTES = 8 << 30  # of inputs that are copied
# of the device's memory, before what no one uses is looked for: that takes longer than measuring a case
MOST_TAKEN = 0.3

Call = Callable[[], Any]


def seconds(calls: Sequence[Call], repeats: int = 9) -> float:
    """Seconds of the device for one call: the median of batches, by events."""
    for call in calls:
        call()
    events = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)  # the host runs ahead meanwhile: only the device is timed
        start.record()
        for k in range(BATCH):
            calls[k % len(calls)]()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in events) / BATCH


def copy_bandwidth() -> float:
    """Bytes read plus written a second by torch's copy of 128 MiB."""
    pairs = [torch.randn(2, 64 << 20, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
    copies = [functools.partial(pair[0].copy_, pair[1]) for pair in pairs]
    return pairs[0].nbytes / seconds(copies, 20)


def fusions_cuda(options: argparse.Namespace) -> None:
    """Suite `fusions` on a GPU: ours and eager first, then torch.compile, which takes longest."""
    os.environ.update(results.fresh_caches())
    begin = time.perf_counter()
    copy = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()} · copy {copy / 1e9:.0f} GB/s · percent of it", flush=True
    )
    cases = [("forward", case) for case in forward()] + [("backward", case) for case in backward()]
    rows: list[dict[str, Any]] = []
    save = functools.partial(results.save, "fusions", options.device, rows, options.output)
    with torch.no_grad():
        for group, case in cases:
            rows.append({"group": group, **measure(case, copy)})
            percent, differs = rows[-1]["fulgurite_percent"], rows[-1]["difference"]
            print(f"{group} {case.name}: {percent:.0f}, differs by {differs:.0e}", flush=True)
            save()  # as far as it is
        for case in () if options.quick else sizes():
            rows.append({"group": "sizes", **measure(case, copy, False)})
            save()
        print(f"ours and eager after {time.perf_counter() - begin:.0f} s", flush=True)
        for row, (_, case) in zip(rows, cases, strict=False):
            row |= measure_compiled(case, row["bytes"], copy)
            save()
        print(f"torch.compile after {time.perf_counter() - begin:.0f} s", flush=True)
    for group in dict.fromkeys(row["group"] for row in rows):
        print(f"\n{group}")
        print(_table([row for row in rows if row["group"] == group]), flush=True)
    measured = len(rows)
    with torch.no_grad():
        for row in fusions_matmul(options.quick):
            rows.append(row)
            path = save()
    print(f"\nmatmul\n{table(rows[measured:])}", flush=True)
    image = write_text(path.with_suffix(".svg"), bandwidth_plot(rows))
    print(f"written to {path} and {image}")


def bandwidth_plot(rows: Sequence[dict[str, Any]]) -> str:
    """Percent of the copy bandwidth against bytes, of every candidate that was timed."""
    names = {"fulgurite": "fulgurite", "torch_compile": "torch.compile", "eager": "eager"}
    series = {
        shown: [
            Point(f"{row['group']} {row['case']}", row["bytes"], row[f"{name}_percent"])
            for row in rows
            if f"{name}_percent" in row
        ]
        for name, shown in names.items()
    }
    found = {name: points for name, points in series.items() if points}
    return plot("Fused kernels: percent of the copy bandwidth", found)


def input_sets(case: Case) -> list[Sequence[torch.Tensor]]:
    """The same inputs several times, where they are not too large for that."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    free, whole = torch.cuda.mem_get_info()
    if whole - free > MOST_TAKEN * whole:
        gc.collect()
        torch.cuda.empty_cache()
    inputs = case.inputs()
    copies = SETS - 1 if sum(t.nbytes for t in inputs) < MOST_BYTES else 0
    return [inputs, *([t.clone() for t in inputs] for _ in range(copies))]


def measure(case: Case, copy: float, compared: bool = True) -> dict[str, Any]:
    """Our kernels, and eager's where they are compared."""
    sets = input_sets(case)
    ours, compile_seconds = _first_call(fuse, case.function, sets[0])
    results_of = pytree.tree_leaves(ours(*sets[0]))
    moved = sum(t.nbytes for t in (*sets[0], *results_of)) - case.unread
    row: dict[str, Any] = {"case": case.name, "bytes": moved, "copy": copy}
    row |= _figures("fulgurite", ours, sets, moved, copy) | {"compile_s": compile_seconds}
    row["kernels"] = [str(kernel.schedule) for kernel in ours.kernels]
    if compared:
        eager = case.eager or case.function
        row["difference"] = difference(results_of, pytree.tree_leaves(eager(*sets[0])))
        row |= _figures("eager", eager, sets, moved, copy)
    return row


def measure_compiled(case: Case, moved: int, copy: float) -> dict[str, Any]:
    sets = input_sets(case)
    compiled, compile_seconds = _first_call(torch.compile, case.function, sets[0])
    figures = _figures("torch_compile", compiled, sets, moved, copy)
    return figures | {"torch_compile_s": compile_seconds}


def _figures(
    name: str, function: Callable[..., Any], sets: list[Any], moved: int, copy: float
) -> dict[str, float]:
    taken = seconds([functools.partial(function, *inputs) for inputs in sets])
    return {f"{name}_ms": 1e3 * taken, f"{name}_percent": 100 * moved / copy / taken}


def _first_call(
    compile_: Callable[..., Any], function: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[Any, float]:
    compiled = compile_(function)
    torch.cuda.synchronize()
    start = time.perf_counter()
    compiled(*inputs)
    torch.cuda.synchronize()
    return compiled, time.perf_counter() - start


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _table(rows: list[dict[str, Any]]) -> str:
    names = [n for n in ("eager", "torch_compile", "fulgurite") if f"{n}_percent" in rows[0]]
    table = [["case", *(n.replace("_", ".") for n in names), "ms", "compile"]]
    for row in rows:
        percents = [f"{row[f'{n}_percent']:.0f}" for n in names]
        last = [f"{row['fulgurite_ms']:.3f}", f"{row['compile_s']:.1f} s"]
        table.append([row["case"], *percents, *last])
    means = [f"{_mean([row[f'{n}_percent'] for row in rows]):.1f}" for n in names]
    table.append(["geomean", *means, "", ""])
    return results.table(table)
