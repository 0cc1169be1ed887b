"""The audit counts what nobody accounts for: 0 in every state of a healthy engine."""

from __future__ import annotations

import random

import pytest

from fulgurite.models import CausalLM
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import RequestOptions, SamplingParams
from tests.serve.engines import check_idle, make_engine, tiny_model


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model()


def check_audit(engine: Engine) -> None:
    assert set(engine.audit().values()) == {0}, engine.audit()


@pytest.mark.parametrize("seed", range(4))
def test_nothing_leaks_in_random_runs(model: CausalLM, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(model, cache_tokens=96, max_sequences=4, async_scheduling=seed % 2 == 1)
    for number in range(40):
        action = rng.random()
        if action < 0.4:
            prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 40))]
            params = SamplingParams(max_tokens=rng.randrange(1, 20), ignore_eos=True)
            options = RequestOptions(priority=rng.randrange(-2, 3), cache_salt=rng.choice("ab"))
            engine.add_request(prompt, params, id=str(number), options=options)
        elif action < 0.5 and engine.requests:
            engine.cancel(rng.choice([*engine.requests]))
        elif action < 0.55:
            engine.fail_step("a test")
        else:
            engine.step()
        check_audit(engine)
    while engine.has_unfinished_requests:
        engine.step()
        check_audit(engine)
    check_idle(engine)


def test_leaks_are_counted(model: CausalLM) -> None:
    engine = make_engine(model)
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True), id="a")
    engine.step()
    request = engine.requests["a"]
    engine.block_manager.pools[0].allocate()
    assert engine.audit()["blocks"] == 1
    engine.block_manager.free_rows.pop()
    assert engine.audit()["rows"] == 1
    del engine.requests["a"]
    assert engine.audit()["requests"] == 1
    engine.listeners["b"] = print
    assert engine.audit()["detokenizers"] == 1
    engine.block_manager.free(request)
    assert engine.audit()["blocks"] == 1, "the scheduler still runs a request without blocks"


def test_a_failed_step_ends_its_requests_only(model: CausalLM, monkeypatch) -> None:
    engine = make_engine(model, max_sequences=2)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    alone = make_engine(model).generate([[7, 8, 9]], params)[0].token_ids
    results = {}

    def listen(update):
        if update.result is not None:
            results[update.id] = update.result

    for name, prompt in (("a", [1, 2]), ("b", [3, 4, 5]), ("c", [7, 8, 9])):
        engine.add_request(prompt, params, id=name, listener=listen)
    engine.step()
    monkeypatch.setattr(engine.runner, "execute", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    failed = engine.fail_step("the step failed: ZeroDivisionError")
    assert {update.id for update in failed} == {"a", "b"}
    assert results["a"].finish_reason == "error" and "ZeroDivisionError" in results["a"].error
    check_audit(engine)
    while engine.has_unfinished_requests:
        engine.step()
    assert results["c"].token_ids == alone
    check_idle(engine)
