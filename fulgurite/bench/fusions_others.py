"""Others beside our kernels: torch.compile's tuned mode, compiled ahead, and liger-kernel where it is installed.

In: cases of `fusion_cases` and `fusions_matmul`. Out: caches that are full, so that measuring does not wait for
compilers; and for a case the call of liger-kernel's function beside torch's with the same arguments. Nothing here
takes times of first calls: what is compiled ahead is compiled by many processes at once.
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

from fulgurite.bench import fusion_cases, fusions_matmul

# without CUDA graphs, which would copy inputs to a place of their own: that would be timed, too
AUTOTUNE = "max-autotune-no-cudagraphs"
WORKERS = max(1, min(14, (os.cpu_count() or 1) - 2))
LONGEST = 120.0  # seconds for all processes: what is not ready then is compiled when it is measured

# ---- compiling ahead -----------------------------------------------------------------------------


class Job(NamedTuple):
    """What torch.compile is asked for: a case of a group, in a mode (None: its default)."""

    group: str
    case: str
    mode: str | None


def compile_ahead(jobs: Sequence[Job]) -> None:
    """Fill Inductor's cache with these, by processes side by side; one that fails is told.

    Processes are dealt jobs in turn, so those that take longest should come first.
    """
    shares = [jobs[k::WORKERS] for k in range(WORKERS)]
    workers = [_start(share) for share in shares if share]
    end = time.monotonic() + LONGEST
    for worker in workers:
        try:
            _, errors = worker.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            _, errors = worker.communicate()
        if worker.returncode:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            print(f"compiling ahead failed ({worker.returncode}): {last}", flush=True)


def _start(share: Sequence[Job]) -> subprocess.Popen[str]:
    code = f"from fulgurite.bench.fusions_others import Job, compile_jobs; compile_jobs({share!r})"
    # as many processes as there are cores: none needs threads
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def compile_jobs(jobs: Sequence[Job]) -> None:
    """In a process of its own: call each compiled function once, which leaves it in the cache."""
    # takes a second, which only these processes need to wait for
    from torch._inductor.runtime.benchmarking import benchmarker

    lock = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "timing.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    benchmarker.benchmark_gpu = one_at_a_time(benchmarker.benchmark_gpu, lock)  # type: ignore[method-assign]
    known = functions()
    for group, case, mode in jobs:
        function, inputs = known[group, case]
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(function, mode=mode)(*inputs())


def one_at_a_time(time_kernel: Callable[..., Any], lock: Path) -> Callable[..., Any]:
    """Of all processes only one times a kernel: what the others tune is as if they were alone."""

    @functools.wraps(time_kernel)
    def alone(*args: Any, **named: Any) -> Any:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            return time_kernel(*args, **named)

    return alone


def functions() -> dict[tuple[str, str], tuple[Callable[..., Any], Callable[[], Sequence[Tensor]]]]:
    """Every function that a job may name, and what makes its inputs."""
    groups = {
        "forward": fusion_cases.forward(),
        "backward": fusion_cases.backward(),
        "sizes": fusion_cases.sizes(),
    }
    found: dict[tuple[str, str], Any] = {
        (group, case.name): (case.function, case.inputs)
        for group, cases in groups.items()
        for case in cases
    }
    for product in fusions_matmul.cases():
        inputs = functools.partial(fusions_matmul.inputs, product)
        found["matmul", product.name] = product.function, inputs
    return found


# ---- liger-kernel --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Twins:
    """One function twice, by torch and by liger-kernel, and how many arguments have gradients."""

    torch: Callable[..., Any]
    liger: Callable[..., Any]
    leaves: int


def liger_kernel() -> ModuleType | None:
    """Its functions, where it is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    return importlib.import_module("liger_kernel.transformers.functional")


def twins(liger: Any) -> dict[str, Twins]:
    """By the names of cases. The gradient of its cross entropy is made in forward: it has no backward."""
    return {
        "rms_norm": Twins(
            fusion_cases.rms_norm, lambda x, w: liger.liger_rms_norm(x, w, 1e-6), leaves=2
        ),
        "layer_norm": Twins(
            fusion_cases.layer_norm, lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5), leaves=3
        ),
        "softmax": Twins(lambda x: torch.softmax(x, -1), liger.liger_softmax, leaves=1),
        "silu_mul": Twins(lambda a, b: F.silu(a) * b, liger.liger_swiglu, leaves=2),
        "rope": Twins(rope_of_two, liger.liger_rope, leaves=2),
        "cross_entropy": Twins(F.cross_entropy, liger.liger_cross_entropy, leaves=0),
    }


def rope_of_two(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return fusion_cases.rope(q, cos, sin), fusion_cases.rope(k, cos, sin)


def calls_of(
    group: str, name: str, liger: Any, inputs: Sequence[Tensor]
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Calls of torch's function and of liger-kernel's on a case's inputs, None where it has none.

    Some of liger-kernel's write over what they read, so torch's is to be called first.
    """
    both = twins(liger).get(name)
    if both is None or (group == "backward" and not both.leaves):
        return None
    if group == "forward":
        arguments = two_heads(*inputs) if name == "rope" else tuple(inputs)
        return functools.partial(both.torch, *arguments), functools.partial(both.liger, *arguments)
    given, arguments = saved_by_forward(name, inputs)
    return tuple(backward_of(f, arguments, both.leaves, given) for f in (both.torch, both.liger))  # type: ignore[return-value]


def saved_by_forward(
    name: str, inputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A backward case's gradients of results, and the arguments of the function they are of."""
    g, *rest = inputs
    if name == "rope":
        q, k, cos, sin = two_heads(*inputs)
        return (q, k), (q.clone(), k.clone(), cos, sin)
    if name == "rms_norm":
        x, _, w = rest
        return (g,), (x, w)
    if name == "layer_norm":
        x, _, _, w = rest
        return (g,), (x, w, w)  # any bias: no gradient looks at it
    return (g,), tuple(rest)


def two_heads(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rope as liger-kernel wants it: half of the heads are keys, those of a token lie side by side,
    and both halves of cosine and sine are the same."""
    parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in q.chunk(2, 1)]
    angles = [torch.cat([t.chunk(2, -1)[0]] * 2, -1) for t in (cos, sin)]
    return parts[0], parts[1], angles[0], angles[1]


def backward_of(
    function: Callable[..., Any],
    arguments: Sequence[Tensor],
    leaves: int,
    given: tuple[Tensor, ...],
) -> Callable[[], tuple[Tensor, ...]]:
    """A call of the function's backward alone: forward is done here, and what it saves is kept."""
    wanted = [t.detach().requires_grad_() for t in arguments[:leaves]]
    with torch.enable_grad():
        results = function(*wanted, *arguments[leaves:])
    if isinstance(results, Tensor):
        results = (results,)
    return functools.partial(torch.autograd.grad, results, wanted, given, retain_graph=True)
