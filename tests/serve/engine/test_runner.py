"""Captured decode steps: when they run, what padding does, which ones stay cached."""

from __future__ import annotations

import pytest

from fulgurite.models import CausalLM
from fulgurite.serve.engine import runner
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import SamplingParams
from tests.serve.engines import check_idle, make_engine, quantized_model


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return quantized_model()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def texts(engine: Engine, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    return [one.token_ids for one in engine.generate(prompts, [greedy(n) for n in counts])]


def test_padding_does_not_write_to_blocks(model: CausalLM) -> None:
    """On a GPU three requests run in the step of four: the fourth's blocks may be somebody's by then."""
    engine = make_engine(
        model, max_sequences=4, max_batched_tokens=16, cache_tokens=96, prefix_caching=False
    )
    get_step = engine.runner._get_captured_step
    engine.runner._get_captured_step = lambda num_requests: get_step(4)  # type: ignore[method-assign]
    prompts = [[seed, *range(seed, seed + 3 + seed % 5)] for seed in range(12)]
    counts = [3 + 5 * (seed % 4) for seed in range(12)]
    got = texts(engine, prompts, counts)
    assert set(engine.runner.captured_steps) == {4} and engine.runner.no_capture_reason is None
    check_idle(engine)
    plain = make_engine(model, max_sequences=1, prefix_caching=False)
    plain.runner.no_capture_reason = "a test"
    assert got == [texts(plain, [p], [n])[0] for p, n in zip(prompts, counts, strict=True)]


def test_one_prompt_token_is_not_a_decode_step(model: CausalLM) -> None:
    """A prompt prefilled a token at a time, next to a decoding request, samples only at its end."""
    engine = make_engine(model, max_sequences=2, max_batched_tokens=2)
    prompts, counts = [[1], list(range(20, 29))], [14, 4]
    alone = make_engine(model, max_sequences=1, prefix_caching=False)
    wanted = [texts(alone, [p], [n])[0] for p, n in zip(prompts, counts, strict=True)]
    assert texts(engine, prompts, counts) == wanted


def test_least_recently_used_captured_step_is_dropped(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_CAPTURED_STEPS", 2)
    engine = make_engine(model)
    for requests, cached in ((1, [1]), (2, [1, 2]), (1, [2, 1]), (3, [1, 3]), (1, [3, 1])):
        prompts = [[seed, 5] for seed in range(requests)]
        texts(engine, prompts, [3] * requests)
        assert list(engine.runner.captured_steps) == cached
