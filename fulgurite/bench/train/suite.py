"""`fulgurite bench train`: training steps of one loop; eager, torch.compile and Fulgurite beside each other.

"transformers" is torch.compile of transformers' own model (transformers_model.py), if it is installed;
the others compile the project's model, with its kernels.

In: workloads (workloads.py). Out, for each of them and each candidate: tokens per second, MFU, wall and
kernel time of a step, the host's share, peak memory and the seconds of the first step.

All candidates run the same `TrainStep`: forward, backward, gradient norm, clipping, AdamW with float32
states and master weights; MFU counts against the peak of bfloat16. Only how the loss module is compiled differs. Each has a process's GPU to
itself, one after the other; a step is timed from one read of its loss to the next.

`--only stall` measures how long a save holds the loop (stall.py), `--only twin` a mixture of experts beside
its dense twin at equal loss (twin.py).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import fulgurite
from fulgurite.bench import results
from fulgurite.bench.train.row_file import RowFile
from fulgurite.bench.train.stall import format_stalls, measure_stall
from fulgurite.bench.train.transformers_model import (
    TransformersLoss,
    build_transformers_model,
    is_installed,
)
from fulgurite.bench.train.twin import format_twins, measure_twins
from fulgurite.bench.train.workloads import CPU_DTYPE, CUDA_DTYPE, Workload, make_workloads
from fulgurite.device import resolve_device
from fulgurite.errors import ArgumentError
from fulgurite.host.timing import time_device
from fulgurite.models.loading.loader import build_random_model
from fulgurite.train.batch import Batch
from fulgurite.train.build import freeze_selection_biases, get_dtype, read_model_config
from fulgurite.train.config import (
    LossSection,
    OptimizerSection,
    PrecisionSection,
    TrainConfig,
)
from fulgurite.train.flops import count_flops, find_peak
from fulgurite.train.loss import LossModule
from fulgurite.train.metrics import peak_memory
from fulgurite.train.optim import build_optimizer
from fulgurite.train.precision import precision_transforms
from fulgurite.train.step import OneRank, StepResult, TrainStep

Row = dict[str, Any]
EAGER, TRANSFORMERS, INDUCTOR, OURS = CANDIDATES = (
    "eager",
    "transformers",
    "torch.compile",
    "fulgurite",
)
WARMUP_STEPS = {"cuda": 24, "cpu": 2}  # CUDA graphs are measured and captured after some calls
TIMED_STEPS = {"cuda": 10, "cpu": 5}
CONFIG = TrainConfig(
    steps=1000,
    optimizer=OptimizerSection(learning_rate=3e-4, adam_learning_rate=3e-4),
    loss=LossSection(balance_rate=1e-3),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        metavar="NAME",
        help="workloads with this text in their name, stall or twin; adds to the file of the day",
    )
    parser.add_argument(
        "--candidates",
        metavar="NAMES",
        default=",".join(CANDIDATES),
        help=f"some of {','.join(CANDIDATES)}",
    )


def run_train(options: argparse.Namespace) -> None:
    """Measure all workloads, save and print each row at once, then print the tables."""
    device = resolve_device(options.device).type
    check_only(options.only, device, options.quick)
    candidates = read_candidates(options.candidates)
    is_part = options.only is not None or candidates != CANDIDATES
    file = RowFile(device, options.output, keeps_others=is_part)
    for row in measure_all(device, options, candidates):
        file.add(row)
        print(format_row(row), flush=True)
    print(format_tables(file.list_rows()))
    print(f"written to {file.path}")


def measure_all(
    device: str, options: argparse.Namespace, candidates: tuple[str, ...]
) -> Iterator[Row]:
    """The rows, as they are measured. A later row may complete an earlier one of the same case."""
    yield from measure_steps(device, options, candidates)
    for name, measure_more in EXTRAS.items():
        if options.only is None or options.only.lower() in name:
            for row in measure_more(device, options.quick):
                yield row | {"kind": name}


def read_candidates(names: str) -> tuple[str, ...]:
    chosen = tuple(names.split(","))
    if not set(chosen) <= set(CANDIDATES):
        raise ArgumentError(
            f"--candidates {names}", next=f"use one or more of {','.join(CANDIDATES)}"
        )
    return tuple(name for name in CANDIDATES if name in chosen)


def check_only(only: str | None, device: str, quick: bool) -> None:
    """Raise if nothing would be measured: the file of an earlier run would be replaced by none."""
    names = [*(workload.name for workload in make_workloads(device, quick)), *EXTRAS]
    if only is not None and not any(only.lower() in name.lower() for name in names):
        raise ArgumentError(f"--only {only} is in no name", next=f"names: {', '.join(names)}")


def format_tables(rows: list[Row]) -> str:
    """A table for each kind of row."""
    tables = []
    for kind, show in ((None, format_table), ("stall", format_stalls), ("twin", format_twins)):
        chosen = [row for row in rows if row.get("kind") == kind]
        if chosen:
            tables.append(show(chosen))
    return "\n\n".join(tables)


def format_row(row: Row) -> str:
    """A line of a row that was just measured."""
    names = [row.get("kind"), row["model"], row.get("candidate"), row.get("recipe")]
    figures = {key: value for key, value in row.items() if isinstance(value, float)}
    shown = [f"{key} {value:,.4g}" for key, value in figures.items()] or [row.get("error", "")]
    return f"{' · '.join(name for name in names if name)}: {', '.join(shown)}"


def measure_steps(
    device: str, options: argparse.Namespace, candidates: tuple[str, ...]
) -> Iterator[Row]:
    """A row for each workload and candidate."""
    chosen = [
        workload
        for workload in make_workloads(device, options.quick)
        if options.only is None or options.only.lower() in workload.name.lower()
    ]
    for workload in chosen:
        for candidate, recipe in list_candidates(workload):
            if candidate in candidates:
                yield measure(workload, candidate, recipe, device)


def measure_stalls(device: str, quick: bool) -> Iterator[Row]:
    """Saves of the first workload; on a GPU also of a 1B model."""
    workloads = make_workloads(device, quick)
    for workload in workloads[::2][:2] if device == "cuda" and not quick else workloads[:1]:
        step, batches, _ = make_train_step(workload, OURS, "none", device)
        counter = itertools.count()
        run = partial(_run_next, step, counter, batches)
        yield from measure_stall(workload.name, step, run, WARMUP_STEPS[device])
        del step, batches, run
        _reset(device)


EXTRAS = {"stall": measure_stalls, "twin": measure_twins}  # beside the workloads


def _run_next(step: TrainStep, counter: Iterator[int], batches: list[Batch]) -> StepResult:
    return step(next(counter), batches)


def list_candidates(workload: Workload) -> list[tuple[str, str]]:
    """(candidate, recipe): every candidate in the model's dtype, the recipes with Fulgurite."""
    names = [name for name in CANDIDATES if name != TRANSFORMERS or can_run_transformers(workload)]
    recipes = [(OURS, recipe) for recipe in workload.recipes if recipe != "none"]
    return [(name, "none") for name in names] + recipes


def can_run_transformers(workload: Workload) -> bool:
    return is_installed() and workload.documents == 1


def measure(workload: Workload, candidate: str, recipe: str, device: str) -> Row:
    """One row. A candidate that fails has a row with its error."""
    row: Row = {
        "model": workload.name,
        "candidate": candidate,
        "recipe": recipe,
        "tokens": workload.tokens,
    }
    _reset(device)
    try:
        return row | _measure(workload, candidate, recipe, device)
    except (RuntimeError, fulgurite.FulguriteError) as error:  # the other rows still count
        return row | {"error": str(error).strip().partition("\n")[0][:200]}
    finally:
        _reset(device)


def _measure(workload: Workload, candidate: str, recipe: str, device: str) -> Row:
    run, flops = make_step(workload, candidate, recipe, device)
    start = time.perf_counter()
    first = run()
    first_seconds = time.perf_counter() - start
    for _ in range(WARMUP_STEPS[device]):
        run()
    seconds = [_time(run) for _ in range(TIMED_STEPS[device])]
    wall = statistics.median(seconds)
    kernels = time_device(run) if device == "cuda" else None
    return {
        "tokens_per_second": workload.tokens / wall,
        "mfu": workload.tokens * flops / wall / find_peak(device).flops,
        "wall_ms": wall * 1e3,
        "kernel_ms": None if kernels is None else kernels * 1e3,
        "memory_bytes": peak_memory(torch.device(device)),
        "first_seconds": first_seconds,
        "first_loss": first.loss,
    }


def make_step(
    workload: Workload, candidate: str, recipe: str, device: str
) -> tuple[Callable[[], StepResult], float]:
    """A function that runs one step, and the FLOPs of a token."""
    step, batches, flops = make_train_step(workload, candidate, recipe, device)
    return partial(_run_next, step, itertools.count(), batches), flops


def make_train_step(
    workload: Workload, candidate: str, recipe: str, device: str
) -> tuple[TrainStep, list[Batch], float]:
    """A step, its microbatches, and the FLOPs of a token."""
    module, model, flops = build_module(workload, candidate, device)
    if candidate in (INDUCTOR, TRANSFORMERS):
        torch._dynamo.reset()
        module = torch.compile(module)  # type: ignore[assignment]
    elif candidate == OURS:
        section = replace(PrecisionSection(), matmul=recipe)
        module = fulgurite.compile(module, transforms=precision_transforms(section, device))
    optimizer = build_optimizer(model, CONFIG.optimizer, 1000)
    step = TrainStep(module, model, optimizer, OneRank(), CONFIG)
    return step, workload.make_batches(device), flops


def build_module(
    workload: Workload, candidate: str, device: str
) -> tuple[nn.Module, nn.Module, float]:
    """The loss module of a candidate, not compiled, its model, and the FLOPs of a token."""
    dtype = get_dtype(CUDA_DTYPE if device == "cuda" else CPU_DTYPE)
    family, config = read_model_config(workload.fields, workload.architecture)
    model = build_random_model(config, family, dtype=dtype, device=device).train()
    freeze_selection_biases(model)
    flops = count_flops(model, workload.length // workload.documents).training
    if candidate != TRANSFORMERS:
        return LossModule(model, CONFIG.loss), model, flops
    del model
    other = build_transformers_model(workload, dtype, device)
    return TransformersLoss(other), other, flops


def _time(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()  # reads its loss, so it waits for the device
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _reset(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def format_table(rows: list[Row]) -> str:
    """A line a candidate, with its speed beside torch.compile's."""
    header = ["model", "candidate", "tokens/s", "MFU", "step", "kernels", "host", "memory", "first"]
    others = [INDUCTOR, TRANSFORMERS]
    lines = [[*header, *(f"× {other}" for other in others)]]
    speeds = {
        (row["model"], row["candidate"]): row.get("tokens_per_second")
        for row in rows
        if row["recipe"] == "none"
    }
    for row in rows:
        name = row["candidate"] + ("" if row["recipe"] == "none" else f", {row['recipe']}")
        if "error" in row:
            lines.append([row["model"], name, "failed", *[""] * 8])
            continue
        bases = [speeds.get((row["model"], other)) for other in others]
        kernels, wall = row["kernel_ms"], row["wall_ms"]
        lines.append(
            [
                row["model"],
                name,
                f"{row['tokens_per_second']:,.0f}",
                f"{row['mfu']:.1%}",
                f"{wall:.1f} ms",
                "" if kernels is None else f"{kernels:.1f} ms",
                "" if kernels is None else f"{max(0.0, 1 - kernels / wall):.0%}",
                f"{row['memory_bytes'] / 2**30:.1f} GiB",
                f"{row['first_seconds']:.1f} s",
                *("" if not base else f"{row['tokens_per_second'] / base:.2f}" for base in bases),
            ]
        )
    return results.format_table(lines)
