"""The functions that ranks run in test_pipeline.py: one LLM over pipeline stages."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulgurite.parallel import health
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel.engine_cases import PLAIN, Tokens, report_hang, use_graphs

Shape = tuple[int, int, int, int]  # pipeline, data, tensor, expert


@dataclass(frozen=True)
class Found:
    """What a rank has and did."""

    replies: Tokens
    unfinished: int
    layers: tuple[int, ...]  # that this rank has
    parameters: tuple[str, ...]
    weight_bytes: int
    cache_bytes: int
    used_blocks: int
    preemptions: int
    no_capture_reason: str | None


def open_llm(folder: Path, shape: Shape, **options: Any) -> LLM:
    pipeline, data, tensor, expert = shape
    axes = {"pipeline": pipeline, "data": data, "tensor": tensor, "expert": expert}
    return LLM(folder, **axes, **{"timeout": 60.0} | PLAIN | options)


def generate(
    folder: Path,
    shape: Shape,
    prompts: Tokens,
    params: list[SamplingParams],
    min_tokens: int,
    options: dict[str, Any],
) -> Found:
    """Rank 0: every reply. `min_tokens`: of a micro-batch."""
    with open_llm(folder, shape, **options) as llm:
        runner = llm.engine.runner.stage_runner
        assert runner is not None, "there are stages"
        runner.min_tokens = min_tokens
        replies: Tokens = []
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
    engine, stage = llm.engine, llm.model.stage
    assert stage is not None, "there are stages"
    return Found(
        replies,
        len(engine.requests),
        tuple(range(stage.start, stage.stop)),
        tuple(name for name, _ in llm.model.named_parameters()),
        sum(parameter.nbytes for parameter in llm.model.parameters()),
        engine.kv_cache.num_bytes,
        sum(pool.num_blocks - len(pool.free_blocks) for pool in engine.block_manager.pools),
        engine.scheduler.num_preemptions,
        engine.runner.no_capture_reason,
    )


def generate_with_graphs(
    folder: Path,
    axes: dict[str, int],
    prompts: Tokens,
    params: list[SamplingParams],
    min_tokens: int,
    options: dict[str, Any],
) -> tuple[Tokens, list[int], list[int]]:
    """Steps as a GPU captures them, with graphs that call the function. Rank 0: every reply. All: the
    sizes that were captured, and the requests of each replay."""
    replies: Tokens = []
    captured: list[tuple[int, tuple[bool, ...]]] = []
    replayed: list[int] = []
    with (
        LLM(folder, **axes, **{"timeout": 120.0} | PLAIN | options) as llm,
        use_graphs(llm, captured, replayed, fails=-1),
    ):
        assert llm.engine.runner.stage_runner is not None, "there are stages"
        llm.engine.runner.stage_runner.min_tokens = min_tokens
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
        llm.close()
        reason = llm.engine.runner.no_capture_reason or llm.engine.runner.eager_reason
        is_divided = min_tokens == 1  # and so not captured
        assert reason == (
            "steps of 2 requests run as several micro-batches" if is_divided else None
        )
    return replies, [size for size, _ in captured], replayed


def generate_captured_on_gpu(
    folder: Path, axes: dict[str, int], prompts: Tokens, params: list[SamplingParams]
) -> tuple[Tokens, str | None, list[int], int]:
    """Rank 0: every reply. All: why steps are not captured, the sizes that are, steps in flight."""
    replies: Tokens = []
    options = {"device": "cuda", "dtype": "float32", "timeout": 60.0} | PLAIN
    with report_hang(), LLM(folder, **axes, **options) as llm:
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
        llm.close()
        runner = llm.engine.runner
        captured = sorted(runner.captured_steps)
        return replies, runner.no_capture_reason, captured, llm.engine.max_in_flight


def die(folder: Path, victim: int, prompt: list[int]) -> str:
    """One stage is killed between two steps."""
    health.HEARTBEAT_TIMEOUT = 4.0  # what is patience on a busy machine is only waiting here
    llm = open_llm(folder, (2, 1, 1, 1))
    assert llm.mesh is not None, "two ranks"
    if llm.mesh.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if llm.is_driver:
        time.sleep(1)
        llm.generate([prompt], SamplingParams(max_tokens=5))
    llm.close()
    return "went on"


def stall(folder: Path, victim: int, prompt: list[int]) -> str:
    """One stage takes longer for its layers than others wait."""
    llm = open_llm(folder, (2, 1, 1, 1), timeout=6.0)
    assert llm.mesh is not None, "two ranks"
    if llm.mesh.rank == victim:
        run_layers = llm.model.run_layers

        def run_late(*arguments: Any) -> Any:
            time.sleep(20)
            return run_layers(*arguments)

        llm.model.run_layers = run_late  # type: ignore[method-assign]
    if llm.is_driver:
        llm.generate([prompt], SamplingParams(max_tokens=5))
    llm.close()
    return "went on"
