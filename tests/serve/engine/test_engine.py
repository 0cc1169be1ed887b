"""The engine under load: random traffic through a small cache, and what it does with bad input."""

from __future__ import annotations

import random

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.models import CausalLM
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import Result, SamplingParams, Update
from tests.serve.engines import check_idle, make_engine, quantized_model, tiny_model


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model()


def random_prompt(rng: random.Random) -> list[int]:
    """Half of them share one of two beginnings."""
    ids = [rng.randrange(97) for _ in range(rng.choice((1, 2, 7, 16, 40)))]
    shared = rng.choice(([], [], list(range(24)), list(range(40, 51))))
    return shared + ids


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.3)),
        top_k=rng.choice((0, 5)),
        top_p=rng.choice((1.0, 0.8)),
        max_tokens=rng.choice((1, 4, 9, 25)),
        seed=rng.randrange(2**64),
        repetition_penalty=rng.choice((1.0, 1.2)),
        stop_token_ids=(rng.randrange(97),),
    )


def test_soak() -> None:
    """500 requests, some cancelled on the way: all blocks come back, results are those alone."""
    rng, model = random.Random(7), quantized_model()
    engine = make_engine(model, cache_tokens=160, context=128, max_batched_tokens=24)
    alone = make_engine(model, max_sequences=1, prefix_caching=False)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    results: dict[str, Result] = {}

    def listen(update: Update) -> None:
        if update.result is not None:
            results[update.id] = update.result

    while len(results) < 500:
        while len(asked) < 500 and len(engine.requests) < 14:
            ids, params = random_prompt(rng), random_params(rng)
            asked[engine.add_request(ids, params, listener=listen).id] = (ids, params)
        engine.step()
        if rng.random() < 0.12 and engine.requests:
            engine.cancel(rng.choice(list(engine.requests)))
    check_idle(engine)
    assert engine.runner.no_capture_reason is None and set(engine.runner.captured_sizes) == set(
        range(1, 9)
    )
    assert engine.scheduler.num_preemptions > 20
    reasons = [result.finish_reason for result in results.values()]
    assert min(reasons.count(reason) for reason in ("stop", "length", "cancelled")) > 30
    assert sum(result.cached_tokens > 0 for result in results.values()) > 50
    for id, (ids, params) in asked.items():
        wanted = alone.generate([ids], params)[0]
        got = results[id]
        if got.finish_reason == "cancelled":
            assert got.token_ids == wanted.token_ids[: len(got.token_ids)]
        else:
            assert got.token_ids == wanted.token_ids and got.finish_reason == wanted.finish_reason


def test_preemption_does_not_change_greedy_output(model: CausalLM) -> None:
    roomy = make_engine(model)
    tight = make_engine(model, cache_tokens=64, context=60)
    prompts = [[seed, *range(seed, seed + 17)] for seed in range(6)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    wanted = [result.token_ids for result in roomy.generate(prompts, params)]
    assert [result.token_ids for result in tight.generate(prompts, params)] == wanted
    assert roomy.scheduler.num_preemptions == 0 and tight.scheduler.num_preemptions > 0
    check_idle(tight)


def test_output_depends_only_on_the_seed(model: CausalLM) -> None:
    """Beside others, in another order and after others, a seed gives the same tokens."""
    engine = make_engine(model)
    params = [SamplingParams(temperature=1.5, max_tokens=20, seed=s) for s in (1, 2, 3, 1)]
    ids = [5, 6, 7]
    first, second, third, again = (r.token_ids for r in engine.generate([ids] * 4, params))
    assert first == again and len({tuple(first), tuple(second), tuple(third)}) == 3
    assert engine.generate([ids], params[1])[0].token_ids == second
    free = SamplingParams(temperature=1.5, max_tokens=20)
    assert len({tuple(r.token_ids) for r in engine.generate([ids] * 4, free)}) == 4


def test_equal_prefixes_are_computed_once(model: CausalLM) -> None:
    engine = make_engine(model)
    shared = list(range(30))
    engine.generate([shared], SamplingParams(max_tokens=3))
    result = engine.generate([[*shared, 50, 51]], SamplingParams(max_tokens=8))[0]
    assert result.cached_tokens == 28  # seven blocks of four
    fresh = make_engine(model, prefix_caching=False).generate(
        [[*shared, 50, 51]], SamplingParams(max_tokens=8)
    )
    assert fresh[0].cached_tokens == 0 and fresh[0].token_ids == result.token_ids
    whole = engine.generate([shared[:28]], SamplingParams(max_tokens=2))[0]
    assert whole.cached_tokens == 24  # the last token has to run


def test_decode_does_not_wait_for_prefill(model: CausalLM) -> None:
    engine = make_engine(model, max_batched_tokens=8, max_sequences=4)
    writer = engine.add_request([1], SamplingParams(max_tokens=60, ignore_eos=True))
    engine.step()
    reader = engine.add_request(list(range(90)), SamplingParams(max_tokens=1))
    steps = 0
    while reader.id in engine.requests:
        before = writer.length
        engine.step()
        steps += 1
        assert writer.length == before + 1
    assert steps == 13  # 90 prompt tokens, seven a step; the eighth is the decoding request's


def test_first_come_first_served(model: CausalLM) -> None:
    engine = make_engine(model, max_sequences=2, max_batched_tokens=16)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    requests = [engine.add_request([number] * 5, params) for number in range(6)]
    order = []
    while engine.has_unfinished_requests:
        order += [update.id for update in engine.step() if update.result]
    assert order == [request.id for request in requests]


def test_preempted_request_returns_to_the_front(model: CausalLM) -> None:
    engine = make_engine(model, max_sequences=3, cache_tokens=64, context=60, prefix_caching=False)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [engine.add_request([number] * 20, params) for number in range(3)]
    while engine.has_unfinished_requests:
        engine.step()
        line = [*engine.scheduler.running, *engine.scheduler.waiting]
        assert line == [request for request in requests if request in line]
    assert requests[0].num_preemptions == 0 and requests[1].num_preemptions > 0


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "empty"),
        (list(range(64)) * 2, "128 tokens"),
        ([1, 97], "0 to 96"),
        ([-1], "0 to 96"),
        (["a", 1.5], "token 'a'"),
        ("text", "needs a tokenizer"),
    ],
)
def test_invalid_prompt_raises_and_other_requests_continue(
    model: CausalLM, prompt, says: str
) -> None:
    engine = make_engine(model)
    good = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    with pytest.raises(ArgumentError, match=says):
        engine.add_request(prompt)
    with pytest.raises(ArgumentError, match=says):
        engine.generate([[1, 2], prompt])
    while engine.has_unfinished_requests:
        engine.step()
    assert len(good.output_ids) == 5
    check_idle(engine)


def test_a_prompt_one_short_of_the_context(model: CausalLM) -> None:
    engine = make_engine(model, context=64)
    result = engine.generate([list(range(63))], SamplingParams(max_tokens=9, ignore_eos=True))[0]
    assert len(result.token_ids) == 1 and result.finish_reason == "length"
    with pytest.raises(ArgumentError, match="64 tokens"):
        engine.generate([list(range(64))])


def test_cancelling(model: CausalLM) -> None:
    engine = make_engine(model, max_sequences=1)
    running, waiting = (engine.add_request([n], SamplingParams(ignore_eos=True)) for n in (1, 2))
    engine.step()
    update = engine.cancel(running.id)
    assert update and update.result and update.result.finish_reason == "cancelled"
    assert len(update.result.token_ids) == 1
    assert engine.cancel(waiting.id) is not None and engine.cancel(waiting.id) is None
    check_idle(engine)


def test_interleaved_streams_and_closing(model: CausalLM) -> None:
    engine = make_engine(model)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = engine.generate([[1, 2, 3], [4, 5]], params)
    first, second = engine.stream([1, 2, 3], params), engine.stream([4, 5], params)
    got: list[list[int]] = [[], []]
    for _ in range(12):
        for index, stream in enumerate((first, second)):
            got[index] += next(stream).token_ids
    assert got == [result.token_ids for result in wanted]
    assert next(first, None) is None and next(second, None) is None
    third = engine.stream([7], params)
    next(third)
    third.close()  # type: ignore[attr-defined]
    check_idle(engine)


def test_logprobs_come_from_raw_logits(model: CausalLM) -> None:
    engine = make_engine(model)
    params = SamplingParams(
        temperature=3.0, seed=1, max_tokens=4, logprobs=3, banned_token_ids=(5,)
    )
    result = engine.generate([[1, 2, 3]], params)[0]
    ids = torch.tensor([1, 2, 3, *result.token_ids])
    wanted = model(ids, torch.arange(len(ids))).log_softmax(dim=-1)[2:-1]
    assert result.logprobs is not None and len(result.logprobs) == 4
    for row, found, token in zip(wanted, result.logprobs, result.token_ids, strict=True):
        assert found.token_id == token and len(found.top) == 3
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(3)
        assert [id for id, _ in found.top] == best.indices.tolist()
        assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_constraint_masks_and_accepts_every_token(model: CausalLM) -> None:
    class Alternating:
        """Even, odd, even, …"""

        def __init__(self) -> None:
            self.taken: list[int] = []

        def allowed_tokens(self) -> torch.Tensor:
            return torch.arange(97) % 2 == len(self.taken) % 2

        def accept_token(self, token: int) -> None:
            self.taken.append(token)

    engine, constraint = make_engine(model), Alternating()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    request = engine.add_request([1], params, constraint=constraint)
    while engine.has_unfinished_requests:
        engine.step()
    assert [token % 2 for token in request.output_ids] == [0, 1, 0, 1, 0, 1]
    assert constraint.taken == request.output_ids.tolist()


def test_warm_up_leaves_no_state(model: CausalLM) -> None:
    engine: Engine = make_engine(model)
    engine.warm_up()
    check_idle(engine)
    assert not engine.block_manager.pools[0].block_by_hash
