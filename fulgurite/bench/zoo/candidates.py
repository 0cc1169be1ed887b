"""Eager, torch.compile and fulgurite beside each other: time, device time, kernels, memory, first call.

In: a case and its compiled module. Out: figures named `CANDIDATE_FIGURE`, as `eager_ms`. Candidates take turns.

- `ms`: median wall time of a call, `device_ms`: sum of its kernels' times, `kernels`: how many, `launches`: launches of
  the host, a CUDA graph counts as one.
- `peak_mb`, on GPUs: the most memory in use during calls after warm-up, above what was in use before the candidate's
  first call. Memory pools of CUDA graphs count whole. Reserved memory would count what others left in fragments.
- `first_s`: the first call with compilation.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fulgurite import timing
from fulgurite.bench.zoo.build import Case, seed_everything

Step = Callable[[], Any]
COMPILERS: dict[str, Callable[[Any], Any]] = {
    "torch_compile": lambda module: torch.compile(module),
    "reduce_overhead": lambda module: torch.compile(module, mode="reduce-overhead"),
}
WARMUPS = 24  # CUDA graphs are captured, and compared with the plain calls, after some calls
MEMORY_STEPS = 3
PROFILED_STEPS = 3
REPEATS = 9
GRAPH_LAUNCH = "cudaGraphLaunch"
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", GRAPH_LAUNCH)


def prepare(
    case: Case,
    mode: str,
    compiled: Any,
    compare: tuple[str, ...],
    idle_bytes: int,
    alone: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[dict[str, Any], dict[str, Step]]:
    """Call every candidate until it is warm. Returns first calls and memory, and the steps to time.

    `compiled` was called before; `idle_bytes` is `idle_memory` before that. `alone` keeps other workers from the device
    while calls are measured: CUDA graphs are captured if that is faster.
    """
    found: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    modules = {"fulgurite": compiled, "eager": case.module}
    modules |= {name: COMPILERS[name](case.module) for name in compare}
    for name, module in modules.items():
        step = make_step(replace(case, module=module), mode)
        before = idle_bytes if name == "fulgurite" else _used_memory()
        try:
            found[f"{name}_first_s"] = timing.time_once(step)
            with alone():
                found |= _warm_up(name, step, before)
        except Exception as problem:  # a failure of another compiler is a fact of the row
            if name == "fulgurite":
                raise
            found[f"{name}_error"] = describe_error(problem)
        else:
            steps[name] = step
    return found, steps


def _warm_up(name: str, step: Step, before: int) -> dict[str, float]:
    for _ in range(WARMUPS):
        step()
    if not torch.cuda.is_initialized():
        return {}
    _used_memory()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(MEMORY_STEPS):
        step()
    timing.synchronize()
    peak = torch.cuda.max_memory_allocated() + _unused_in_graph_pools()
    return {f"{name}_peak_mb": (peak - before) / 1e6}


def time_steps(steps: dict[str, Step], budget: float, device: str) -> dict[str, float]:
    """Wall and device times of the warm steps."""
    times = timing.median_times(steps, repeats=REPEATS, budget=budget)
    found = {f"{name}_ms": 1e3 * seconds for name, seconds in times.items()}
    if device.startswith("cuda"):
        for name, step in steps.items():
            found |= {f"{name}_{figure}": v for figure, v in _profile(step).items()}
    return found


def _profile(step: Step) -> dict[str, float]:
    """Device milliseconds, kernels and launches of a step."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(PROFILED_STEPS):
            step()
        timing.synchronize()
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    launches = [event for event in seen.events() if event.name.startswith(LAUNCHES)]
    return {
        "device_ms": sum(event.device_time for event in kernels) / 1e3 / PROFILED_STEPS,
        "kernels": len(kernels) // PROFILED_STEPS,
        "launches": len(launches) // PROFILED_STEPS,
    }


def make_step(case: Case, mode: str) -> Step:
    """One call without gradients, or one training step without an optimizer."""

    def infer() -> Any:
        with torch.no_grad():
            return case.module(*case.args, **case.kwargs)

    def train() -> None:
        case.loss(case.module(*case.args, **case.kwargs)).backward()
        case.module.zero_grad(set_to_none=True)

    seed_everything()
    return train if mode == "training" else infer


def idle_memory(case: Case, mode: str) -> int:
    """Bytes in use on the GPU after an eager step: parameters, inputs, library workspaces."""
    make_step(case, mode)()
    return _used_memory()


def _used_memory() -> int:
    """Bytes in use on the GPU, with the memory pools of CUDA graphs; 0 without a GPU."""
    gc.collect()
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() + _unused_in_graph_pools()


def _unused_in_graph_pools() -> int:
    """Bytes that pools of CUDA graphs hold for the values of replays; the allocator calls them free."""
    segments = torch.cuda.memory_snapshot()
    pools = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in pools)


def describe_error(problem: BaseException) -> str:
    """The type, the first lines of the message, and the innermost line of code."""
    lines = str(problem).strip().splitlines()[:3]
    frames = traceback.extract_tb(problem.__traceback__)
    where = (
        f" [{'/'.join(frames[-1].filename.split('/')[-3:])}:{frames[-1].lineno}]" if frames else ""
    )
    return f"{type(problem).__name__}: {' | '.join(lines)[:400]}{where}"
