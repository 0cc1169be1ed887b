"""The engine against an oracle that runs one request at a time, in numpy, without any of its parts.

Random mixes of sampling parameters, arrivals, cancels and preemptions; steps in order or ahead.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fulgurite.models import CausalLM
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import Result, SamplingParams, Update
from tests.serve.engines import check_idle, make_engine, quantized_model, tiny_model
from tests.serve.tiny_checkpoint import VOCABULARY, byte_tokenizer

VOCAB = 97
EOS = frozenset({5, 50})


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model()


class Alternating:
    """A grammar: even, odd, even, ... by bool masks or packed ones."""

    def __init__(self, packed: bool) -> None:
        self.count, self.packed = 0, packed

    def allowed_tokens(self) -> torch.Tensor:
        if self.packed:
            word = 0x55555555 if self.count % 2 == 0 else -0x55555556
            return torch.tensor([word] * 4, dtype=torch.int32)
        return torch.arange(VOCAB) % 2 == self.count % 2

    def accept_token(self, token: int) -> None:
        assert token % 2 == self.count % 2
        self.count += 1


@dataclass
class Wanted:
    tokens: list[int]
    logprobs: list[float]
    reason: str


def oracle(
    model: CausalLM, prompt: list[int], params: SamplingParams, has_grammar: bool, context: int
) -> Wanted:
    """One request: the whole sequence through the model for each token, and numpy."""
    tokens, wanted = list(prompt), Wanted([], [], "length")
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    while len(tokens) < min(context, len(prompt) + params.max_tokens):
        raw = model(torch.tensor(tokens), torch.arange(len(tokens)))[-1].double().numpy()
        reply = tokens[len(prompt) :]
        logits = process(raw, prompt, reply, params, stops)
        if has_grammar:
            logits[np.arange(VOCAB) % 2 != len(reply) % 2] = -np.inf
        if np.isneginf(logits).all():
            return replace(wanted, reason="error")
        token = choose(logits, params, len(tokens))
        tokens.append(token)
        wanted.tokens.append(token)
        top = raw.max()
        wanted.logprobs.append(float(raw[token] - top - np.log(np.exp(raw - top).sum())))
        if token in stops:
            return replace(wanted, reason="stop")
    return wanted


def process(
    raw: np.ndarray, prompt: list[int], reply: list[int], params: SamplingParams, stops: set[int]
) -> np.ndarray:
    logits = raw.copy()
    for token in range(VOCAB):
        logits[token] += params.logit_bias.get(token, 0.0)
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        is_banned = token in params.banned_token_ids
        if not is_allowed or is_banned or (len(reply) < params.min_tokens and token in stops):
            logits[token] = -np.inf
        if token in prompt or token in reply:
            factor = params.repetition_penalty
            logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
        if token in reply:
            logits[token] -= params.presence_penalty
            logits[token] -= params.frequency_penalty * reply.count(token)
    return logits


def choose(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    p = np.exp((logits - logits.max()) / params.temperature)
    order = sorted(range(VOCAB), key=lambda i: (-p[i], i))
    order = [i for i in order if p[i] >= params.min_p * p.max()]
    order = order[: params.top_k or None]
    total, kept, reached = sum(p[i] for i in order), [], 0.0
    for i in order:
        if reached < params.top_p * total:
            kept.append(i)
        reached += p[i]
    target, reached = uniform(params.seed or 0, position) * sum(p[i] for i in kept), 0.0
    for i in sorted(kept):
        reached += p[i]
        if reached > target:
            return i
    return max(kept)


def uniform(seed: int, position: int) -> float:
    """Philox4x32-10 in Python's integers."""
    key, counter = [seed & 0xFFFFFFFF, seed >> 32], [position, 0, 0, 0]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return ((counter[0] >> 5) * 2**26 + (counter[1] >> 6)) / 2**53


def random_params(rng: random.Random) -> SamplingParams:
    tokens = range(VOCAB)
    max_tokens = rng.randrange(1, 18)
    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.5]),
        "top_k": rng.choice([0, 0, 1, 8]),
        "top_p": rng.choice([1.0, 0.8]),
        "min_p": rng.choice([0.0, 0.05]),
        "seed": rng.getrandbits(64),
        "repetition_penalty": rng.choice([1.0, 1.4, 0.8]),
        "frequency_penalty": rng.choice([0.0, 0.9]),
        "presence_penalty": rng.choice([0.0, -0.5]),
        "logit_bias": {t: rng.uniform(-3, 3) for t in rng.sample(tokens, rng.choice([0, 0, 4]))},
        "banned_token_ids": rng.sample(tokens, rng.choice([0, 0, 30])),
        "stop_token_ids": rng.sample(tokens, rng.choice([0, 12])),
        "ignore_eos": rng.random() < 0.5,
        "min_tokens": rng.choice([0, 0, max_tokens // 2]),
        "max_tokens": max_tokens,
        "logprobs": rng.choice([None, 0, 3]),
    }
    if rng.random() < 0.3:
        options["allowed_token_ids"] = rng.sample(tokens, 50)
    if rng.random() < 0.1:  # nothing is left: the request fails
        options |= {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": max_tokens}
        options["banned_token_ids"] = []
    return SamplingParams(**options)


def check(result: Result, wanted: Wanted) -> None:
    if result.finish_reason == "cancelled":
        assert result.token_ids == wanted.tokens[: len(result.token_ids)]
    else:
        assert (result.token_ids, result.finish_reason) == (wanted.tokens, wanted.reason)
    assert (result.error is not None) == (result.finish_reason == "error")
    if result.logprobs is not None:
        found = [one.logprob for one in result.logprobs]
        assert found == pytest.approx(wanted.logprobs[: len(found)], abs=1e-4)
        assert [one.token_id for one in result.logprobs] == result.token_ids


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_equal_the_oracle(
    model: CausalLM, seed: int, async_scheduling: bool
) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        model,
        context=48,
        max_sequences=4,
        max_batched_tokens=rng.choice([8, 32]),
        cache_tokens=96,
        prefix_caching=rng.random() < 0.7,
        async_scheduling=async_scheduling,
    )
    engine.eos_token_ids = EOS
    waiting = []
    for number in range(14):
        shared = [3, 1, 4, 1, 5, 9, 2, 6][: rng.choice([0, 4, 8])]
        prompt = shared + rng.choices(range(VOCAB), k=rng.randrange(1, 16))
        waiting.append((f"{number}", prompt, random_params(rng), rng.random() < 0.2))
    cases = {name: rest for name, *rest in waiting}
    results: dict[str, Result] = {}
    num_cancelled = 0

    def listen(update: Update) -> None:
        if update.result is not None:
            results[update.id] = update.result

    while waiting or engine.has_unfinished_requests:
        while waiting and rng.random() < 0.4:
            name, prompt, params, has_grammar = waiting.pop()
            constraint = Alternating(rng.random() < 0.5) if has_grammar else None
            engine.add_request(prompt, params, id=name, listener=listen, constraint=constraint)
        engine.step()
        if engine.requests and rng.random() < 0.02:
            num_cancelled += engine.cancel(rng.choice(list(engine.requests))) is not None
    check_idle(engine)
    assert len(results) == 14
    for name, (prompt, params, has_grammar) in cases.items():
        check(results[name], oracle(model, prompt, params, has_grammar, engine.context))
    reasons = [result.finish_reason for result in results.values()]
    assert reasons.count("cancelled") == num_cancelled


def run_all(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    results = engine.generate(prompts, params)
    check_idle(engine)
    return [(r.token_ids, r.logprobs, r.finish_reason, r.stopped_by, r.text) for r in results]


def test_captured_steps_run_ahead_with_the_same_bits() -> None:
    """Penalties, stop tokens and lengths; some requests end while the next step runs."""
    model, rng = quantized_model(), random.Random(0)
    prompts = [rng.choices(range(VOCAB), k=rng.randrange(1, 9)) for _ in range(10)]
    params = [random_params(rng) for _ in prompts]
    found = []
    for async_scheduling in (False, True):
        engine = make_engine(model, cache_tokens=128, async_scheduling=async_scheduling)
        engine.eos_token_ids = EOS
        found.append(run_all(engine, prompts, params))
        assert engine.runner.captured_sizes
    assert found[0] == found[1]


def test_stop_strings_end_steps_that_run_ahead() -> None:
    model = tiny_model(vocab_size=VOCABULARY)
    tokenizer = Tokenizer(byte_tokenizer(), None, (257,), None, {})
    texts = ["to be or not", "abc", "once upon", "x"]
    plain = make_engine(model, tokenizer).generate(texts, SamplingParams(max_tokens=30, seed=1))
    stops = [[result.text[n : n + 2]] for n, result in zip((3, 9, 15, 0), plain, strict=True)]
    params = [SamplingParams(max_tokens=30, stop=[s for s in stop if s]) for stop in stops]
    params += [replace(one, min_tokens=20) for one in params]
    found = [
        run_all(make_engine(model, tokenizer, async_scheduling=is_async), texts * 2, params)
        for is_async in (False, True)
    ]
    assert found[0] == found[1]
    assert any(reason == "stop" for _, _, reason, _, _ in found[0])
    for ids, _, _, _, _ in found[0][4:]:
        assert len(ids) > 20 or 257 in ids


def test_a_step_ahead_is_launched_before_tokens_are_read(model: CausalLM) -> None:
    engine, launched = make_engine(model, async_scheduling=True), 0
    run = engine.runner.execute

    def count_launches(*arguments: Any) -> Any:
        nonlocal launched
        launched += 1
        return run(*arguments)

    engine.runner.execute = count_launches  # type: ignore[method-assign]
    request = engine.add_request([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    for number in range(1, 4):
        engine.step()
        assert launched == number + 1
        assert len(engine.in_flight) == request.num_pending == 1 and request.length == 2 + number
    assert engine.step()[0].result is not None
    assert launched == 4, "the fourth token is known to be the last: no step for a fifth"
    check_idle(engine)


def test_tokens_of_ended_requests_are_dropped(model: CausalLM) -> None:
    """A request that is cancelled while a step runs for it; its blocks go to the next one."""
    engine = make_engine(model, max_sequences=1, cache_tokens=32, context=32, async_scheduling=True)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = make_engine(model).generate([[4, 5, 6]], params)[0]
    first = engine.add_request([1, 2, 3], params)
    engine.step()
    second = engine.add_request([4, 5, 6], params)
    update = engine.cancel(first.id)
    assert update is not None and update.result is not None
    assert len(update.result.token_ids) == 1 and not update.token_ids
    while engine.has_unfinished_requests:
        engine.step()
    assert second.output_ids.tolist() == wanted.token_ids
    check_idle(engine)
