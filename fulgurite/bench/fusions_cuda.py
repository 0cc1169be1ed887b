"""How near fused kernels come to the copy bandwidth of a GPU, beside eager, torch.compile and liger-kernel.

In: nothing. Out: for each case of `fusion_cases`, forward and backward, the percent of the copy bandwidth
measured in the same run (bytes that must move over the time by CUDA events; calls take turns on several sets
of inputs, so that none finds its own in the cache), the time of the first call, and the same for sizes around.
What matters most is measured first, and saved at once: a run that is cut off has that.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from fulgurite.bench import fusions_matmul, fusions_others, results
from fulgurite.bench.fusion_cases import Case, backward, forward, sizes
from fulgurite.bench.fusions_matmul import difference
from fulgurite.bench.fusions_others import AUTOTUNE, Job
from fulgurite.bench.fusions_report import Row, bandwidth_plot, percents, report
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


@dataclass
class Run:
    """What is measured so far, saved after every row."""

    options: argparse.Namespace
    copy: float
    rows: list[Row] = field(default_factory=list)
    measured: list[tuple[Row, Case]] = field(default_factory=list)  # the rows of `fusion_cases`
    products: list[tuple[Row, fusions_matmul.Case]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.save()

    def extend(self, row: Row, figures: dict[str, Any]) -> None:
        row |= figures
        self.save()
        for name, percent in percents(figures).items():
            print(f"{row['group']} {row['case']}: {name} {percent:.0f}", flush=True)

    def save(self) -> Path:
        path = results.save("fusions", self.options.device, self.rows, self.options.output)
        write_text(path.with_suffix(".svg"), bandwidth_plot(self.rows))
        return path

    def compared(self, *groups: str) -> list[tuple[Row, Case]]:
        """What others are measured on, too."""
        return [(row, c) for row, c in self.measured if c.compared and row["group"] in groups]


def fusions_cuda(options: argparse.Namespace) -> None:
    """Suite `fusions` on a GPU."""
    os.environ.update(results.fresh_caches())
    begin = time.perf_counter()
    run = Run(options, copy_bandwidth())
    gpu = torch.cuda.get_device_name()
    print(f"{gpu} · copy {run.copy / 1e9:.0f} GB/s · percent of it", flush=True)
    with torch.no_grad():
        for name, part in PARTS.items():
            part(run)
            print(f"{name} after {time.perf_counter() - begin:.0f} s", flush=True)
    print(report(run.rows))
    path = run.save()
    print(f"written to {path} and {path.with_suffix('.svg')}")


# ---- the parts, in order -------------------------------------------------------------------------


def ours_and_eager(run: Run) -> None:
    groups = {"forward": forward(), "backward": backward()}
    groups["sizes"] = [] if run.options.quick else sizes()
    for group, cases in groups.items():
        for case in cases:
            row = {"group": group, **measure(case, run.copy)}
            run.measured.append((row, case))
            run.add(row)
            if group != "sizes":
                percent, differs = row["fulgurite_percent"], row["difference"]
                print(f"{group} {case.name}: {percent:.0f}, differs by {differs:.0e}", flush=True)


def products(run: Run) -> None:
    for case, row in fusions_matmul.fusions_matmul(run.options.quick):
        run.products.append((row, case))
        run.add(row)


def torch_compile(run: Run) -> None:
    """By itself, so that first calls are as long as they are."""
    for row, case in run.compared("forward", "backward"):
        run.extend(row, measure_compiled(case, row["bytes"], run.copy, cold=True))


def compile_ahead(run: Run) -> None:
    """What the next parts measure: one after the other it would take seconds a case."""
    gc.collect()
    torch.cuda.empty_cache()
    fusions_others.compile_ahead(
        [
            *(Job("matmul", case.name, AUTOTUNE) for _, case in _tuned_products(run)),
            *(Job(r["group"], c.name, AUTOTUNE) for r, c in run.compared("forward", "backward")),
            *(Job("sizes", case.name, None) for _, case in run.compared("sizes")),
        ]
    )


def sizes_by_torch_compile(run: Run) -> None:
    for row, case in run.compared("sizes"):
        run.extend(row, measure_compiled(case, row["bytes"], run.copy))


def max_autotune(run: Run) -> None:
    for row, case in run.compared("forward", "backward"):
        run.extend(row, measure_compiled(case, row["bytes"], run.copy, AUTOTUNE))
    for row, product in _tuned_products(run):
        run.extend(row, fusions_matmul.measure_autotuned(product, AUTOTUNE))


def liger(run: Run) -> None:
    module = fusions_others.liger_kernel()
    if module is None:
        print("liger-kernel is not installed", flush=True)
        return
    for row, case in run.compared("forward", "backward"):
        figures = measure_liger(row["group"], case, module, row["bytes"], run.copy)
        if figures:
            run.extend(row, figures)


PARTS: dict[str, Callable[[Run], None]] = {
    "ours and eager": ours_and_eager,
    "products": products,
    "torch.compile": torch_compile,
    "compiling ahead": compile_ahead,
    "sizes by torch.compile": sizes_by_torch_compile,
    "max-autotune": max_autotune,
    "liger": liger,
}


def _tuned_products(run: Run) -> list[tuple[Row, fusions_matmul.Case]]:
    names = {case.name for case in fusions_matmul.cases(fusions_matmul.FEW_DEPTHS)}
    return [(row, case) for row, case in run.products if case.name in names]


# ---- one case ------------------------------------------------------------------------------------


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


def measure(case: Case, copy: float) -> Row:
    """Our kernels, and eager's where they are compared."""
    sets = input_sets(case)
    ours, compile_seconds = _first_call(fuse, case.function, sets[0])
    results_of = pytree.tree_leaves(ours(*sets[0]))
    moved = sum(t.nbytes for t in (*sets[0], *results_of)) - case.unread
    row: Row = {"case": case.name, "bytes": moved, "copy": copy}
    row |= _figures("fulgurite", _calls(ours, sets), moved, copy) | {"compile_s": compile_seconds}
    row["kernels"] = [str(kernel.schedule) for kernel in ours.kernels]
    if case.compared:
        eager = case.eager or case.function
        row["difference"] = difference(results_of, pytree.tree_leaves(eager(*sets[0])))
        row |= _figures("eager", _calls(eager, sets), moved, copy)
    return row


def measure_compiled(
    case: Case, moved: int, copy: float, mode: str | None = None, cold: bool = False
) -> dict[str, float]:
    """torch.compile's kernels; the time of a first call only where nothing was compiled before."""
    sets = input_sets(case)
    compile_ = functools.partial(torch.compile, mode=mode)
    compiled, first = _first_call(compile_, case.function, sets[0])
    name = "max_autotune" if mode == AUTOTUNE else "torch_compile"
    figures = _figures(name, _calls(compiled, sets), moved, copy)
    return figures | {f"{name}_s": first} if cold else figures


def measure_liger(
    group: str, case: Case, module: Any, moved: int, copy: float
) -> dict[str, float] | None:
    """liger-kernel's function or its backward, None where it has none."""
    pairs = [fusions_others.calls_of(group, case.name, module, s) for s in input_sets(case)]
    calls = [pair for pair in pairs if pair]
    if not calls:
        return None
    reference, found = (pytree.tree_leaves(call()) for call in calls[0])
    differs = {"liger_difference": difference(found, reference)}
    return _figures("liger", [call for _, call in calls], moved, copy) | differs


def _calls(function: Callable[..., Any], sets: Sequence[Any]) -> list[Call]:
    return [functools.partial(function, *inputs) for inputs in sets]


def _figures(name: str, calls: Sequence[Call], moved: int, copy: float) -> dict[str, float]:
    taken = seconds(calls)
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
