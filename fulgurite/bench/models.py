"""Whole models: time, memory and cold compile time, beside eager and torch.compile.

In: nothing. Out: for a GPT-2-sized model and a Llama-like one (on a GPU: the models of `workloads`), forward and training
step, float32 and bfloat16: how far loss and gradients are from eager's, the median time with the candidates taking turns
in one process (on a GPU also that of its kernels alone), and, each candidate in a process of its own with empty caches, the
time of the first step and the memory that a step needs on top of the idle process (model, compiled code).
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
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fulgurite
from fulgurite import timing
from fulgurite.bench import results, workloads
from fulgurite.bench.compile_time import GPT2
from fulgurite.fuser.runtime import memory_pool
from fulgurite.models.tiny import Transformer

CANDIDATES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "fulgurite": lambda model: fulgurite.compile(model),
    "torch.compile": lambda model: torch.compile(model),
}
# layers, width and so on; the full sizes, and those of --quick
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "gpt2": (lambda: GPT2(layers=12), lambda: GPT2(layers=2)),
    "llama": (
        lambda: Transformer(layers=4, width=1024, heads=16, inner=2816, vocabulary=4096),
        lambda: Transformer(layers=2, width=256, heads=4, inner=704, vocabulary=1024),
    ),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCH, LENGTH = 2, 256


def cases_on(device: str) -> list[tuple[str, str]]:
    """(model, dtype) pairs worth timing there."""
    if device.startswith("cuda"):
        return [(name, "bfloat16") for name in workloads.WORKLOADS]
    return [(model, dtype) for model in MODELS for dtype in DTYPES]


def make(model: str, dtype: str, device: str, quick: bool) -> workloads.Workload:
    if model in workloads.WORKLOADS:
        return workloads.make(model, device, quick)
    torch.manual_seed(0)
    built = MODELS[model][quick]().to(device, DTYPES[dtype])
    return built, (torch.randint(0, 1024, (BATCH, 64 if quick else LENGTH), device=device),)


def steps(model: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """Forward without gradients, and a training step: forward, backward, gradients dropped."""

    def forward() -> Any:
        with torch.no_grad():
            return model(*inputs)

    def train() -> None:
        model(*inputs).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return {"forward": forward, "train": train}


# ---- in a process of its own ---------------------------------------------------------------------


def cold(name: str, model: str, dtype: str, device: str, quick: bool) -> dict[str, float]:
    """First steps with empty caches, then the memory of further ones."""
    built, inputs = make(model, dtype, device, quick)
    for step in steps(built, inputs).values():
        step()  # the libraries' own start-up is not what is measured
    found: dict[str, float] = {}
    for kind, step in steps(CANDIDATES[name](built), inputs).items():
        start = time.perf_counter()
        step()
        timing.synchronize()
        found[f"{kind}_first_s"] = time.perf_counter() - start
        found[f"{kind}_bytes"] = _peak_bytes(step, device)
    return found


def _peak_bytes(step: Callable[[], Any], device: str) -> float:
    """The most memory that a step needs on top of what is there before it."""
    for _ in range(2):
        step()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        idle = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - idle
    memory_pool.release()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    idle = _status("VmRSS")
    for _ in range(3):
        step()
    return _status("VmHWM") - idle


def _status(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field} in /proc/self/status")


def warm(model: str, dtype: str, device: str, quick: bool) -> dict[str, dict[str, Any]]:
    """The median seconds of each step, the candidates taking turns; and what of it a GPU works."""
    built, inputs = make(model, dtype, device, quick)
    candidates = {name: steps(compile_(built), inputs) for name, compile_ in CANDIDATES.items()}
    differs = differences(built, CANDIDATES["fulgurite"](built), inputs)
    times: dict[str, dict[str, Any]] = {}
    for kind in ("forward", "train"):
        calls = {name: found[kind] for name, found in candidates.items()}
        times[kind] = {"seconds": timing.compare(calls, repeats=7, budget=1.0 if quick else 3.0)}
        times[kind]["differs"] = differs[kind]
        if device.startswith("cuda"):
            times[kind]["gpu"] = {name: _gpu_seconds(call) for name, call in calls.items()}
    return times


def differences(built: nn.Module, compiled: Any, inputs: tuple[Any, ...]) -> dict[str, float]:
    """How far the compiled model's loss, and its gradients as one vector, are from eager's, as a part of those."""
    losses, gradients = [], []
    for model in (built, compiled):
        loss = model(*inputs)
        loss.backward()
        losses.append([loss.detach()])
        gradients.append([p.grad for p in built.parameters() if p.grad is not None])
        built.zero_grad(set_to_none=True)
    return {"forward": _distance(*losses), "train": _distance(*gradients)}


def _distance(exact: list[torch.Tensor], ours: list[torch.Tensor]) -> float:
    away = sum(
        float((a.float() - b.float()).square().sum()) for a, b in zip(exact, ours, strict=True)
    )
    return math.sqrt(away / sum(float(a.float().square().sum()) for a in exact))


def _gpu_seconds(step: Callable[[], Any], repeats: int = 2) -> float:
    """The time of a step's kernels alone: what is left of it where the host is not in the way."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(repeats):
            step()
        timing.synchronize()
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return sum(event.device_time for event in kernels) / 1e6 / repeats


def _in_process(call: str, environment: dict[str, str]) -> Any:
    code = f"import json, fulgurite.bench.models as suite; print(json.dumps(suite.{call}))"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


# ---- the suite -----------------------------------------------------------------------------------


def models(options: argparse.Namespace) -> None:
    """Suite `models`."""
    cases = cases_on(options.device)
    rows: list[dict[str, Any]] = []
    failed: list[subprocess.CalledProcessError] = []
    with Progress(transient=True) as progress:
        bar = progress.add_task("models", total=len(cases) * (len(CANDIDATES) + 1))
        for model, dtype in cases:
            given = f"{model!r}, {dtype!r}, {options.device!r}, {bool(options.quick)}"

            def told(what: str, case: str = f"{model} {dtype}") -> None:
                progress.console.out(f"{case} {what}", highlight=False)
                progress.advance(bar)

            try:
                rows += measure(f"{model} {dtype}", given, told)
            except subprocess.CalledProcessError as problem:
                told(f"failed: {problem}")
                failed.append(problem)  # the others are measured all the same
                continue
            path = results.save("models", options.device, rows, options.output)  # as far as it is
    if rows:
        print(_table(rows))
        print(f"written to {path}")
    if failed:
        raise failed[0]


def measure(case: str, given: str, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of one model; `told` hears of each candidate when it is done."""
    environment = {**os.environ, **results.fresh_caches()}
    alone = {}
    for name in CANDIDATES:
        alone[name] = _in_process(f"cold({name!r}, {given})", environment)
        first = [f"{kind} {alone[name][f'{kind}_first_s']:.1f} s" for kind in ("forward", "train")]
        told(f"{name}, first: {', '.join(first)}")
    times = _in_process(f"warm({given})", environment)
    told("in turns")
    return [_row(f"{case} {kind}", kind, alone, times[kind]) for kind in times]


def _row(
    case: str, kind: str, alone: dict[str, dict[str, float]], found: dict[str, Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case}
    times = found["seconds"]
    for name in CANDIDATES:
        label = name.replace(".", "_")
        row[f"{label}_ms"] = 1e3 * times[name]
        if "gpu" in found:
            row[f"{label}_gpu_ms"] = 1e3 * found["gpu"][name]
        row[f"{label}_mib"] = alone[name][f"{kind}_bytes"] / 2**20
        row[f"{label}_first_s"] = alone[name][f"{kind}_first_s"]
    row["differs"] = found["differs"]
    row["times_torch_compile"] = times["torch.compile"] / times["fulgurite"]
    row["times_eager"] = times["eager"] / times["fulgurite"]
    return row


def _table(rows: list[dict[str, Any]]) -> str:
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
        line += [f"{row['differs']:.0e}"]
        line += [f"{row[f'{name}_gpu_ms']:.1f} ms" for name in short] if on_gpu else []
        line += [f"{row[f'{name}_mib']:.0f}" for name in short]
        line += [f"{row[f'{name}_first_s']:.1f} s" for name in list(short)[1:]]
        body.append(line)
    faster, than_eager = (_mean(rows, key) for key in ("times_torch_compile", "times_eager"))
    last = ["geomean", "", "", "", f"{faster:.2f}", f"{than_eager:.2f}"]
    last += [""] * (len(head) - len(last))
    return results.table([head, *body, last])


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return math.exp(sum(math.log(row[key]) for row in rows) / len(rows))
