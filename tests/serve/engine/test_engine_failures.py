"""What goes wrong around an engine stays where it went wrong: interrupts, listeners, threads, edges."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pkgutil import resolve_name

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.models import CausalLM
from fulgurite.serve.engine.request import SamplingParams, Update
from tests.serve.engines import check_idle, make_engine, tiny_model


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def test_generated_request_ids_skip_used_ones(model: CausalLM) -> None:
    engine = make_engine(model)
    engine.add_request([1, 2], id="request-0")
    assert engine.add_request([1, 2]).id == "request-1"


def test_failing_listener_does_not_affect_others(model: CausalLM) -> None:
    engine, heard = make_engine(model), []

    def fail(update: Update) -> None:
        raise KeyError("of the listener")

    for name, listener in (("a", fail), ("b", heard.append), ("c", fail)):
        engine.add_request([1, 2, 3], greedy(3), id=name, listener=listener)
    for _ in range(3):
        with pytest.raises(KeyError, match="of the listener"):
            engine.step()
    assert [update.token_ids for update in heard] == [(t,) for t in heard[-1].result.token_ids]
    check_idle(engine)


def test_a_listener_may_cancel_others(model: CausalLM) -> None:
    engine, heard = make_engine(model), []
    engine.add_request([1, 2], greedy(9), listener=lambda update: engine.cancel("b"))
    engine.add_request([3, 4], greedy(9), id="b", listener=heard.append)
    while engine.has_unfinished_requests:
        engine.step()
    assert [update.result.finish_reason for update in heard] == ["cancelled"]
    check_idle(engine)


@pytest.mark.covering
@pytest.mark.parametrize(
    "where",
    [
        "fulgurite.serve.engine.runner.ModelRunner.execute",
        "fulgurite.serve.engine.sampler.Sampler.prepare",
        "fulgurite.serve.engine.sampler.sample_tokens",
        "fulgurite.serve.engine.sampler.record_tokens",
        "fulgurite.serve.engine.sampler.compute_logprobs",
        "fulgurite.serve.engine.sampler.SampledTokens.read",
        "fulgurite.serve.engine.sampler.philox_uniform",
        "fulgurite.serve.engine.sampling_rows.count_tokens",
    ],
)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("temperature", "async_scheduling"), [(1.0, False), (0.0, True), (1.0, True)]
)
def test_interrupted_step_runs_again(
    model: CausalLM,
    where: str,
    temperature: float,
    async_scheduling: bool,
    after: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the device had done its part: sampled, counted, and stored the token."""
    prompts = [[1, 2, 3], list(range(40))]  # the second takes several steps to read
    params = [
        SamplingParams(
            max_tokens=most,
            ignore_eos=True,
            temperature=temperature,
            seed=most,
            logprobs=2,
            frequency_penalty=1.5 if temperature else 0.0,  # greedy requests run ahead more often
            repetition_penalty=1.2 if temperature else 1.0,
        )
        for most in (9, 6)
    ]
    wanted = make_engine(model).generate(prompts, params)
    engine, found = make_engine(model, async_scheduling=async_scheduling), {}

    def listen(update: Update) -> None:
        if update.result is not None:
            found[update.id] = update.result

    real, calls = resolve_name(where), count()

    def interrupted(*arguments: object) -> object:
        result = real(*arguments) if after else None
        if next(calls) % 3 == 0:
            raise KeyboardInterrupt
        return result if after else real(*arguments)

    ids = [
        engine.add_request(prompt, one, listener=listen).id
        for prompt, one in zip(prompts, params, strict=True)
    ]
    monkeypatch.setattr(where, interrupted)
    while engine.has_unfinished_requests:
        with suppress(KeyboardInterrupt):
            engine.step()
    assert (next(calls) > 1) == (temperature > 0 or not where.endswith(("uniform", "count_tokens")))
    for id, one in zip(ids, wanted, strict=True):
        assert (found[id].token_ids, found[id].logprobs) == (one.token_ids, one.logprobs)
    check_idle(engine)


def test_threads_take_turns(model: CausalLM) -> None:
    def params(number: int) -> SamplingParams:
        return SamplingParams(max_tokens=12, temperature=1.0, seed=number)

    def prompts(number: int) -> list[list[int]]:
        return [[number + 1, other + 1, 7] for other in range(3)]

    engine = make_engine(model, max_sequences=4, cache_tokens=64)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda n: engine.generate(prompts(n), params(n)), range(6)))
    check_idle(engine)
    alone = make_engine(model)
    for number, results in enumerate(found):
        wanted = alone.generate(prompts(number), params(number))
        assert [one.token_ids for one in results] == [one.token_ids for one in wanted]


def test_rejected_and_unread_requests_leave_no_state(model: CausalLM) -> None:
    engine = make_engine(model)
    for params in (
        [SamplingParams(), SamplingParams(stop="x")],
        [SamplingParams(), None],
        "greedy",
    ):
        with pytest.raises(ArgumentError):
            engine.generate([[1, 2], [3]], params)
    engine.stream([1, 2, 3])  # and nobody reads it
    check_idle(engine)


def test_small_cache_limits_the_context(model: CausalLM) -> None:
    engine = make_engine(model, context=128, cache_tokens=32)
    assert engine.context == 32
    with pytest.raises(ArgumentError, match="may have 32"):
        engine.add_request(list(range(40)))
    assert len(engine.generate([list(range(20))], greedy(50))[0].token_ids) == 12


def test_eos_token_ends_the_reply_unless_ignored(model: CausalLM) -> None:
    engine = make_engine(model)
    whole = engine.generate([[1, 2, 3]], greedy(8))[0].token_ids
    engine.eos_token_ids = frozenset({whole[2]})
    until = whole.index(whole[2]) + 1
    ended = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0]
    assert ended.token_ids == whole[:until]
    assert (ended.finish_reason, ended.stopped_by) == ("stop", whole[2])
    assert engine.generate([[1, 2, 3]], greedy(8))[0].token_ids == whole


def test_the_shortest_context(model: CausalLM) -> None:
    engine = make_engine(model, context=2)
    engine.warm_up()
    assert len(engine.generate([[5]])[0].token_ids) == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9])
def test_tiny_temperature_is_greedy(model: CausalLM, temperature: float) -> None:
    engine = make_engine(model)
    cold = SamplingParams(temperature=temperature, top_k=10**30, min_p=0.1, max_tokens=8)
    assert (
        engine.generate([[1, 2]], cold)[0].token_ids
        == engine.generate([[1, 2]], greedy(8))[0].token_ids
    )
    hot = SamplingParams(temperature=1e30, banned_token_ids=[3], max_tokens=50, seed=0)
    assert 3 not in engine.generate([[1, 2]], hot)[0].token_ids


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_end_only_their_request(temperature: float, async_scheduling: bool) -> None:
    broken = tiny_model()
    broken.embed_tokens.weight[13] = torch.nan
    engine = make_engine(broken, async_scheduling=async_scheduling)
    params = SamplingParams(
        max_tokens=6, ignore_eos=True, temperature=temperature, seed=3, banned_token_ids=[13]
    )
    late = replace(params, banned_token_ids=(), logit_bias={13: 1e30}, logprobs=1)
    prompts = [[1, 2], [13, 4], [5], [6, 7]]
    good, bad, other, second = engine.generate(prompts, [params, params, params, late])
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert bad.error is not None and "logits are NaN" in bad.error and bad.id in bad.error
    assert (second.finish_reason, second.token_ids) == ("error", [13])  # fed on to the next step
    assert second.logprobs is not None and len(second.logprobs) == 1
    for result, prompt in ((good, [1, 2]), (other, [5])):
        assert (result.error, result.finish_reason) == (None, "length")
        assert result.token_ids == make_engine(broken).generate([prompt], params)[0].token_ids
    check_idle(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_without_allowed_tokens_ends_alone(
    model: CausalLM, async_scheduling: bool
) -> None:
    class Ending:
        def __init__(self) -> None:
            self.left = 2

        def allowed_tokens(self) -> torch.Tensor:
            return torch.full((97,), self.left > 0)

        def accept_token(self, token: int) -> None:
            self.left -= 1

    engine, heard = make_engine(model, async_scheduling=async_scheduling), []
    engine.add_request([1, 2], greedy(5), id="good", listener=heard.append)
    engine.add_request([3], greedy(5), id="bad", listener=heard.append, constraint=Ending())
    while engine.has_unfinished_requests:
        engine.step()
    results = {update.id: update.result for update in heard if update.result is not None}
    assert results["good"].finish_reason == "length" and len(results["good"].token_ids) == 5
    assert results["bad"].finish_reason == "error" and len(results["bad"].token_ids) == 2
    assert "bad, token 3: every token is banned" in results["bad"].error
    check_idle(engine)
