"""Captured decode steps: when they run, what padding does, which ones stay cached."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fulgurite import replay
from fulgurite.errors import ReplayError
from fulgurite.models import CausalLM
from fulgurite.serve.engine import captured_step, recorded_step, runner
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.recorded_step import RecordedStep, StepShape
from fulgurite.serve.engine.request import SamplingParams
from tests.serve.engine.test_sequential_oracle import EOS, VOCAB, random_params
from tests.serve.engines import check_idle, make_engine, quantized_model


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return quantized_model()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def texts(engine: Engine, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    return [one.token_ids for one in engine.generate(prompts, [greedy(n) for n in counts])]


def test_padding_does_not_write_to_blocks(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU three requests run in the step of four: the fourth's blocks may be somebody's by then."""
    engine = make_engine(
        model, max_sequences=4, max_batched_tokens=16, cache_tokens=96, prefix_caching=False
    )
    use_fake_graphs(engine, monkeypatch)
    engine.runner.captured_size = lambda num_requests: 4  # type: ignore[method-assign]
    prompts = [[seed, *range(seed, seed + 3 + seed % 5)] for seed in range(12)]
    counts = [3 + 5 * (seed % 4) for seed in range(12)]
    got = texts(engine, prompts, counts)
    assert set(engine.runner.captured_steps) == {4} and engine.runner.no_capture_reason is None
    check_idle(engine)
    plain = make_engine(model, max_sequences=1, prefix_caching=False)
    plain.runner.no_capture_reason = "a test"
    assert got == [texts(plain, [p], [n])[0] for p, n in zip(prompts, counts, strict=True)]


def test_captured_steps_have_at_most_max_sequences_requests(model: CausalLM) -> None:
    """Buffers are planned for steps of that size."""
    runner = make_engine(model, max_sequences=6).runner
    assert [runner.captured_size(count) for count in range(1, 7)] == [1, 2, 4, 4, 6, 6]


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
        prompts = [[seed] for seed in range(requests)]
        texts(engine, prompts, [3] * requests)
        assert [shape.num_tokens for shape in engine.runner.recorded_steps] == cached


def count_layer_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each run of all layers by Python in a recorded step."""
    runs: list[int] = []
    run_layers = RecordedStep._run_layers

    def count(step: RecordedStep, *inputs: Any) -> Tensor:
        runs.append(step.shape.num_tokens)
        return run_layers(step, *inputs)

    monkeypatch.setattr(RecordedStep, "_run_layers", count)
    return runs


def test_a_new_batch_size_delays_no_step_on_a_cpu(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step runs the layers once: eagerly, then recorded, then replayed."""
    prompts, wanted = [[3, 5], [4, 5], [5, 5]], [9, 9, 9]
    plain = make_engine(model)
    plain.runner.no_capture_reason = "a test"
    engine, runs = make_engine(model), count_layer_runs(monkeypatch)
    for prompt in prompts:
        engine.add_request(prompt, greedy(9))
    per_step = []
    while engine.has_unfinished_requests:
        before = len(runs)
        engine.step()
        per_step.append(len(runs) - before)
    prefill, *decode = per_step
    assert prefill == 1
    assert decode == [1] * (recorded_step.WARMUPS + 1) + [0] * (8 - recorded_step.WARMUPS - 1)
    assert engine.runner.recorded_steps[StepShape(3, 3)].replay is not None
    assert texts(make_engine(model), prompts, wanted) == texts(plain, prompts, wanted)


def test_a_step_that_can_not_be_recorded_is_not_run_again(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with states would add its tokens twice."""

    def refuse(names: Sequence[str]) -> None:
        raise ReplayError("aten::cumsum computes something outside of native kernels")

    monkeypatch.setattr(replay, "_check_no_computation", refuse)
    plain = make_engine(model)
    plain.runner.no_capture_reason = "a test"
    engine, runs = make_engine(model), count_layer_runs(monkeypatch)
    assert texts(engine, [[3, 5]], [9]) == texts(plain, [[3, 5]], [9])
    assert runs == [2] + [1] * (recorded_step.WARMUPS + 1)  # the prompt, then its next tokens
    assert "aten::cumsum" in str(engine.stats().no_capture_reason)


def test_the_warm_up_captures_steps_of_one_request(model: CausalLM) -> None:
    engine = make_engine(model)
    engine.warm_up()
    assert engine.runner.recorded_steps[StepShape(1, 1)].replay is not None


def test_mixed_steps_are_recorded_with_the_same_bits(model: CausalLM) -> None:
    """Chunks of prompts beside next tokens, some padded; with several divisions into sequences."""
    rng = random.Random(5)
    prompts = [rng.choices(range(VOCAB), k=rng.choice([2, 3, 30, 57, 80])) for _ in range(24)]
    params = [random_params(rng) for _ in prompts]
    plain, engine = (make_engine(model, max_sequences=6, max_batched_tokens=48) for _ in range(2))
    plain.scheduler.max_mixed_tokens = engine.scheduler.max_mixed_tokens = 21
    plain.runner.no_capture_reason = "a test"
    found = [
        [(one.token_ids, one.logprobs) for one in each.generate(prompts, params)]
        for each in (plain, engine)
    ]
    assert found[0] == found[1]
    for layer, keys in engine.kv_cache.key_caches.items():  # padding writes none
        assert torch.equal(keys, plain.kv_cache.key_caches[layer])
    recorded = {s for s, step in engine.runner.recorded_steps.items() if step.replay is not None}
    mixed = {shape.num_tokens for shape in recorded if not shape.is_decode}
    assert 24 in mixed and any(shape.is_decode for shape in recorded)
    check_idle(engine)


def use_fake_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a GPU captures, with graphs that call the function; returns the functions captured."""
    captured: list[object] = []

    def capture(step, *, warmups: int, **options: object) -> SimpleNamespace:
        captured.append(step)
        for _ in range(warmups):  # must change no request
            step()
        return SimpleNamespace(replay=step)

    monkeypatch.setattr(captured_step, "capture_graph", capture)
    engine.runner.graph_pool = SimpleNamespace(handle=None, stream=None)  # type: ignore[assignment]
    return captured


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_graphs_of_all_sampling_variants(
    model: CausalLM, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded batches and pending tokens."""
    rng = random.Random(2)
    prompts = [rng.choices(range(VOCAB), k=rng.randrange(1, 9)) for _ in range(10)]
    params = [random_params(rng) for _ in prompts]
    params[:2] = greedy(4), SamplingParams(temperature=1.0, seed=1, max_tokens=19)
    plain = make_engine(model, max_sequences=1)
    engine = make_engine(model, async_scheduling=async_scheduling)
    captured = use_fake_graphs(engine, monkeypatch)
    plain.eos_token_ids = engine.eos_token_ids = EOS
    wanted = plain.generate(prompts, params)
    found = engine.generate(prompts[:2], params[:2]) + engine.generate(prompts[2:], params[2:])
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in wanted]
    assert len(captured) == sum(len(s.graphs) for s in engine.runner.captured_steps.values()) > 4
    check_idle(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_graph_that_is_captured_while_requests_run(
    model: CausalLM, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up calls must not count the tokens of the step before once more."""
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, frequency_penalty=0.4),
        greedy(5),
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, top_k=9, seed=4),
    ]
    prompts = [[1, 2], [3], [4, 5]]
    engine = make_engine(model, max_sequences=2, async_scheduling=async_scheduling)
    captured = use_fake_graphs(engine, monkeypatch)
    found = engine.generate(prompts, params)
    assert len(captured) == 3 and len(engine.runner.captured_steps[2].graphs) == 2
    plain = make_engine(model, max_sequences=1)
    wanted = [plain.generate([p], [one])[0] for p, one in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
