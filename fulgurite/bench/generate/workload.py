"""The requests of `bench generate --model`: an engine and a workload in, seconds out.

Kernels may be compiled first, side by side (`compile_kernels`); then steps are timed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fulgurite.kernels.common.compile_ahead import can_compile_ahead
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import SamplingParams

PENALTIES = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.2)
MAX_COMPILE_THREADS = 16
ROUNDS = 3  # of settings that are compared


@dataclass(frozen=True)
class Workload:
    """What is run: tokens of a prompt, decode steps that are timed, and batch sizes."""

    prompt: int = 256
    steps: int = 24
    batches: tuple[int, ...] = (1, 64)

    @property
    def context(self) -> int:
        return self.prompt + 4 * self.steps + 64


def choose_compile_threads(wanted: int | None, device: torch.device) -> int:
    """Threads that compile kernels ahead; 1: kernels are compiled when they are first launched."""
    if device.type != "cuda" or not can_compile_ahead():
        return 1
    return min(MAX_COMPILE_THREADS, os.cpu_count() or 1) if wanted is None else wanted


def compile_kernels(engine: Engine, workload: Workload, threads: int) -> None:
    """Compile the kernels of all batch sizes at once, with and without penalties."""
    with engine.compile_ahead(threads):
        for batch in workload.batches:
            for params in (SamplingParams(), PENALTIES):
                params = replace(params, max_tokens=3, ignore_eos=True)
                prompts = [random_tokens(engine, workload.prompt) for _ in range(batch)]
                engine.generate(prompts, params)


def time_first_token(engine: Engine, prompt: int, repeats: int = 3) -> float:
    """Seconds from a request to its first token, the best of several."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    times = []
    for _ in range(repeats):
        engine.add_request(random_tokens(engine, prompt), params)
        start = time.perf_counter()
        while engine.has_unfinished_requests:
            engine.step()
        times.append(time.perf_counter() - start)
    return min(times)


def time_decode(
    engine: Engine,
    batch: int,
    workload: Workload,
    *params: SamplingParams,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of a decode step of `batch` requests for each of these params, medians.

    They take turns: a GPU that gets warm lowers its clock, and what is measured last looks slow.
    """
    times: list[list[float]] = [[] for _ in params]
    for _ in range(ROUNDS if len(params) > 1 else 1):
        for found, one in zip(times, params, strict=True):
            found += _time_steps(engine, batch, workload, one, clock)
    return [statistics.median(found) for found in times]


def _time_steps(
    engine: Engine,
    batch: int,
    workload: Workload,
    params: SamplingParams,
    clock: Callable[[], float],
) -> list[float]:
    """Seconds of each of `workload.steps` decode steps."""
    params = replace(params, max_tokens=4 * workload.steps, ignore_eos=True)
    for _ in range(batch):
        engine.add_request(random_tokens(engine, workload.prompt), params)
    while any(request.length == workload.prompt for request in engine.requests.values()):
        engine.step()
    for _ in range(3):  # warm up: the step of this batch size is captured
        engine.step()
    times = []
    for _ in range(workload.steps):
        start = clock()
        engine.step()
        times.append(clock() - start)
    for id in list(engine.requests):
        engine.cancel(id)
    while engine.has_unfinished_requests:
        engine.step()
    return times


def random_tokens(engine: Engine, count: int) -> list[int]:
    return [random.randrange(engine.model.config.vocab_size) for _ in range(count)]
