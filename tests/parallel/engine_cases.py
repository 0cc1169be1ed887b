"""The functions that ranks run in test_engine.py: one LLM over all ranks."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fulgurite.parallel import health
from fulgurite.serve.engine import captured_step
from fulgurite.serve.engine.captured_step import CapturedDecodeStep
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel.model_cases import Shape

Tokens = list[list[int]]
PLAIN = {"context": 64, "max_sequences": 4, "max_batched_tokens": 24, "cache_tokens": 160}


def open_llm(folder: Path, shape: Shape, **options: Any) -> LLM:
    data, tensor, expert = shape
    return LLM(
        folder, data=data, tensor=tensor, expert=expert, **{"timeout": 60.0} | PLAIN | options
    )


def generate(
    folder: Path,
    shape: Shape,
    prompts: Tokens,
    params: list[SamplingParams],
    options: dict[str, Any],
) -> tuple[Tokens, str | None, int]:
    """Rank 0: every reply. All: why steps are not captured, and how many requests are left."""
    with open_llm(folder, shape, **options) as llm:
        replies: Tokens = []
        if llm.is_driver:
            llm.engine.warm_up()
            replies = [one.token_ids for one in llm.generate(prompts, params)]
    return replies, llm.engine.runner.no_capture_reason, len(llm.engine.requests)


def generate_results(
    folder: Path, shape: Shape, prompts: Tokens, params: list[SamplingParams], **options: Any
) -> tuple[list[Any], dict[str, int], int]:
    """Rank 0: every result, and the replica of each request. All: how many requests are left."""
    results: list[Any] = []
    with open_llm(folder, shape, **options) as llm:
        replicas = watch_replicas(llm)
        if llm.is_driver:
            for one in llm.generate(prompts, params):
                results.append((one.token_ids, one.logprobs, one.finish_reason, one.text))
    return results, replicas, len(llm.engine.requests)


def generate_prompt_logprobs(
    folder: Path,
    axes: dict[str, int],
    prompts: Tokens,
    params: list[SamplingParams],
    options: dict[str, Any],
) -> tuple[list[Any], dict[str, int]]:
    """Rank 0: tokens and log-probabilities of every prompt. All: what the engine still holds."""
    results: list[Any] = []
    with LLM(folder, **axes, **{"timeout": 60.0} | PLAIN | options) as llm:
        runner = llm.engine.runner.stage_runner
        if runner is not None:
            runner.min_tokens = 1  # several micro-batches a step
        if llm.is_driver:
            results = [
                (one.token_ids, one.prompt_logprobs) for one in llm.generate(prompts, params)
            ]
    held = llm.engine.audit() if llm.is_driver else {"requests": len(llm.engine.requests)}
    return results, held


def generate_to_the_bit(
    folder: Path, shape: Shape, prompts: Tokens, params: list[SamplingParams], dtype: torch.dtype
) -> list[Any]:
    return generate_results(folder, shape, prompts, params, dtype=dtype, deterministic=True)[0]


def count_replicas(
    folder: Path, shape: Shape, prompts: Tokens, params: list[SamplingParams]
) -> tuple[list[int], Any, list[tuple[int, int, int]], list[float]]:
    """The same requests twice, one after another each time. Rank 0: cached tokens of the second time,
    the statistics of all, requests that run, that wait, and blocks in each step, and seconds until each
    request's first step."""
    cached: list[int] = []
    steps: list[tuple[int, int, int]] = []
    waited: list[float] = []
    stats: Any = None
    with open_llm(folder, shape, cache_tokens=320) as llm:
        if llm.is_driver:
            engine = llm.engine
            llm.generate(prompts, params)
            requests = [engine.add_request(*one) for one in zip(prompts, params, strict=True)]
            while engine.has_unfinished_requests:
                unfinished = len(engine.requests)
                engine.step()
                now = engine.stats()
                steps.append((now.running, now.waiting, now.used_cache_blocks))
                assert now.running + now.waiting == len(engine.requests) <= unfinished
            cached = [one.cached_tokens for one in requests]
            waited = [one.first_step_time - one.arrival_time for one in requests]
            stats = engine.stats()
    return cached, stats, steps, waited


def watch_replicas(llm: LLM) -> dict[str, int]:
    """The replica of each request, also after it ended."""
    coordinator, found = llm.coordinator, {}
    assert coordinator is not None
    add = coordinator.add_request

    def add_request(request: Any, prompt_ids: list[int]) -> None:
        add(request, prompt_ids)
        found[request.id] = coordinator.replica_of[request.id]

    coordinator.add_request = add_request  # type: ignore[method-assign]
    return found


def generate_with_graphs(
    folder: Path, shape: Shape, prompts: Tokens, params: list[SamplingParams], fails: int = -1
) -> tuple[Tokens, str | None, list[tuple[int, tuple[bool, ...]]], int, int]:
    """Steps as a GPU captures them, with graphs that call the function. On rank `fails` the third
    capture fails. Rank 0: every reply. All: why not captured; sizes and variants captured; replays
    without a request; most requests of a replay."""
    replies: Tokens = []
    captured: list[tuple[int, tuple[bool, ...]]] = []
    replayed: list[int] = []
    with open_llm(folder, shape) as llm, use_graphs(llm, captured, replayed, fails):
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
        llm.close()
        reason = llm.engine.runner.no_capture_reason
    return replies, reason, captured, replayed.count(0), max(replayed, default=0)


def generate_on_gpu(
    folder: Path,
    shape: Shape,
    prompts: Tokens,
    params: list[SamplingParams],
    is_captured: bool,
    options: dict[str, Any],
) -> tuple[Tokens, str | None, list[int]]:
    """Rank 0: every reply. All: why steps are not captured, and the sizes that are."""
    replies: Tokens = []
    with report_hang(), open_llm(folder, shape, device="cuda", **options) as llm:
        if not is_captured:
            llm.engine.runner.no_capture_reason = "this test compares with eager steps"
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
        llm.close()
        runner = llm.engine.runner
        return replies, runner.no_capture_reason, sorted(runner.captured_steps)


@contextmanager
def report_hang(seconds: float = 100.0) -> Iterator[None]:
    """Print the stacks of a rank that takes longer, and end it: the other ranks then end, too."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=1)  # pytest prints captured stdout
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def use_graphs(
    llm: LLM, captured: list[tuple[int, tuple[bool, ...]]], replayed: list[int], fails: int
) -> Iterator[None]:
    runner, mesh = llm.engine.runner, llm.mesh
    assert mesh is not None
    runner.no_capture_reason = None
    runner.graph_pool = SimpleNamespace(handle=None, stream=None)  # type: ignore[assignment]
    capture = CapturedDecodeStep._capture_cuda_graph
    call = CapturedDecodeStep.__call__

    def capture_graph(step: Any, *, warmups: int, **options: object) -> SimpleNamespace:
        for _ in range(warmups):  # they communicate
            step()
        if mesh.rank == fails and len(captured) == 3:
            raise RuntimeError("no graph today")
        return SimpleNamespace(replay=step)

    def record_capture(self: CapturedDecodeStep, variant: Any) -> Any:
        captured.append((self.batch_size, tuple(variant)))
        return capture(self, variant)

    def record_call(self: CapturedDecodeStep, chunks: Any, *rest: Any) -> Any:
        replayed.append(len(chunks))
        return call(self, chunks, *rest)

    get_step = runner._get_captured_step
    runner._get_captured_step = lambda n, variant: get_step(runner.captured_size(n), variant)  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_step, "capture_graph", capture_graph)
        patch.setattr(CapturedDecodeStep, "_capture_cuda_graph", record_capture)
        patch.setattr(CapturedDecodeStep, "__call__", record_call)
        yield


def count_collectives(folder: Path, shape: Shape, prompt: list[int]) -> dict[str, int]:
    """Host collectives by label while a reply of 20 tokens decodes, after a first one."""
    counts: dict[str, int] = {}
    with open_llm(folder, shape) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        if llm.is_driver and llm.mesh is not None and llm.mesh.health is not None:
            llm.generate([prompt], params)
            run = llm.mesh.health.run_collective

            def count(label: str, *arguments: Any, **named: Any) -> None:
                counts[label] = counts.get(label, 0) + 1
                run(label, *arguments, **named)

            llm.mesh.health.run_collective = count  # type: ignore[method-assign]
            llm.generate([prompt], params)
            del llm.mesh.health.run_collective
    return counts


def generate_with_little_memory(
    folder: Path, shape: Shape, prompts: Tokens, params: list[SamplingParams], victim: int
) -> tuple[Tokens, int]:
    """One rank has memory for 5 tokens a step. Rank 0: every reply. All: the limit at the end."""
    with open_llm(folder, shape) as llm:
        memory = llm.engine.memory
        if llm.mesh is not None and llm.mesh.rank == victim:
            memory.can_reserve = lambda tokens: tokens <= 5  # type: ignore[method-assign]
        replies: Tokens = []
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
    return replies, llm.engine.scheduler.max_batched_tokens


def cancel_and_go_on(folder: Path, shape: Shape, prompt: list[int]) -> tuple[Tokens, int]:
    """A stream that is left early, one request in the middle of another, and then a whole reply."""
    with open_llm(folder, shape) as llm:
        replies: Tokens = []
        if llm.is_driver:
            params = SamplingParams(max_tokens=9, ignore_eos=True)
            for number, _ in enumerate(llm.stream(prompt, params)):
                if number == 3:
                    break
            time.sleep(1.2)  # the others look around while they wait
            replies = [one.token_ids for one in llm.generate([prompt, prompt[:3]], params)]
            blocks = [len(pool.free_blocks) for pool in llm.engine.block_manager.pools]
        else:
            llm.close()
            blocks = [len(pool.free_blocks) for pool in llm.engine.block_manager.pools]
    return replies, sum(blocks)


def die(folder: Path, shape: Shape, victim: int, prompt: list[int]) -> str:
    """One rank is killed between two steps."""
    health.HEARTBEAT_TIMEOUT = 4.0  # what is patience on a busy machine is only waiting here
    llm = open_llm(folder, shape)
    if llm.mesh is not None and llm.mesh.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if llm.is_driver:
        time.sleep(1)
        llm.generate([prompt], SamplingParams(max_tokens=5))
    llm.close()
    return "went on"


def ask_on_every_rank(folder: Path) -> str:
    """The error on a rank that may not submit requests."""
    with open_llm(folder, (1, 2, 1)) as llm:
        if llm.is_driver:
            return ""
        try:
            llm.generate([[1, 2]])
        except ValueError as error:
            return str(error)
    return "no error"


def soak(
    folder: Path, shape: Shape, prompts: Tokens, seed: int, options: dict[str, Any] | None = None
) -> tuple[dict[int, list[int]], bool]:
    """Requests come, go on and are cancelled at random through a small cache; what each got, and whether
    every block came back."""
    limits = {"context": 48, "cache_tokens": 64, "max_sequences": 3, "max_batched_tokens": 7}
    replies: dict[int, list[int]] = {}
    with open_llm(folder, shape, **limits, **options or {}) as llm:
        if llm.is_driver:
            chance, waiting, engine = random.Random(seed), dict(enumerate(prompts)), llm.engine
            while waiting or engine.has_unfinished_requests:
                if waiting and chance.random() < 0.4:
                    number, prompt = waiting.popitem()
                    params = SamplingParams(max_tokens=3 + number % 9, ignore_eos=True)
                    engine.add_request(prompt, params, id=str(number))
                if engine.requests and chance.random() < 0.05:
                    engine.cancel(chance.choice([*engine.requests]))
                for update in engine.step():
                    replies.setdefault(int(update.id), []).extend(update.token_ids)
    free = [len(pool.free_blocks) == pool.num_blocks for pool in llm.engine.block_manager.pools]
    return replies, all(free) and not llm.engine.requests
