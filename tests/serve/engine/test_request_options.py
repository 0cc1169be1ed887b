"""Priorities order requests, cache salts separate prefixes, and neither changes a token."""

from __future__ import annotations

import pytest

from fulgurite.models import CausalLM
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import RequestOptions, SamplingParams
from tests.serve.engines import make_engine, tiny_model

PROMPT = list(range(1, 30))
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model()


def finish_order(engine: Engine, priorities: list[int]) -> list[str]:
    order: list[str] = []

    def listen(update):
        if update.result is not None:
            order.append(update.id)

    for index, priority in enumerate(priorities):
        options = RequestOptions(priority=priority)
        engine.add_request([index + 1, 2], PARAMS, id=str(index), listener=listen, options=options)
    while engine.has_unfinished_requests:
        engine.step()
    return order


def test_lower_numbers_start_first_and_equals_in_order_of_arrival(model: CausalLM) -> None:
    assert finish_order(make_engine(model, max_sequences=1), [1, 0, 1, -1, 0]) == [*"31402"]


def test_the_last_in_order_is_preempted(model: CausalLM) -> None:
    engine = make_engine(model, max_sequences=2, cache_tokens=40, max_batched_tokens=16)
    long = SamplingParams(max_tokens=20, ignore_eos=True)
    alone = make_engine(model).generate([[5, 6, 7], [8, 9]], long)
    late = engine.add_request([5, 6, 7], long, options=RequestOptions(priority=5))
    engine.step()
    first = engine.add_request([8, 9], long, options=RequestOptions(priority=-5))
    while engine.has_unfinished_requests:
        engine.step()
    assert late.num_preemptions and not first.num_preemptions
    assert [late.output_ids.tolist(), first.output_ids.tolist()] == [
        result.token_ids for result in alone
    ]


def cached(engine: Engine, salt: str) -> tuple[int, list[int]]:
    request = engine.add_request(PROMPT, PARAMS, options=RequestOptions(cache_salt=salt))
    while engine.has_unfinished_requests:
        engine.step()
    return request.cached_tokens, request.output_ids.tolist()


def test_salts_separate_the_prefix_cache(model: CausalLM) -> None:
    engine = make_engine(model)
    first, tokens = cached(engine, "a")
    assert first == 0
    assert cached(engine, "b") == (0, tokens), "another salt finds nothing"
    assert cached(engine, "") == (0, tokens), "and neither does none"
    assert cached(engine, "a") == (28, tokens) == cached(engine, "b")
