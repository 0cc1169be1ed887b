"""The functions that ranks run in test_engine.py: one LLM over all ranks."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from fulgurite.parallel import health
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
    folder: Path, shape: Shape, prompts: Tokens, seed: int
) -> tuple[dict[int, list[int]], bool]:
    """Requests come, go on and are cancelled at random through a small cache; what each got, and whether
    every block came back."""
    options = {"context": 48, "cache_tokens": 64, "max_sequences": 3, "max_batched_tokens": 7}
    replies: dict[int, list[int]] = {}
    with open_llm(folder, shape, **options) as llm:
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
