"""A device that runs out of memory: the step is tried again, smaller, and no answer changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fulgurite.device import is_out_of_memory
from fulgurite.models import CausalLM
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import SamplingParams
from tests.serve.engines import check_idle, make_engine, quantized_model, tiny_model

CPU_MESSAGE = "[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory: 64 B"
ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total of"),
    RuntimeError(CPU_MESSAGE),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
)
PROMPTS = [[1, 2, 3], list(range(5, 60)), [9] * 20, [4], list(range(30, 47)), [7, 8]]
PARAMS = [
    SamplingParams(max_tokens=5 + index, ignore_eos=True, seed=index, temperature=0.7 * (index % 2))
    for index in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model: CausalLM) -> list[list[int]]:
    return [result.token_ids for result in make_engine(model).generate(PROMPTS, PARAMS)]


class FailingLayer:
    """Runs one layer of a model, and raises where `fails(positions)` says so.

    The layers before have then written keys of the step.
    """

    def __init__(self, layer: Any, fails: Callable[[Tensor], bool]) -> None:
        self.forward, self.fails = layer.forward, fails
        self.num_failures = 0

    def __call__(self, x_XD: Tensor, positions_X: Tensor, *args: Any) -> Tensor:
        if self.fails(positions_X):
            self.num_failures += 1
            raise ERRORS[self.num_failures % len(ERRORS)]
        return self.forward(x_XD, positions_X, *args)


def inject(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, fails: Callable[[Tensor], bool]
) -> FailingLayer:
    failing = FailingLayer(model.layers[1], fails)
    monkeypatch.setattr(model.layers[1], "forward", failing)
    return failing


@pytest.mark.parametrize("error", ERRORS)
def test_errors_of_allocators_are_recognized(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("limit", [1, 3, 11])
def test_steps_above_a_limit_fail(
    model: CausalLM, expected: list[list[int]], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = inject(model, monkeypatch, lambda positions: positions.numel() > limit)
    engine = make_engine(model, max_batched_tokens=32)
    results = engine.generate(PROMPTS, PARAMS)
    assert [result.token_ids for result in results] == expected
    assert limit / 2 < engine.scheduler.max_batched_tokens <= limit  # halved, and remembered
    before = failing.num_failures
    assert before == engine.memory.num_failures > 0
    assert [result.token_ids for result in engine.generate(PROMPTS, PARAMS)] == expected
    assert failing.num_failures == before  # later steps are small enough at once
    check_idle(engine)


@pytest.mark.parametrize("seed", range(6))
def test_random_failures_change_no_answer(
    model: CausalLM, expected: list[list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures at random steps of more than one token, with few blocks and steps in flight."""
    choose = random.Random(seed)
    failing = inject(
        model, monkeypatch, lambda positions: positions.numel() > 1 and choose.random() < 0.4
    )
    engine = make_engine(
        model, max_batched_tokens=32, cache_tokens=128, async_scheduling=bool(seed % 2)
    )
    results = engine.generate(PROMPTS, PARAMS)
    assert [result.token_ids for result in results] == expected
    assert failing.num_failures
    check_idle(engine)


def test_a_request_that_cannot_run_alone_ends_and_the_others_go_on(
    model: CausalLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(model, monkeypatch, lambda positions: bool((positions >= 40).any()))
    engine = make_engine(model, max_batched_tokens=32)
    results = engine.generate(PROMPTS, PARAMS)
    ended = [result for result in results if result.finish_reason == "error"]
    assert [result.prompt_ids for result in ended] == [PROMPTS[1]]
    assert "out of memory, even alone and with one token a step" in str(ended[0].error)
    others = [index for index in range(len(PROMPTS)) if index != 1]
    assert [results[index].token_ids for index in others] == [expected[i] for i in others]
    assert engine.scheduler.max_batched_tokens == 32  # the smaller limits were that request's
    check_idle(engine)


def test_engine_lives_after_every_request_failed(
    model: CausalLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model)
    with monkeypatch.context() as patch:
        inject(model, patch, lambda positions: True)
        results = engine.generate(PROMPTS, PARAMS)
    assert {result.finish_reason for result in results} == {"error"}
    check_idle(engine)
    assert [result.token_ids for result in engine.generate(PROMPTS, PARAMS)] == expected


def test_failed_step_leaves_requests_and_blocks_as_they_were(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails for another reason raises; what it had scheduled is what was there before."""
    engine = make_engine(model)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request(prompt, params)
    for _ in range(4):
        engine.step()
    before = take_snapshot(engine)

    def fail(*args: object) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1], "forward", fail)
        with pytest.raises(RuntimeError, match="illegal"):
            engine.step()
    assert take_snapshot(engine) == before


def take_snapshot(engine: Engine) -> Any:
    requests = [
        (request.id, request.tokens[: request.length].tolist(), request.num_computed_tokens)
        for request in engine.requests.values()
    ]
    return requests, engine.scheduler.max_batched_tokens


def test_two_steps_at_once_are_given_up_first(
    model: CausalLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, async_scheduling=True)
    failing = inject(model, monkeypatch, lambda positions: bool(engine.in_flight))
    results = engine.generate(PROMPTS, PARAMS)
    assert [result.token_ids for result in results] == expected
    assert failing.num_failures == 1 and engine.max_in_flight == 1
    assert engine.scheduler.max_batched_tokens == engine.plan.limits.max_batched_tokens


def test_captured_steps_are_freed_and_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized_model()
    wanted = [result.token_ids for result in make_engine(model).generate(PROMPTS, PARAMS)]
    engine, params = make_engine(model), SamplingParams(max_tokens=3, ignore_eos=True)
    engine.generate(PROMPTS, params)
    assert engine.runner.recorded_steps
    with monkeypatch.context() as patch:
        inject(model, patch, lambda positions: positions.numel() > 7)
        engine.generate([[2] * 20], params)
    assert engine.scheduler.max_batched_tokens == 5
    assert [result.token_ids for result in engine.generate(PROMPTS, PARAMS)] == wanted
    check_idle(engine)


def test_a_step_that_can_not_be_captured_for_memory_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = quantized_model()
    wanted = [result.token_ids for result in make_engine(model).generate(PROMPTS, PARAMS)]
    engine = make_engine(model)

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("fulgurite.serve.engine.runner.RecordedStep", fail)
    assert [result.token_ids for result in engine.generate(PROMPTS, PARAMS)] == wanted
    assert "out of memory while a step of" in str(engine.stats().no_capture_reason)
    assert engine.stats().max_batched_tokens == engine.stats().planned_batched_tokens
