"""Suite `models`: whole models, forward and training step, against eager and torch.compile.

In: nothing. Out, for a GPT-2-sized model and a Llama-like one (on a GPU: the models of `workloads`), in float32 and
bfloat16: relative error of loss and gradients against eager; median time with candidates taking turns in one process
(on a GPU also the time of the kernels cold); and, each candidate in its own process with empty caches, the time of the
first step and the peak memory of a step on top of the idle process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import Progress
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fulgurite
from fulgurite import timing
from fulgurite.bench import results
from fulgurite.bench.compile_time import GPT2
from fulgurite.bench.measure import geomean, read_process_status, reset_peak_memory
from fulgurite.bench.models import workloads
from fulgurite.fuser.runtime import memory_pool
from fulgurite.models.tiny import Transformer

CANDIDATES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "fulgurite": lambda model: fulgurite.compile(model),
    "torch.compile": lambda model: torch.compile(model),
}
# (full size, --quick size)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "gpt2": (lambda: GPT2(layers=12), lambda: GPT2(layers=2)),
    "llama": (
        lambda: Transformer(
            num_layers=4, hidden_size=1024, num_heads=16, intermediate_size=2816, vocab_size=4096
        ),
        lambda: Transformer(
            num_layers=2, hidden_size=256, num_heads=4, intermediate_size=704, vocab_size=1024
        ),
    ),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCH, SEQUENCE_LENGTH = 2, 256


def cases_for(device: str) -> list[tuple[str, str]]:
    """The (model, dtype) pairs to time on a device."""
    if device.startswith("cuda"):
        return [(name, "bfloat16") for name in workloads.WORKLOADS]
    return [(model, dtype) for model in MODELS for dtype in DTYPES]


def make_model(model: str, dtype: str, device: str, quick: bool) -> workloads.Workload:
    if model in workloads.WORKLOADS:
        return workloads.make_workload(model, device, quick)
    torch.manual_seed(0)
    built = MODELS[model][quick]().to(device, DTYPES[dtype])
    return built, (
        torch.randint(0, 1024, (BATCH, 64 if quick else SEQUENCE_LENGTH), device=device),
    )


def make_steps(model: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """Inference forward, and a training step: forward, backward, gradients set to None."""

    def forward() -> Any:
        with torch.no_grad():
            return model(*inputs)

    def train() -> None:
        model(*inputs).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return {"forward": forward, "train": train}


# ---- in a process of its own ---------------------------------------------------------------------


def measure_cold(name: str, model: str, dtype: str, device: str, quick: bool) -> dict[str, float]:
    """Seconds of the first steps with empty caches, then peak memory of later ones."""
    built, inputs = make_model(model, dtype, device, quick)
    for step in make_steps(built, inputs).values():
        step()  # start-up of the libraries is not measured
    found: dict[str, float] = {}
    for kind, step in make_steps(CANDIDATES[name](built), inputs).items():
        start = time.perf_counter()
        step()
        timing.synchronize()
        found[f"{kind}_first_s"] = time.perf_counter() - start
        found[f"{kind}_bytes"] = _measure_peak_bytes(step, device)
    return found


def _measure_peak_bytes(step: Callable[[], Any], device: str) -> float:
    """Peak memory of a step on top of what is allocated before it."""
    for _ in range(2):
        step()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        idle = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - idle
    memory_pool.release_pool()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory()
    idle = read_process_status("VmRSS")
    for _ in range(3):
        step()
    return read_process_status("VmHWM") - idle


def measure_warm(model: str, dtype: str, device: str, quick: bool) -> dict[str, dict[str, Any]]:
    """Median seconds of each step, candidates taking turns; on a GPU also the time of its kernels."""
    built, inputs = make_model(model, dtype, device, quick)
    candidates = {
        name: make_steps(compile_(built), inputs) for name, compile_ in CANDIDATES.items()
    }
    differs = compare_with_eager(built, CANDIDATES["fulgurite"](built), inputs)
    times: dict[str, dict[str, Any]] = {}
    for kind in ("forward", "train"):
        calls = {name: found[kind] for name, found in candidates.items()}
        times[kind] = {
            "seconds": timing.median_times(calls, repeats=7, budget=1.0 if quick else 3.0)
        }
        times[kind]["differs"] = differs[kind]
        if device.startswith("cuda"):
            times[kind]["gpu"] = {name: _time_gpu_kernels(call) for name, call in calls.items()}
    return times


def compare_with_eager(
    built: nn.Module, compiled: Any, inputs: tuple[Any, ...]
) -> dict[str, float]:
    """Relative error of the compiled loss, and of its gradients as one vector, against eager."""
    losses, gradients = [], []
    for model in (built, compiled):
        loss = model(*inputs)
        loss.backward()
        losses.append([loss.detach()])
        gradients.append([p.grad for p in built.parameters() if p.grad is not None])
        built.zero_grad(set_to_none=True)
    return {"forward": _relative_error(*losses), "train": _relative_error(*gradients)}


def _relative_error(exact: list[torch.Tensor], ours: list[torch.Tensor]) -> float:
    squared_error = sum(
        float((a.float() - b.float()).square().sum()) for a, b in zip(exact, ours, strict=True)
    )
    return math.sqrt(squared_error / sum(float(a.float().square().sum()) for a in exact))


def _time_gpu_kernels(step: Callable[[], Any], repeats: int = 2) -> float:
    """Device seconds of a step: the sum over its kernels."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(repeats):
            step()
        timing.synchronize()
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return sum(event.device_time for event in kernels) / 1e6 / repeats


def _run_in_process(call: str, environment: dict[str, str]) -> Any:
    code = f"import json, fulgurite.bench.models.suite as suite; print(json.dumps(suite.{call}))"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


# ---- the suite -----------------------------------------------------------------------------------


def run_models(options: argparse.Namespace) -> None:
    """Suite `models`."""
    cases = cases_for(options.device)
    rows: list[dict[str, Any]] = []
    failed: list[subprocess.CalledProcessError] = []
    with Progress(transient=True) as progress:
        bar = progress.add_task("models", total=len(cases) * (len(CANDIDATES) + 1))
        for model, dtype in cases:
            given = f"{model!r}, {dtype!r}, {options.device!r}, {bool(options.quick)}"

            def report(what: str, case: str = f"{model} {dtype}") -> None:
                progress.console.out(f"{case} {what}", highlight=False)
                progress.advance(bar)

            try:
                rows += measure_case(f"{model} {dtype}", given, report)
            except subprocess.CalledProcessError as problem:
                report(f"failed: {problem}")
                failed.append(problem)  # other models are still measured
                continue
            path = results.save_results(
                "models", options.device, rows, options.output
            )  # partial results survive an interrupt
    if rows:
        print(format_table(rows))
        print(f"written to {path}")
    if failed:
        raise failed[0]


def measure_case(case: str, given: str, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of one model; `report` is called after each candidate."""
    environment = {**os.environ, **results.fresh_cache_environment()}
    cold = {}
    for name in CANDIDATES:
        cold[name] = _run_in_process(f"measure_cold({name!r}, {given})", environment)
        first = [f"{kind} {cold[name][f'{kind}_first_s']:.1f} s" for kind in ("forward", "train")]
        report(f"{name}, first: {', '.join(first)}")
    times = _run_in_process(f"measure_warm({given})", environment)
    report("in turns")
    return [_row(f"{case} {kind}", kind, cold, times[kind]) for kind in times]


def _row(
    case: str, kind: str, cold: dict[str, dict[str, float]], found: dict[str, Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case}
    times = found["seconds"]
    for name in CANDIDATES:
        label = name.replace(".", "_")
        row[f"{label}_ms"] = 1e3 * times[name]
        if "gpu" in found:
            row[f"{label}_gpu_ms"] = 1e3 * found["gpu"][name]
        row[f"{label}_mib"] = cold[name][f"{kind}_bytes"] / 2**20
        row[f"{label}_first_s"] = cold[name][f"{kind}_first_s"]
    row["differs"] = found["differs"]
    row["times_torch_compile"] = times["torch.compile"] / times["fulgurite"]
    row["times_eager"] = times["eager"] / times["fulgurite"]
    return row


def format_table(rows: list[dict[str, Any]]) -> str:
    short = {"eager": "eager", "torch_compile": "compile", "fulgurite": "fulgurite"}
    head = ["case", *short.values(), "× compile", "× eager", "differs"]
    on_gpu = "fulgurite_gpu_ms" in rows[0]
    head += [f"{name} GPU" for name in short.values()] if on_gpu else []
    head += [f"{name} MiB" for name in short.values()]
    head += [f"{name} first" for name in list(short.values())[1:]]
    body = []
    for row in rows:
        line = [row["case"], *(f"{row[f'{name}_ms']:.1f} ms" for name in short)]
        line += [f"{row['times_torch_compile']:.2f}", f"{row['times_eager']:.2f}"]
        line += [f"{row['differs']:.0e}" if "differs" in row else ""]
        line += [f"{row[f'{name}_gpu_ms']:.1f} ms" for name in short] if on_gpu else []
        line += [f"{row[f'{name}_mib']:.0f}" for name in short]
        line += [f"{row[f'{name}_first_s']:.1f} s" for name in list(short)[1:]]
        body.append(line)
    faster, than_eager = (
        geomean([row[key] for row in rows]) for key in ("times_torch_compile", "times_eager")
    )
    last = ["geomean", "", "", "", f"{faster:.2f}", f"{than_eager:.2f}"]
    last += [""] * (len(head) - len(last))
    return results.format_table([head, *body, last])
