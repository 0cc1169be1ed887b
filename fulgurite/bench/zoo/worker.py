"""One row of the suite `zoo`, measured in a process of its own.

In: a `Job`. Out: a row: whether the compiled model agrees with eager, graph breaks, fallbacks, and the figures of
`candidates.py`. `run_job` is the process's main function; it sends the row through a pipe. Before it times anything it
sends `READY` and waits for an answer: workers prepare at the same time, and time one after the other.
"""

from __future__ import annotations

import copy
import faulthandler
import fcntl
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fulgurite
from fulgurite.bench.results import fresh_cache_environment
from fulgurite.bench.zoo.build import RUNNERS, Case
from fulgurite.bench.zoo.candidates import WARMUPS, describe_error, idle_memory, prepare, time_steps
from fulgurite.bench.zoo.catalog import Mode, ZooModel, build_case
from fulgurite.bench.zoo.compare import (
    HALF_MAX_EAGER_ERROR,
    HALF_TOLERANCE,
    MAX_EAGER_ERROR,
    TOLERANCE,
    find_differences,
    relative_error,
)
from fulgurite.bench.zoo.sizes import SIZES, Sizes

MAX_DIFFERENCES = 3  # named in a row
Row = dict[str, Any]


READY = "ready"


@dataclass(frozen=True)
class Job:
    """What a worker process measures, and its limits."""

    model: ZooModel
    mode: Mode
    device: str
    dtype: torch.dtype
    compare: tuple[str, ...]  # other compilers to time: names of `COMPILERS`
    timing_budget: float  # seconds; 0: check the results only
    memory_limit: int  # bytes of the process; 0: none
    log: str  # file for the process's output
    sizes: Sizes = SIZES["small"]

    def describe(self) -> Row:
        """What identifies the row."""
        return {
            "package": self.model.package,
            "family": self.model.family,
            "model": self.model.name,
            "mode": self.mode,
            "device": self.device,
            "size": self.sizes.name,
            "batch": self.sizes.batch,
            "layers": self.sizes.layers,
            "dtype": str(self.dtype).removeprefix("torch."),
            "torch": torch.__version__,
        }


def run_job(job: Job, connection: Connection) -> None:
    """Measure in this process and send the row. Output of the model goes to the job's log."""
    os.setsid()  # a kill of the group also ends compilers that this process started
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # the stack of a crash is in the log
    warnings.simplefilter("ignore")
    if job.memory_limit:
        resource.setrlimit(resource.RLIMIT_DATA, (job.memory_limit, job.memory_limit))
    if job.timing_budget:
        os.environ.update(fresh_cache_environment())  # first calls are cold

    def wait_for_turn() -> None:
        connection.send(READY)
        connection.recv()

    connection.send(measure(job, wait_for_turn))
    connection.close()


def measure(job: Job, wait_for_turn: Callable[[], None] = lambda: None) -> Row:
    """The row of a job. An exception of the model or of the compiler becomes its status."""
    row = job.describe()
    # TF32 would make eager's float32 convolutions too inexact to compare with
    if job.device == "cuda":
        torch.backends.cudnn.allow_tf32 = job.dtype != torch.float32
    try:
        case = build_case(job.model, job.mode, job.device, job.dtype, job.sizes)
        idle_bytes = idle_memory(case, job.mode) if job.timing_budget else 0
        reference = _Reference(case, job)
    except ImportError as problem:  # not in the installed version of the package
        return {**row, "status": "unavailable", "error": describe_error(problem)}
    except torch.OutOfMemoryError as problem:  # other workers may have used the memory
        return {**row, "status": "out of memory", "error": describe_error(problem)}
    except Exception as problem:  # whatever a model raises, its row says so
        return {**row, "status": "eager fails", "error": describe_error(problem)}
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
        if job.device.startswith("cuda") and not differences:  # CUDA graphs replay by then
            with alone_on_device(job):
                for _ in range(WARMUPS):
                    second = reference.run(replace(case, module=compiled))
            differences = reference.compare(second)
    except Exception as problem:  # the same: a failure is a row
        return {**row, "status": "failed", "error": describe_error(problem)}
    row |= _describe_compilation(compiled)
    if differences:
        return {**row, "status": "inaccurate", "error": _join(differences)}
    row["status"] = "pass"
    if job.timing_budget:
        del reference, first, second
        alone = partial(alone_on_device, job)
        figures, steps = prepare(case, job.mode, compiled, job.compare, idle_bytes, alone)
        wait_for_turn()
        row |= figures | {"fulgurite_first_s": row["first_s"]}
        row |= time_steps(steps, job.timing_budget, job.device)
    return row


@contextmanager
def alone_on_device(job: Job) -> Iterator[None]:
    """Workers of the same run take turns here. Their other work, mostly compilation, goes on."""
    with open(os.path.join(os.path.dirname(job.log), "device.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file, or the end of the process, gives it up
        yield


class _Reference:
    """Eager's result of a case and that of float64, and a comparison with them."""

    def __init__(self, case: Case, job: Job) -> None:
        self.is_half = job.dtype in (torch.float16, torch.bfloat16)
        self.tolerance = (HALF_TOLERANCE if self.is_half else TOLERANCE)[job.mode]
        self.max_error = HALF_MAX_EAGER_ERROR if self.is_half else MAX_EAGER_ERROR
        self.run_mode = RUNNERS[job.mode]
        self.buffers = {name: buffer.clone() for name, buffer in case.module.named_buffers()}
        self.exact = self._run_exactly(case)
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

    def _run_exactly(self, case: Case) -> dict[str, Tensor] | None:
        """The result in float64, or in float32 where an op has no float64 (grouped GEMMs).

        None if the model runs in neither, or in float32 only and that is its dtype; then only the tolerance decides.
        """
        wider = (torch.float64, torch.float32) if self.is_half else (torch.float64,)
        for dtype in wider:
            convert = partial(_to_dtype, dtype=dtype)
            args, kwargs = pytree.tree_map_only(Tensor, convert, (case.args, case.kwargs))
            module: nn.Module = copy.deepcopy(case.module).to(dtype)
            try:
                return self.run_mode(replace(case, module=module, args=args, kwargs=kwargs))
            except torch.OutOfMemoryError:
                raise  # without this reference, rounding would count as an error
            except (RuntimeError, TypeError, ValueError):
                del module
        return None


def _join(differences: list[str]) -> str:
    more = len(differences) - MAX_DIFFERENCES
    return "; ".join(differences[:MAX_DIFFERENCES]) + (f"; {more} more" if more > 0 else "")


def _to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()


def _describe_compilation(compiled: Any) -> Row:
    explanation = compiled.explain()
    graphs = [graph for one in explanation.graphs for graph in one.compiled_graphs]
    failed = [str(failure) for record in compiled.graphs for failure in record.fallbacks]
    return {
        "graphs": len(compiled.graphs),
        "kernels": sum(len(graph.kernels) for graph in graphs),
        "graph_breaks": len(compiled.breaks),
        "fallbacks": failed + explanation.fallbacks,
        "torch_ops": sorted({op for graph in graphs for op in _op_names(graph.torch_ops)}),
    }


def _op_names(ops: list[str]) -> list[str]:
    """`mm ×4` → `mm`, without calls that are no ops: Python's operators, regions."""
    return [op.split(" ×")[0] for op in ops if not op.startswith(("<", "Region(", "SubgraphCall("))]
