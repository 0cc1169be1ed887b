"""Log-probabilities of prompts over ranks: those of one rank, which are compared with transformers'."""

from __future__ import annotations

import pytest

from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel import engine_cases as cases
from tests.parallel.test_engine import folder as folder  # a fixture
from tests.parallel.test_engine import prompts, slow

COUNTS = (2, 0, None, 3, 1, 200)  # by prompt; one of them has a single token
PARAMS = [
    SamplingParams(max_tokens=1 + n, prompt_logprobs=count, ignore_eos=True)
    for n, count in enumerate(COUNTS)
]


def check(pool, path, axes, **options) -> None:
    """Twice the same prompts at once: the prefix cache may have the second ones."""
    asked, params = prompts() + prompts(), PARAMS + PARAMS
    found = pool.run(cases.generate_prompt_logprobs, path, axes, asked, params, options)
    wanted = LLM(path, **cases.PLAIN | options).generate(asked, params)
    for (tokens, logprobs), one in zip(found[0][0], wanted, strict=True):
        assert tokens == one.token_ids
        assert (logprobs is None) == (one.prompt_logprobs is None)
        for left, right in zip(logprobs or [], one.prompt_logprobs or [], strict=True):
            if left is None or right is None:
                assert left is right
                continue
            assert (left.token_id, left.rank) == (right.token_id, right.rank)
            assert [id for id, _ in left.top] == [id for id, _ in right.top]
            assert [left.logprob, *(p for _, p in left.top)] == pytest.approx(
                [right.logprob, *(p for _, p in right.top)], abs=1e-4
            )
    assert [{*held.values()} for _, held in found] == [{0}] * len(found)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("llama", {"tensor": 2}),
        ("llama", {"pipeline": 2}),
        ("llama", {"context_parallel": 2}),
        ("qwen3_moe", {"data": 2, "expert": 2}),
        slow("qwen3_next", {"pipeline": 2}),
        slow("gemma3", {"context_parallel": 2}),
        slow("deepseek_v3", {"tensor": 2, "expert": 2}),
    ],
    ids=str,
)
def test_over_two_ranks(ranks, folder, name, axes):
    check(ranks(2), folder(name), axes)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("qwen3_moe", {"pipeline": 2, "data": 2, "expert": 2}),
        ("llama", {"pipeline": 2, "context_parallel": 2}),
        slow("llama", {"data": 2, "tensor": 2}),
        slow("llama", {"data": 2, "context_parallel": 2}),
        slow("qwen3_moe", {"pipeline": 2, "tensor": 2, "expert": 2}),
    ],
    ids=str,
)
def test_over_four_ranks(ranks, folder, name, axes):
    check(ranks(4), folder(name), axes)


@pytest.mark.parametrize("axes", [{"pipeline": 2}, slow({"data": 2}), slow({"tensor": 2})], ids=str)
def test_steps_ahead(ranks, folder, axes):
    check(ranks(2), folder("llama"), axes, async_scheduling=True)
