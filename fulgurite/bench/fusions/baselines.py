"""Baselines of the GPU fusion suite: torch.compile with max-autotune, and liger-kernel if it is installed.

In: cases of `gpu_cases` and `gemm_epilogues`. Out: a filled Inductor cache, so that measuring does not wait for
compilers; and calls of liger-kernel's function and torch's with the same arguments. First calls are not timed here:
precompilation uses many processes at once.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.bench.fusions import gemm_epilogues, gpu_cases

# no CUDA graphs: copying inputs into static buffers would be timed, too
AUTOTUNE = "max-autotune-no-cudagraphs"
WORKERS = max(1, min(14, (os.cpu_count() or 1) - 2))
TIMEOUT_SECONDS = 120.0  # for all processes; what is not ready then is compiled when it is measured

# ---- compiling ahead -----------------------------------------------------------------------------


class Job(NamedTuple):
    """One compilation: a case of a group, in a mode of torch.compile (None: the default)."""

    group: str
    case: str
    mode: str | None


def precompile(jobs: Sequence[Job]) -> None:
    """Compile the jobs in parallel processes, which fills Inductor's cache; failures are printed.

    Jobs are dealt round-robin, so the longest ones should come first.
    """
    batches = [jobs[k::WORKERS] for k in range(WORKERS)]
    workers = [_start_worker(batch) for batch in batches if batch]
    end = time.monotonic() + TIMEOUT_SECONDS
    for worker in workers:
        try:
            _, errors = worker.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            _, errors = worker.communicate()
        if worker.returncode:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            print(f"precompilation failed ({worker.returncode}): {last}", flush=True)


def _start_worker(batch: Sequence[Job]) -> subprocess.Popen[str]:
    code = (
        f"from fulgurite.bench.fusions.baselines import Job, compile_jobs; compile_jobs({batch!r})"
    )
    # one process per core: none needs threads
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def compile_jobs(jobs: Sequence[Job]) -> None:
    """Runs in a worker process: calls each compiled function once, which fills the cache."""
    # imported here: it takes a second, and only worker processes need it
    from torch._inductor.runtime.benchmarking import benchmarker

    lock = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "timing.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    benchmarker.benchmark_gpu = serialize_timing(benchmarker.benchmark_gpu, lock)  # type: ignore[method-assign]
    known = find_functions()
    for group, case, mode in jobs:
        function, inputs = known[group, case]
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(function, mode=mode)(*inputs())


def serialize_timing(time_kernel: Callable[..., Any], lock: Path) -> Callable[..., Any]:
    """Only one process times kernels at a time, so that autotuning is not disturbed."""

    @functools.wraps(time_kernel)
    def alone(*args: Any, **named: Any) -> Any:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            return time_kernel(*args, **named)

    return alone


def find_functions() -> dict[
    tuple[str, str], tuple[Callable[..., Any], Callable[[], Sequence[Tensor]]]
]:
    """(group, case) → function and input factory, for every case that a job may name."""
    groups = {
        "forward": gpu_cases.forward_cases(),
        "backward": gpu_cases.backward_cases(),
        "sizes": gpu_cases.size_cases(),
    }
    found: dict[tuple[str, str], Any] = {
        (group, case.name): (case.function, case.inputs)
        for group, cases in groups.items()
        for case in cases
    }
    for product in gemm_epilogues.gemm_cases():
        inputs = functools.partial(gemm_epilogues.make_inputs, product)
        found["matmul", product.name] = product.function, inputs
    return found


# ---- liger-kernel --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counterpart:
    """The same function in torch and in liger-kernel; the first `leaves` arguments have gradients."""

    torch: Callable[..., Any]
    liger: Callable[..., Any]
    leaves: int


def import_liger() -> ModuleType | None:
    """liger-kernel's functional module, or None if it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    return importlib.import_module("liger_kernel.transformers.functional")


def liger_counterparts(liger: Any) -> dict[str, Counterpart]:
    """Case name → counterpart. liger's cross entropy computes its gradient in forward: no backward case."""
    return {
        "rms_norm": Counterpart(
            gpu_cases.rms_norm, lambda x, w: liger.liger_rms_norm(x, w, 1e-6), leaves=2
        ),
        "layer_norm": Counterpart(
            gpu_cases.layer_norm, lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5), leaves=3
        ),
        "softmax": Counterpart(lambda x: torch.softmax(x, -1), liger.liger_softmax, leaves=1),
        "silu_mul": Counterpart(lambda a, b: F.silu(a) * b, liger.liger_swiglu, leaves=2),
        "rope": Counterpart(rope_qk, liger.liger_rope, leaves=2),
        "cross_entropy": Counterpart(F.cross_entropy, liger.liger_cross_entropy, leaves=0),
    }


def rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return gpu_cases.rope(q, cos, sin), gpu_cases.rope(k, cos, sin)


def bind_calls(
    group: str, name: str, liger: Any, inputs: Sequence[Tensor]
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Calls of torch's and of liger-kernel's function on the inputs of a case; None where it has none.

    Some functions of liger-kernel overwrite their inputs: call torch's first.
    """
    both = liger_counterparts(liger).get(name)
    if both is None or (group == "backward" and not both.leaves):
        return None
    if group == "forward":
        arguments = split_query_key(*inputs) if name == "rope" else tuple(inputs)
        return functools.partial(both.torch, *arguments), functools.partial(both.liger, *arguments)
    given, arguments = split_backward_inputs(name, inputs)
    return tuple(bind_backward(f, arguments, both.leaves, given) for f in (both.torch, both.liger))  # type: ignore[return-value]


def split_backward_inputs(
    name: str, inputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(output gradients, forward arguments) of a backward case."""
    g, *rest = inputs
    if name == "rope":
        q, k, cos, sin = split_query_key(*inputs)
        return (q, k), (q.clone(), k.clone(), cos, sin)
    if name == "rms_norm":
        x, _, w = rest
        return (g,), (x, w)
    if name == "layer_norm":
        x, _, _, w = rest
        return (g,), (x, w, w)  # any bias: gradients do not depend on it
    return (g,), tuple(rest)


def split_query_key(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RoPE inputs in liger-kernel's layout: half of the heads are keys, heads of a token are adjacent,
    and both halves of cos and sin are equal."""
    parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in q.chunk(2, 1)]
    angles = [torch.cat([t.chunk(2, -1)[0]] * 2, -1) for t in (cos, sin)]
    return parts[0], parts[1], angles[0], angles[1]


def bind_backward(
    function: Callable[..., Any],
    arguments: Sequence[Tensor],
    leaves: int,
    given: tuple[Tensor, ...],
) -> Callable[[], tuple[Tensor, ...]]:
    """A call that runs only the backward: forward runs here, and its saved tensors are retained."""
    wanted = [t.detach().requires_grad_() for t in arguments[:leaves]]
    with torch.enable_grad():
        results = function(*wanted, *arguments[leaves:])
    if isinstance(results, Tensor):
        results = (results,)
    return functools.partial(torch.autograd.grad, results, wanted, given, retain_graph=True)
