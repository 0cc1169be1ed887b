"""The engine on a GPU: the same tokens as on the CPU, captured steps, memory as planned."""

from __future__ import annotations

import random

import pytest
import torch

from fulgurite.serve.engine.request import Result, SamplingParams
from tests.serve.engine.test_sequential_oracle import EOS, VOCAB, Alternating, random_params
from tests.serve.engines import check_idle, make_engine, tiny_model

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(seed, seed + length)) for seed, length in enumerate((3, 17, 30, 8, 1))]


@pytest.mark.parametrize("fixed", [True, False])
def test_the_same_tokens_as_on_the_cpu(fixed: bool) -> None:
    params = [
        SamplingParams(max_tokens=20 + index, ignore_eos=True, temperature=index % 2, seed=index)
        for index in range(len(PROMPTS))
    ]
    model = tiny_model()
    wanted = make_engine(model, max_batched_tokens=11).generate(PROMPTS, params)
    engine = make_engine(model.to("cuda"), max_batched_tokens=11)
    if not fixed:
        engine.runner.no_capture_reason = "a test"
    got = engine.generate(PROMPTS, params)
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
    if fixed and engine.runner.no_capture_reason is None:
        assert set(engine.runner.captured_steps) == {1, 2, 4, 8}
    check_idle(engine)


def test_an_idle_engine_captures_the_steps_of_later_requests() -> None:
    model = tiny_model()
    params = [SamplingParams(max_tokens=12 + 4 * index) for index in range(len(PROMPTS))]
    wanted = make_engine(model).generate(PROMPTS, params)
    engine = make_engine(model.to("cuda"), max_sequences=6)
    engine.warm_up()
    while engine.prepare_step():
        pass
    assert set(engine.runner.captured_steps) == {1, 2, 4, 8}
    graphs = {size: dict(step.graphs) for size, step in engine.runner.captured_steps.items()}
    got = engine.generate(PROMPTS, params)
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
    after = {size: dict(step.graphs) for size, step in engine.runner.captured_steps.items()}
    assert after == graphs
    check_idle(engine)


def test_planned_memory_matches_measured() -> None:
    """Within 5% of the most that was allocated."""
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()  # so that the first matmul asks for its own
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = tiny_model(
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=8,
        vocab_size=32000,
        max_position_embeddings=2048,
    ).to("cuda", torch.bfloat16)
    engine = make_engine(
        model, context=2048, max_sequences=4, max_batched_tokens=2048, block_size=16
    )
    prompts = [[seed, *range(2000)] for seed in range(4)]
    engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    measured = torch.cuda.max_memory_allocated() - before
    print(
        engine.plan.format_table(),
        f"\nmeasured {measured / 2**20:.1f} MiB",
        engine.runner.no_capture_reason,
    )
    assert 0.95 * measured < engine.plan.total < 1.05 * measured


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_sampling_on_the_device(captured: bool, async_scheduling: bool) -> None:
    """Random parameters, a grammar and preemptions: tokens of a CPU that runs steps in order."""
    rng, model = random.Random(1), tiny_model()
    prompts = [rng.choices(range(VOCAB), k=rng.randrange(1, 16)) for _ in range(24)]
    params = [random_params(rng) for _ in prompts]
    found = []
    for device in ("cpu", "cuda"):
        engine = make_engine(
            model.to(device),
            context=48,
            max_sequences=6,
            cache_tokens=128,
            async_scheduling=async_scheduling and device == "cuda",
        )
        engine.eos_token_ids = EOS
        if not captured:
            engine.runner.no_capture_reason = "a test"
        results: dict[str, Result] = {}
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            constraint = Alternating(packed=index % 10 == 0) if index % 5 == 0 else None
            engine.add_request(prompt, one, id=f"{index}", constraint=constraint)
        while engine.has_unfinished_requests:
            for update in engine.step():
                if update.result is not None:
                    results[update.id] = update.result
        check_idle(engine)
        found.append([results[f"{index}"] for index in range(len(prompts))])
    for wanted, got in zip(*found, strict=True):
        assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        for a, b in zip(got.logprobs or (), wanted.logprobs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_a_step_ahead_does_not_wait_for_the_device() -> None:
    """Decode steps are launched without a synchronization."""
    engine = make_engine(tiny_model().to("cuda"))
    penalized = SamplingParams(max_tokens=60, ignore_eos=True, presence_penalty=0.5)
    sampled = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, top_p=0.9, seed=1)
    for prompt, params in zip(PROMPTS, [penalized, sampled] * 3, strict=False):
        engine.add_request(prompt, params)
    for _ in range(8):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert engine._launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for id in list(engine.requests):
        engine.cancel(id)
    check_idle(engine)
