"""Grammars in the engine: ends, forced tokens, batches, preemption, failures."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.models import CausalLM
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.grammar import Grammar, GrammarSpec
from fulgurite.serve.engine.request import Request, Result, SamplingParams, Update
from fulgurite.serve.structured.compiler import GrammarCompiler
from tests.serve.engines import check_idle, make_engine, quantized_model, tiny_model
from tests.serve.structured.drivers import tiny_compiler, tiny_tokenizer

EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {
        "first name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["animal", "plant"]},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["first name", "kind", "age"],
    "additionalProperties": False,
}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model(vocab_size=258, eos_token_id=EOS)


def structured_engine(model: CausalLM, **options: object) -> Engine:
    compiler = options.pop("grammar_compiler", tiny_compiler())
    engine = make_engine(model, tiny_tokenizer(), **options)  # type: ignore[arg-type]
    engine.grammars.compiler = compiler  # type: ignore[assignment]
    return engine


def run(engine: Engine, *all_params: SamplingParams, prompt: list[int] = PROMPT) -> list[Result]:
    results = engine.generate([prompt] * len(all_params), list(all_params))
    check_idle(engine)
    assert not any(engine.audit().values()) and not engine.grammars.pending
    return results


def drain(engine: Engine) -> list[Update]:
    updates = []
    while engine.has_unfinished_requests:
        updates += engine.step()
    return updates


def never_force(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "fulgurite.serve.structured.constraint.GrammarConstraint.forced_tokens"
    monkeypatch.setattr(where, lambda self: [])


# ---- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_reply_ends_with_its_schema(
    model: CausalLM, temperature: float, async_scheduling: bool
) -> None:
    engine = structured_engine(model, async_scheduling=async_scheduling)
    params = SamplingParams(
        json_schema=SCHEMA, temperature=temperature, seed=3, max_tokens=100, logprobs=None
    )
    (result,) = run(engine, params)
    assert (result.finish_reason, result.stopped_by, result.error) == ("stop", None, None)
    document = json.loads(result.text)
    assert [*document] == [*SCHEMA["properties"]] and 10 <= document["age"] <= 99
    assert tiny_tokenizer().decode(result.token_ids) == result.text


def test_the_end_token_ends_a_reply_that_may_go_on(model: CausalLM) -> None:
    engine = structured_engine(model)
    params = SamplingParams(regex="a*", logit_bias={EOS: 100.0})
    (result,) = run(engine, params)
    assert (result.text, result.finish_reason, result.stopped_by) == ("", "stop", EOS)


@pytest.mark.parametrize(
    "options",
    [
        {"banned_token_ids": [EOS]},
        {"ignore_eos": True},
        {"min_tokens": 20},
        {"logit_bias": {EOS: -float("inf")}},
    ],
)
def test_a_complete_grammar_ends_whatever_bans_the_end_token(
    model: CausalLM, options: dict[str, object]
) -> None:
    engine = structured_engine(model)
    params = SamplingParams(regex="[ab]{1,3}", max_tokens=20, **options)  # type: ignore[arg-type]
    wishes_to_end = {EOS: 100.0, **params.logit_bias}
    (result,) = run(engine, replace(params, logit_bias=wishes_to_end))
    assert result.finish_reason == "stop" and result.error is None
    assert re.fullmatch("[ab]{3}", result.text) and EOS not in result.token_ids


def test_where_only_a_banned_token_could_follow_an_acceptable_reply_it_ends(
    model: CausalLM,
) -> None:
    a, b = tiny_tokenizer().encode("ab")
    engine = structured_engine(model)
    ended, stuck = run(
        engine,
        SamplingParams(regex="aaa(b+)?", banned_token_ids=[b, EOS]),
        SamplingParams(regex="aaab", banned_token_ids=[b, EOS]),
    )
    assert (ended.text, ended.finish_reason, ended.error) == ("aaa", "stop", None)
    assert (stuck.text, stuck.finish_reason) == ("aaa", "error")
    assert stuck.error is not None and "every token is banned" in stuck.error
    assert ended.token_ids == [a, a, a]


@pytest.mark.parametrize("max_tokens", [1, 2, 9, 16])
def test_max_tokens_in_the_middle(model: CausalLM, max_tokens: int) -> None:
    """Also in the middle of what is forced."""
    engine = structured_engine(model)
    (result,) = run(engine, SamplingParams(json_schema=SCHEMA, max_tokens=max_tokens))
    assert (result.finish_reason, len(result.token_ids)) == ("length", max_tokens)
    assert '{"first name": "'.startswith(result.text[:16])


def test_a_reply_that_just_fits_has_stopped(model: CausalLM) -> None:
    engine = structured_engine(model)
    exact, short = run(
        engine,
        SamplingParams(choices=["twelve chars"], max_tokens=12),
        SamplingParams(choices=["twelve chars"], max_tokens=11),
    )
    assert (exact.finish_reason, short.finish_reason) == ("stop", "length")


def test_a_forced_reply_needs_no_step(model: CausalLM) -> None:
    engine, heard = structured_engine(model), list[Update]()
    engine.check_grammar(SamplingParams(choices=["yes"]))
    engine.add_request(PROMPT, SamplingParams(choices=["yes"]), listener=heard.append)
    assert heard == []
    updates = drain(engine)
    assert [update.text for update in updates] == ["yes"] and heard == updates
    assert engine.recorder.steps == 0 and engine.recorder.forced_tokens == 3
    check_idle(engine)


@pytest.mark.parametrize("regex", ["", "a{0,0}"])
def test_an_empty_reply(model: CausalLM, regex: str) -> None:
    (result,) = run(structured_engine(model), SamplingParams(regex=regex))
    assert (result.text, result.token_ids, result.finish_reason) == ("", [], "stop")


def test_stop_strings_end_forced_text(model: CausalLM) -> None:
    engine = structured_engine(model)
    in_reply, at_start = run(
        engine,
        SamplingParams(regex="[xy] then a stop word and more", stop="stop"),
        SamplingParams(regex="then a stop word and more[xy]", stop=" word"),
    )
    assert in_reply.text[1:] == " then a " and in_reply.stopped_by == "stop"
    assert (at_start.text, at_start.finish_reason) == ("then a stop", "stop")


# ---- forced tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make_model", [None, quantized_model])
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"max_batched_tokens": 8}])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_forcing_changes_the_steps_but_not_the_reply(
    model: CausalLM,
    make_model: Callable[[], CausalLM] | None,
    options: dict[str, object],
    penalty: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token a byte: there is only one way to write a text, so all tokens are the same."""
    if make_model is not None:
        model = quantized_model(vocab_size=258, eos_token_id=EOS)
    all_params = [
        SamplingParams(
            json_schema=SCHEMA,
            temperature=1.2,
            seed=seed,
            max_tokens=100,
            frequency_penalty=penalty,
            repetition_penalty=1.0 + penalty,
        )
        for seed in range(4)
    ]
    engine = structured_engine(model, **options)
    forced = run(engine, *all_params)
    steps = engine.recorder.steps
    assert engine.recorder.forced_tokens > 100
    never_force(monkeypatch)
    slow = structured_engine(model, **options)
    plain = run(slow, *all_params)
    assert slow.recorder.forced_tokens == 0 and steps < slow.recorder.steps / 2
    for one, other in zip(forced, plain, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
    if make_model is not None:
        assert engine.runner.no_capture_reason is None


def test_updates_add_up(model: CausalLM) -> None:
    engine = structured_engine(model)
    engine.add_request(PROMPT, SamplingParams(json_schema=SCHEMA, max_tokens=100))
    updates = drain(engine)
    result = updates[-1].result
    assert result is not None
    assert [token for update in updates for token in update.token_ids] == result.token_ids
    assert "".join(update.text for update in updates) == result.text
    assert max(len(update.token_ids) for update in updates) > 5


def test_requests_with_logprobs_are_sampled_token_by_token(model: CausalLM) -> None:
    engine = structured_engine(model)
    (result,) = run(engine, SamplingParams(json_schema=SCHEMA, logprobs=2, max_tokens=100))
    assert result.logprobs is not None and engine.recorder.forced_tokens == 0
    assert [one.token_id for one in result.logprobs] == result.token_ids
    assert json.loads(result.text)


def test_banned_tokens_are_not_forced(model: CausalLM) -> None:
    engine, banned = structured_engine(model), tiny_tokenizer().encode("k")
    everything_else = [token for token in range(258) if token not in banned]
    for options in (
        {"banned_token_ids": banned},
        {"allowed_token_ids": everything_else},
        {"logit_bias": {banned[0]: -float("inf")}},
    ):
        params = SamplingParams(regex="[ab] like this", **options)  # type: ignore[arg-type]
        (result,) = run(engine, params)
        assert result.text[1:] == " li" and result.finish_reason == "error"


def test_a_stop_token_is_not_forced_before_min_tokens(model: CausalLM) -> None:
    engine, stop = structured_engine(model), tiny_tokenizer().encode("s")
    early, late = run(
        engine,
        SamplingParams(regex="is this it", stop_token_ids=stop),
        SamplingParams(regex="is this it", stop_token_ids=stop, min_tokens=4),
    )
    assert (early.text, early.stopped_by) == ("i", stop[0])
    assert (late.text, late.finish_reason) == (
        "i",
        "error",
    )  # nothing but the stop token may follow


def test_first_tokens_are_shared_by_the_prefix_cache(model: CausalLM) -> None:
    engine, params = structured_engine(model), SamplingParams(json_schema=SCHEMA, max_tokens=60)
    first, second = run(engine, params)[0], run(engine, params)[0]
    assert first.token_ids == second.token_ids
    assert second.cached_tokens <= len(PROMPT)


# ---- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_free_requests_are_not_changed_by_others_with_grammars(
    model: CausalLM, async_scheduling: bool
) -> None:
    free = [
        SamplingParams(max_tokens=30, temperature=t, seed=4, logprobs=1, ignore_eos=True)
        for t in (0.0, 1.0)
    ]
    alone = run(structured_engine(model), *free)
    mixed = run(
        structured_engine(model, async_scheduling=async_scheduling),
        free[0],
        SamplingParams(json_schema=SCHEMA, max_tokens=100),
        free[1],
        SamplingParams(choices=["one", "two"], temperature=1.0, seed=1),
    )
    for one, other in zip(alone, (mixed[0], mixed[2]), strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert json.loads(mixed[1].text) and mixed[3].text in ("one", "two")


def test_preempted_requests_keep_their_grammars(model: CausalLM) -> None:
    all_params = [
        SamplingParams(json_schema=SCHEMA, temperature=1.0, seed=seed, max_tokens=100)
        for seed in range(5)
    ]
    wanted = run(structured_engine(model), *all_params)
    engine = structured_engine(model, cache_tokens=128, max_sequences=5)
    found = run(engine, *all_params)
    assert engine.scheduler.num_preemptions > 0
    for one, other in zip(wanted, found, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)


def test_cancel_in_the_middle(model: CausalLM) -> None:
    engine = structured_engine(model)
    request = engine.add_request(PROMPT, SamplingParams(json_schema=SCHEMA, max_tokens=100))
    while not request.num_sampled:
        engine.step()
    update = engine.cancel(request.id)
    assert update is not None and update.result is not None
    assert update.result.finish_reason == "cancelled" and update.result.text.startswith('{"first')
    check_idle(engine)


# ---- compiling -------------------------------------------------------------------------------------


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler, self.started = compiler, list[tuple[GrammarSpec, Future[Grammar]]]()

    def check(self, spec: GrammarSpec) -> None:
        self.compiler.check(spec)

    def compile(self, spec: GrammarSpec) -> Grammar:
        return self.compiler.compile(spec)

    def start(self, spec: GrammarSpec) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        self.started.append((spec, future))
        return future

    def finish(self, index: int) -> None:
        spec, future = self.started[index]
        try:
            future.set_result(self.compile(spec))
        except ArgumentError as error:
            future.set_exception(error)


def test_other_requests_run_while_a_grammar_is_compiled(model: CausalLM) -> None:
    slow = SlowCompiler(tiny_compiler())
    engine = structured_engine(model, grammar_compiler=slow)
    held = engine.add_request(PROMPT, SamplingParams(choices=["b", "c"]), id="held")
    bad = engine.add_request(PROMPT, SamplingParams(regex="((("), id="bad")
    gone = engine.add_request(PROMPT, SamplingParams(regex="x"), id="gone")
    free = engine.add_request(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True), id="free")
    for _ in range(3):
        engine.step()
    assert free.num_sampled == 3 and held.num_computed_tokens == 0
    assert not any(engine.audit().values())
    engine.cancel(gone.id)
    slow.finish(1)
    failed = engine.step()[0]
    assert failed.id == bad.id and failed.result is not None
    assert failed.result.finish_reason == "error" and "unclosed group" in failed.result.error
    slow.finish(0)
    results = {update.id: update.result for update in drain(engine) if update.result}
    assert results["held"].text in ("b", "c") and results["free"].finish_reason == "length"
    check_idle(engine)


def test_a_step_waits_for_a_grammar_if_there_is_nothing_else(model: CausalLM) -> None:
    slow = SlowCompiler(tiny_compiler())
    engine = structured_engine(model, grammar_compiler=slow)
    engine.add_request(PROMPT, SamplingParams(choices=["b", "c"]))
    assert engine.step() == []
    timer = threading.Timer(0.05, slow.finish, (0,))
    timer.start()
    (result,) = [update.result for update in drain(engine) if update.result]
    timer.join()
    assert result.finish_reason == "stop"


def test_bad_grammars_raise_before_anything_runs(model: CausalLM) -> None:
    engine = structured_engine(model)
    with pytest.raises(ArgumentError, match="unclosed group"):
        engine.generate([PROMPT, PROMPT], [SamplingParams(), SamplingParams(regex="(((a")])
    with pytest.raises(ArgumentError, match="unclosed group"):
        engine.stream(PROMPT, SamplingParams(regex="(((a"))
    with pytest.raises(ArgumentError, match="constraint="):
        engine.add_request(PROMPT, SamplingParams(regex="a"), constraint=Failing())
    check_idle(engine)
    with pytest.raises(ArgumentError, match="needs a tokenizer"):
        make_engine(model).add_request(PROMPT, SamplingParams(regex="a"))


# ---- constraints that fail -------------------------------------------------------------------------


class Failing:
    """Allows all tokens, and raises in one method after some tokens."""

    def __init__(self, where: str = "", after: int = 2) -> None:
        self.where, self.left = where, after

    def allowed_tokens(self) -> torch.Tensor | None:
        self._fail("allowed_tokens")
        return torch.ones(300 if self.where == "shape" and not self.left else 258) > 0

    def accept_token(self, token: int) -> None:
        self.left -= 1
        self._fail("accept_token")

    def _fail(self, where: str) -> None:
        if self.where == where and self.left <= 0:
            raise KeyError("of the grammar")


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("accept_token", "of the grammar"),
        ("allowed_tokens", "of the grammar"),
        ("shape", "gave a mask of bool"),
    ],
)
def test_a_constraint_that_raises_ends_only_its_request(
    model: CausalLM, where: str, message: str, async_scheduling: bool
) -> None:
    engine, heard = structured_engine(model, async_scheduling=async_scheduling), list[Update]()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (wanted,) = run(structured_engine(model), params)
    requests: list[Request] = [
        engine.add_request(PROMPT, params, listener=heard.append, constraint=constraint)
        for constraint in (None, Failing(where), Failing())
    ]
    drain(engine)
    results = {update.id: update.result for update in heard if update.result is not None}
    good, bad, other = (results[request.id] for request in requests)
    assert good.token_ids == other.token_ids == wanted.token_ids
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", 2)
    assert bad.error is not None and message in bad.error
    check_idle(engine)
