"""The functions that ranks run in test_async_scheduling.py: one LLM that launches steps ahead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fulgurite.parallel.dispatch import dispatcher
from fulgurite.parallel.dispatch.dispatcher import MAX_PADDED_ROWS
from fulgurite.serve.engine.engine_core import EngineCore
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel.engine_cases import PLAIN, Tokens, use_graphs

Axes = dict[str, int]


@dataclass(frozen=True)
class Found:
    """What a rank did. Replies and log-probabilities: on rank 0."""

    replies: Tokens
    logprobs: list[Any]
    most_in_flight: int
    num_ahead: int  # steps that were launched while another one was in flight
    num_steps: int
    unfinished: int
    used_blocks: int
    preemptions: int
    messages: int  # of rank 0 that are still at the store
    captured: tuple[int, ...]
    no_capture_reason: str | None


class LaunchRecorder:
    """Counts the launches of an engine."""

    def __init__(self, engine: EngineCore) -> None:
        self.most = self.ahead = self.steps = 0
        launch = engine.launch_step

        def record(*arguments: Any) -> bool:
            is_ahead = bool(engine.in_flight)
            is_launched = launch(*arguments)
            self.steps += is_launched
            self.ahead += is_launched and is_ahead
            self.most = max(self.most, len(engine.in_flight))
            return is_launched

        engine.launch_step = record  # type: ignore[method-assign]


def open_llm(folder: Path, axes: Axes, **options: Any) -> LLM:
    return LLM(folder, **axes, **{"timeout": 120.0, "async_scheduling": True} | PLAIN | options)


def generate(
    folder: Path,
    axes: Axes,
    prompts: Tokens,
    params: list[SamplingParams],
    options: dict[str, Any],
    with_graphs: bool = False,
    max_tokens: dict[int, int] | None = None,
    max_padded_rows: int = MAX_PADDED_ROWS,
) -> Found:
    """`with_graphs`: as a GPU captures steps. `max_tokens`: of a step for which a rank has memory.
    `max_padded_rows`: of a dispatch with equal splits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "MAX_PADDED_ROWS", max_padded_rows)
        return run_engine(folder, axes, prompts, params, options, with_graphs, max_tokens)


def run_engine(
    folder: Path,
    axes: Axes,
    prompts: Tokens,
    params: list[SamplingParams],
    options: dict[str, Any],
    with_graphs: bool,
    max_tokens: dict[int, int] | None,
) -> Found:
    replies: Tokens = []
    logprobs: list[Any] = []
    captured: list[Any] = []
    with open_llm(folder, axes, **options) as llm:
        assert llm.mesh is not None and llm.coordinator is not None
        engine, channel = llm.engine, llm.coordinator.channel
        if max_tokens is not None and llm.mesh.rank in max_tokens:
            limit = max_tokens[llm.mesh.rank]
            engine.memory.can_reserve = lambda tokens: tokens <= limit  # type: ignore[method-assign]
        recorder = LaunchRecorder(engine)
        if with_graphs:
            with use_graphs(llm, captured, [], fails=-1):
                run(llm, prompts, params, replies, logprobs)
        else:
            run(llm, prompts, params, replies, logprobs)
    return Found(
        replies,
        logprobs,
        recorder.most,
        recorder.ahead,
        recorder.steps,
        len(engine.requests),
        sum(pool.num_blocks - len(pool.free_blocks) for pool in engine.block_manager.pools),
        engine.scheduler.num_preemptions,
        channel.count - channel.num_released if llm.is_driver else 0,
        tuple(sorted({size for size, _ in captured})),
        engine.runner.no_capture_reason or engine.runner.eager_reason,
    )


def run(
    llm: LLM, prompts: Tokens, params: list[SamplingParams], replies: Tokens, logprobs: list[Any]
) -> None:
    if llm.is_driver:
        for one in llm.generate(prompts, params):
            replies.append(one.token_ids)
            logprobs.append(one.logprobs)
    llm.close()


def stream_and_cancel(folder: Path, axes: Axes, prompt: list[int]) -> tuple[Tokens, int, int]:
    """A stream that is left while two steps are in flight, then a whole reply. The steps in flight are
    dropped on all ranks. All: blocks in use, and steps in flight at the end."""
    replies: Tokens = []
    with open_llm(folder, axes) as llm:
        if llm.is_driver:
            params = SamplingParams(max_tokens=9, ignore_eos=True)
            for number, _ in enumerate(llm.stream(prompt, params)):
                if number == 3:
                    break
            replies = [one.token_ids for one in llm.generate([prompt, prompt[:3]], params)]
        llm.close()
        pools = llm.engine.block_manager.pools
    used = sum(pool.num_blocks - len(pool.free_blocks) for pool in pools)
    return replies, used, len(llm.engine.in_flight)
