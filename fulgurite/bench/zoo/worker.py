"""One row of the suite `zoo`, measured in a process of its own.

In: a `Job`. Out: a row: whether the compiled model agrees with eager, graph breaks, fallbacks, time of the first call,
and times of later calls. `run_job` is the process's main function; it sends the row through a pipe.
"""

from __future__ import annotations

import copy
import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fulgurite
from fulgurite import timing
from fulgurite.bench.zoo.build import RUNNERS, Case, seed_everything
from fulgurite.bench.zoo.catalog import Mode, ZooModel, build_case
from fulgurite.bench.zoo.compare import (
    HALF_MAX_EAGER_ERROR,
    HALF_TOLERANCE,
    MAX_EAGER_ERROR,
    TOLERANCE,
    find_differences,
    relative_error,
)

MAX_DIFFERENCES = 3  # named in a row
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a worker process measures, and its limits."""

    model: ZooModel
    mode: Mode
    device: str
    dtype: torch.dtype
    compare: tuple[str, ...]  # other compilers to time: "torch_compile"
    timing_budget: float  # seconds
    memory_limit: int  # bytes of the process; 0: none
    log: str  # file for the process's output


def run_job(job: Job, connection: Connection) -> None:
    """Measure in this process and send the row. Output of the model goes to the job's log."""
    os.setsid()  # a kill of the group also ends compilers that this process started
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    if job.memory_limit:
        resource.setrlimit(resource.RLIMIT_DATA, (job.memory_limit, job.memory_limit))
    connection.send(measure(job))
    connection.close()


def measure(job: Job) -> Row:
    """The row of a job. An exception of the model or of the compiler becomes its status."""
    row: Row = {
        "package": job.model.package,
        "family": job.model.family,
        "model": job.model.name,
        "mode": job.mode,
    }
    try:
        case = build_case(job.model, job.mode, job.device, job.dtype)
        reference = _Reference(case, job)
    except ImportError as problem:  # not in the installed version of the package
        return {**row, "status": "unavailable", "error": _describe(problem)}
    except Exception as problem:  # whatever a model raises, its row says so
        return {**row, "status": "eager fails", "error": _describe(problem)}
    if reference.varies:
        return {**row, "status": "eager varies", "error": _join(reference.varies)}
    row["eager_error"] = reference.error
    if reference.error > reference.max_error:
        text = f"eager's relative error against float64 is {reference.error:.1e}"
        return {**row, "status": "eager inexact", "error": text}
    compiled = fulgurite.compile(case.module)
    try:
        start = time.perf_counter()
        first = reference.run(replace(case, module=compiled))
        row["first_s"] = time.perf_counter() - start
        second = reference.run(replace(case, module=compiled))
        differences = reference.compare(first) or reference.compare(second)
    except Exception as problem:  # the same: a failure is a row
        return {**row, "status": "failed", "error": _describe(problem)}
    row |= _describe_compilation(compiled)
    if differences:
        return {**row, "status": "inaccurate", "error": _join(differences)}
    return {**row, "status": "pass", **_time_steps(case, compiled, job)}


class _Reference:
    """Eager's result of a case and that of float64, and a comparison with them."""

    def __init__(self, case: Case, job: Job) -> None:
        half = job.dtype in (torch.float16, torch.bfloat16)
        self.tolerance = (HALF_TOLERANCE if half else TOLERANCE)[job.mode]
        self.max_error = HALF_MAX_EAGER_ERROR if half else MAX_EAGER_ERROR
        self.run_mode = RUNNERS[job.mode]
        self.buffers = {name: buffer.clone() for name, buffer in case.module.named_buffers()}
        self.exact = self._run_float64(case)
        self.eager = self.run(case)
        self.error = relative_error(self.eager, self.exact) if self.exact is not None else 0.0
        # a model that differs from itself can't be checked
        self.varies = self.compare(self.run(case))

    def compare(self, result: dict[str, Tensor]) -> list[str]:
        """The tensors that differ from eager's, as texts."""
        found = find_differences(self.eager, result, self.exact, self.tolerance)
        return [str(difference) for difference in found]

    def run(self, case: Case) -> dict[str, Tensor]:
        """One call from the same state: buffers as they were, inputs copied."""
        with torch.no_grad():
            for name, buffer in case.module.named_buffers():
                buffer.copy_(self.buffers[name])
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (case.args, case.kwargs))
        found = self.run_mode(replace(case, args=args, kwargs=kwargs))
        return {name: value.clone() for name, value in found.items()}

    def _run_float64(self, case: Case) -> dict[str, Tensor] | None:
        """None if the model does not run in float64; then only the tolerance decides."""
        args, kwargs = pytree.tree_map_only(Tensor, _to_double, (case.args, case.kwargs))
        module: nn.Module = copy.deepcopy(case.module).double()
        try:
            return self.run_mode(replace(case, module=module, args=args, kwargs=kwargs))
        except (RuntimeError, TypeError, ValueError):
            return None


def _join(differences: list[str]) -> str:
    more = len(differences) - MAX_DIFFERENCES
    return "; ".join(differences[:MAX_DIFFERENCES]) + (f"; {more} more" if more > 0 else "")


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _describe(problem: BaseException) -> str:
    """The type, the first lines of the message, and the innermost line of code."""
    lines = str(problem).strip().splitlines()[:3]
    frames = traceback.extract_tb(problem.__traceback__)
    where = (
        f" [{'/'.join(frames[-1].filename.split('/')[-3:])}:{frames[-1].lineno}]" if frames else ""
    )
    return f"{type(problem).__name__}: {' | '.join(lines)[:400]}{where}"


def _describe_compilation(compiled: Any) -> Row:
    explanation = compiled.explain()
    graphs = [graph for one in explanation.graphs for graph in one.compiled_graphs]
    failed = [str(failure) for record in compiled.graphs for failure in record.fallbacks]
    return {
        "graphs": len(compiled.graphs),
        "kernels": sum(len(graph.kernels) for graph in graphs),
        "graph_breaks": len(compiled.breaks),
        "fallbacks": failed + explanation.fallbacks,
    }


def _time_steps(case: Case, compiled: Any, job: Job) -> Row:
    """Milliseconds of a call, candidates in turns."""
    steps = {"eager": _make_step(case, job.mode), "fulgurite": None}
    steps["fulgurite"] = _make_step(replace(case, module=compiled), job.mode)
    row: Row = {}
    if "torch_compile" in job.compare:
        step = _make_step(replace(case, module=torch.compile(case.module)), job.mode)
        try:
            row["torch_compile_first_s"] = timing.time_once(step)
            steps["torch_compile"] = step
        except Exception as problem:  # a failure of torch.compile is a fact of the row
            row["torch_compile_error"] = _describe(problem)
    calls = {name: step for name, step in steps.items() if step is not None}
    times = timing.median_times(calls, repeats=5, budget=job.timing_budget)
    return row | {f"{name}_ms": 1e3 * seconds for name, seconds in times.items()}


def _make_step(case: Case, mode: Mode) -> Callable[[], Any]:
    def infer() -> Any:
        with torch.no_grad():
            return case.module(*case.args, **case.kwargs)

    def train() -> None:
        case.loss(case.module(*case.args, **case.kwargs)).backward()
        case.module.zero_grad(set_to_none=True)

    seed_everything()
    return train if mode == "training" else infer
