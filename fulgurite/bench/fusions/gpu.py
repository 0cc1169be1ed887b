"""Suite `fusions` on a GPU: percent of the copy bandwidth, against eager, torch.compile and liger-kernel.

In: nothing. Out, for each case of `gpu_cases`, forward and backward: percent of the copy bandwidth measured in the same
run (bytes that must move over device time by CUDA events), and the time of the first call; then a sweep over sizes.
Calls rotate over several sets of inputs, so that no call finds its inputs in L2. Every row is saved at once, the most
important ones first, so an interrupted run keeps its results.
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

from fulgurite.bench import results
from fulgurite.bench.fusions import baselines, gemm_epilogues
from fulgurite.bench.fusions.baselines import AUTOTUNE, Job
from fulgurite.bench.fusions.gemm_epilogues import relative_error
from fulgurite.bench.fusions.gpu_cases import Case, backward_cases, forward_cases, size_cases
from fulgurite.bench.fusions.report import Row, format_report, percent_by_candidate, plot_bandwidth
from fulgurite.bench.measure import time_first_call
from fulgurite.files import write_atomically
from fulgurite.fuse import fuse

INPUT_SETS = 3  # calls rotate over them: none finds its inputs in L2
CALLS_PER_READING = 12  # calls between two CUDA events
SLEEP_CYCLES = 4_000_000  # about 2 ms of device time, in which the host enqueues a batch
MAX_CLONED_BYTES = 8 << 30  # larger inputs are not cloned into several sets
# above this fraction of used memory, collect garbage: that takes longer than measuring a case
MAX_MEMORY_FRACTION = 0.3

Call = Callable[[], Any]


def time_on_device(calls: Sequence[Call], repeats: int = 9) -> float:
    """Device seconds per call: the median over batches, by CUDA events."""
    for call in calls:
        call()
    events = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)  # the host runs ahead, so only the device is timed
        start.record()
        for k in range(CALLS_PER_READING):
            calls[k % len(calls)]()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in events) / CALLS_PER_READING


def measure_copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by `copy_` of 128 MiB."""
    pairs = [
        torch.randn(2, 64 << 20, device="cuda", dtype=torch.bfloat16) for _ in range(INPUT_SETS)
    ]
    copies = [functools.partial(pair[0].copy_, pair[1]) for pair in pairs]
    return pairs[0].nbytes / time_on_device(copies, 20)


@dataclass
class Run:
    """Results so far, saved after every row."""

    options: argparse.Namespace
    copy: float
    rows: list[Row] = field(default_factory=list)
    measured: list[tuple[Row, Case]] = field(default_factory=list)  # rows of `gpu_cases`
    gemms: list[tuple[Row, gemm_epilogues.GemmCase]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.save()

    def extend(self, row: Row, figures: dict[str, Any]) -> None:
        row |= figures
        self.save()
        for name, percent in percent_by_candidate(figures).items():
            print(f"{row['group']} {row['case']}: {name} {percent:.0f}", flush=True)

    def save(self) -> Path:
        path = results.save_results("fusions", self.options.device, self.rows, self.options.output)
        write_atomically(path.with_suffix(".svg"), plot_bandwidth(self.rows))
        return path

    def compared(self, *groups: str) -> list[tuple[Row, Case]]:
        """The cases that baselines are measured on, too."""
        return [(row, c) for row, c in self.measured if c.compared and row["group"] in groups]


def run_fusions_gpu(options: argparse.Namespace) -> None:
    """Suite `fusions` on a GPU."""
    os.environ.update(results.fresh_cache_environment())
    begin = time.perf_counter()
    run = Run(options, measure_copy_bandwidth())
    gpu = torch.cuda.get_device_name()
    print(f"{gpu} · copy {run.copy / 1e9:.0f} GB/s · percent of it", flush=True)
    with torch.no_grad():
        for name, part in PHASES.items():
            part(run)
            print(f"{name} after {time.perf_counter() - begin:.0f} s", flush=True)
    print(format_report(run.rows))
    path = run.save()
    print(f"written to {path} and {path.with_suffix('.svg')}")


# ---- the phases, in order -------------------------------------------------------------------------


def run_fulgurite_and_eager(run: Run) -> None:
    groups = {"forward": forward_cases(), "backward": backward_cases()}
    groups["sizes"] = [] if run.options.quick else size_cases()
    for group, cases in groups.items():
        for case in cases:
            row = {"group": group, **measure_case(case, run.copy)}
            run.measured.append((row, case))
            run.add(row)
            if group != "sizes":
                percent, differs = row["fulgurite_percent"], row["difference"]
                print(f"{group} {case.name}: {percent:.0f}, differs by {differs:.0e}", flush=True)


def run_gemms(run: Run) -> None:
    for case, row in gemm_epilogues.measure_gemms(run.options.quick):
        run.gemms.append((row, case))
        run.add(row)


def run_torch_compile(run: Run) -> None:
    """Without other compilations running, so that times of first calls are valid."""
    for row, case in run.compared("forward", "backward"):
        run.extend(row, measure_compiled(case, row["bytes"], run.copy, cold=True))


def run_precompile(run: Run) -> None:
    """Compile the baselines of the next phases in parallel: one by one it would take seconds per case."""
    gc.collect()
    torch.cuda.empty_cache()
    baselines.precompile(
        [
            *(Job("matmul", case.name, AUTOTUNE) for _, case in _autotuned_gemms(run)),
            *(Job(r["group"], c.name, AUTOTUNE) for r, c in run.compared("forward", "backward")),
            *(Job("sizes", case.name, None) for _, case in run.compared("sizes")),
        ]
    )


def run_torch_compile_sizes(run: Run) -> None:
    for row, case in run.compared("sizes"):
        run.extend(row, measure_compiled(case, row["bytes"], run.copy))


def run_max_autotune(run: Run) -> None:
    for row, case in run.compared("forward", "backward"):
        run.extend(row, measure_compiled(case, row["bytes"], run.copy, AUTOTUNE))
    for row, product in _autotuned_gemms(run):
        run.extend(row, gemm_epilogues.measure_autotuned(product, AUTOTUNE))


def run_liger(run: Run) -> None:
    module = baselines.import_liger()
    if module is None:
        print("liger-kernel is not installed", flush=True)
        return
    for row, case in run.compared("forward", "backward"):
        figures = measure_liger(row["group"], case, module, row["bytes"], run.copy)
        if figures:
            run.extend(row, figures)


PHASES: dict[str, Callable[[Run], None]] = {
    "fulgurite and eager": run_fulgurite_and_eager,
    "GEMM epilogues": run_gemms,
    "torch.compile": run_torch_compile,
    "precompile": run_precompile,
    "size sweep, torch.compile": run_torch_compile_sizes,
    "max-autotune": run_max_autotune,
    "liger-kernel": run_liger,
}


def _autotuned_gemms(run: Run) -> list[tuple[Row, gemm_epilogues.GemmCase]]:
    names = {case.name for case in gemm_epilogues.gemm_cases(gemm_epilogues.QUICK_K_SIZES)}
    return [(row, case) for row, case in run.gemms if case.name in names]


# ---- one case ------------------------------------------------------------------------------------


def make_input_sets(case: Case) -> list[Sequence[torch.Tensor]]:
    """Several copies of the inputs, unless they are too large."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    free, whole = torch.cuda.mem_get_info()
    if whole - free > MAX_MEMORY_FRACTION * whole:
        gc.collect()
        torch.cuda.empty_cache()
    inputs = case.inputs()
    copies = INPUT_SETS - 1 if sum(t.nbytes for t in inputs) < MAX_CLONED_BYTES else 0
    return [inputs, *([t.clone() for t in inputs] for _ in range(copies))]


def measure_case(case: Case, copy: float) -> Row:
    """Measure our kernels, and eager where the case has baselines."""
    sets = make_input_sets(case)
    ours, compile_seconds = time_first_call(fuse, case.function, sets[0])
    results_of = pytree.tree_leaves(ours(*sets[0]))
    moved = sum(t.nbytes for t in (*sets[0], *results_of)) - case.unread
    row: Row = {"case": case.name, "bytes": moved, "copy": copy}
    row |= _measure_percent("fulgurite", _bind_calls(ours, sets), moved, copy) | {
        "compile_s": compile_seconds
    }
    row["kernels"] = [str(kernel.schedule) for kernel in ours.kernels]
    if case.compared:
        eager = case.eager or case.function
        row["difference"] = relative_error(results_of, pytree.tree_leaves(eager(*sets[0])))
        row |= _measure_percent("eager", _bind_calls(eager, sets), moved, copy)
    return row


def measure_compiled(
    case: Case, moved: int, copy: float, mode: str | None = None, cold: bool = False
) -> dict[str, float]:
    """Measure torch.compile; `cold` adds the time of the first call (nothing was compiled before)."""
    sets = make_input_sets(case)
    compile_ = functools.partial(torch.compile, mode=mode)
    compiled, first = time_first_call(compile_, case.function, sets[0])
    name = "max_autotune" if mode == AUTOTUNE else "torch_compile"
    figures = _measure_percent(name, _bind_calls(compiled, sets), moved, copy)
    return figures | {f"{name}_s": first} if cold else figures


def measure_liger(
    group: str, case: Case, module: Any, moved: int, copy: float
) -> dict[str, float] | None:
    """Measure the function of liger-kernel or its backward; None where it has none."""
    pairs = [baselines.bind_calls(group, case.name, module, s) for s in make_input_sets(case)]
    calls = [pair for pair in pairs if pair]
    if not calls:
        return None
    reference, found = (pytree.tree_leaves(call()) for call in calls[0])
    differs = {"liger_difference": relative_error(found, reference)}
    return _measure_percent("liger", [call for _, call in calls], moved, copy) | differs


def _bind_calls(function: Callable[..., Any], sets: Sequence[Any]) -> list[Call]:
    return [functools.partial(function, *inputs) for inputs in sets]


def _measure_percent(name: str, calls: Sequence[Call], moved: int, copy: float) -> dict[str, float]:
    taken = time_on_device(calls)
    return {f"{name}_ms": 1e3 * taken, f"{name}_percent": 100 * moved / copy / taken}
