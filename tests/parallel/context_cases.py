"""The functions that ranks run in test_context.py: one LLM whose sequences are over several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from fulgurite.parallel import Mesh
from fulgurite.parallel.context import ContextParallel, merge_shards
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel.engine_cases import PLAIN, Tokens, report_hang, use_graphs
from tests.ranks import open_once


class Found(NamedTuple):
    """What a rank has and did. `cached_tokens`: of the last prompt, asked again."""

    replies: Tokens
    unfinished: int
    cache_bytes: int
    planned_bytes: int
    used_blocks: int
    preemptions: int
    cached_tokens: list[int]


def generate(
    folder: Path,
    axes: dict[str, int],
    prompts: Tokens,
    params: list[SamplingParams],
    options: dict[str, Any],
) -> Found:
    """Rank 0: every reply."""
    replies: Tokens = []
    cached: list[int] = []
    with LLM(folder, **axes, **{"timeout": 60.0} | PLAIN | options) as llm:
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
            cached = [one.cached_tokens for one in llm.generate(prompts[-1:], params[-1])]
    engine = llm.engine
    return Found(
        replies,
        len(engine.requests),
        engine.kv_cache.num_bytes,
        engine.plan.kv_cache,
        sum(pool.num_blocks - len(pool.free_blocks) for pool in engine.block_manager.pools),
        engine.scheduler.num_preemptions,
        cached,
    )


def generate_with_graphs(
    folder: Path, axes: dict[str, int], prompts: Tokens, params: list[SamplingParams]
) -> tuple[Tokens, list[int]]:
    """Steps as a GPU captures them, with graphs that call the function (`engine_cases.use_graphs`).
    Rank 0: every reply. All: the sizes that were captured."""
    replies: Tokens = []
    captured: list[tuple[int, tuple[bool, ...]]] = []
    replayed: list[int] = []
    with (
        LLM(folder, **axes, **{"timeout": 60.0} | PLAIN) as llm,
        use_graphs(llm, captured, replayed, fails=-1),
    ):
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
        llm.close()
    assert replayed, llm.engine.runner.no_capture_reason
    return replies, [size for size, _ in captured]


def generate_captured_on_gpu(
    folder: Path, prompts: Tokens, params: list[SamplingParams], options: dict[str, Any]
) -> tuple[Tokens, str | None, list[int]]:
    """Rank 0: every reply. All: why steps are not captured, and the sizes that are."""
    replies: Tokens = []
    options = {"timeout": 60.0} | PLAIN | options
    with report_hang(), LLM(folder, context_parallel=2, device="cuda", **options) as llm:
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
        llm.close()
        runner = llm.engine.runner
        return replies, runner.no_capture_reason, sorted(runner.captured_steps)


def exchange(tokens: int) -> str:
    """What is wrong with the exchange of so many tokens; each rank knows what all of them have."""
    mesh = open_once("context", lambda: Mesh(context=4, timeout=60))
    context = ContextParallel(mesh.context)
    start, stop = context.local_range(tokens)
    x_TD = torch.arange(tokens * 3.0).view(tokens, 3)
    if not torch.equal(context.gather_tokens(x_TD[start:stop], tokens), x_TD):
        return "gather_tokens"
    rows = [row for row in range(tokens) if row % 3 != 1]
    if not torch.equal(context.gather_rows(x_TD[start:stop], rows, tokens), x_TD[rows]):
        return "gather_rows"
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        out_CTNV = torch.randn(4, tokens, 2, 5, generator=generator).to(dtype)
        lse_CTN = torch.randn(4, tokens, 2, generator=generator)
        mine = context.merge_outputs(out_CTNV[context.index], lse_CTN[context.index])
        if not torch.equal(mine, merge_shards(out_CTNV, lse_CTN)[start:stop]):
            return f"merge_outputs in {dtype}"
    return ""
