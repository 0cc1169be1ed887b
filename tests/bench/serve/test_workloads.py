"""The same seed gives the same requests, of the lengths that were asked for."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest

from fulgurite.bench.serve.workloads import (
    FIRST_TOKEN,
    LAST_TOKEN,
    MAKERS,
    BodyOptions,
    Lengths,
    Turn,
    Workload,
    build_body,
    draw_arrivals,
)
from fulgurite.errors import ArgumentError


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_seed_determines_everything(kind: str, is_chat: bool) -> None:
    workload = Workload(kind, Lengths(3, 9), Lengths(2, 5), prefix=20, is_chat=is_chat)
    first = workload.make_conversations(16, seed=1)
    assert first == workload.make_conversations(16, seed=1)
    assert first != workload.make_conversations(16, seed=2)
    assert sum(map(len, first)) == 16
    turns = [turn for conversation in first for turn in conversation]
    assert all(2 <= turn.output_tokens <= 5 for turn in turns)
    assert all(bool(turn.text) == workload.uses_chat != bool(turn.prompt_ids) for turn in turns)


def test_random_prompts() -> None:
    conversations = Workload(prompt=Lengths(3, 9)).make_conversations(300, seed=0)
    prompts = [turn.prompt_ids for (turn,) in conversations]
    assert {len(prompt) for prompt in prompts} == set(range(3, 10))
    assert len(set(prompts)) == 300
    tokens = [token for prompt in prompts for token in prompt]
    assert min(tokens) >= FIRST_TOKEN and max(tokens) < LAST_TOKEN


def test_shared_prefixes() -> None:
    workload = Workload("shared-prefix", Lengths(4, 4), prefix=50, groups=3)
    prompts = [turn.prompt_ids for (turn,) in workload.make_conversations(31, seed=0)]
    assert {len(prompt) for prompt in prompts} == {54} and len(set(prompts)) == 31
    groups = Counter(prompt[:50] for prompt in prompts)
    assert sorted(groups.values()) == [10, 10, 11]
    order = [list(groups).index(prompt[:50]) for prompt in prompts]
    assert order[:6] != [0, 1, 2, 0, 1, 2] and order != sorted(order)  # shuffled


def test_conversations_are_rounded_up() -> None:
    conversations = Workload("multi-turn", turns=4).make_conversations(9, seed=0)
    assert [len(conversation) for conversation in conversations] == [4, 4, 4]
    assert len(conversations[0][0].text.split()) == 64


def test_bodies() -> None:
    turn = Turn(5, prompt_ids=(1, 2))
    body = build_body(turn, (), BodyOptions("m", extra=(("ignore_eos", None), ("top_k", 3))))
    assert body == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
    }
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = build_body(Turn(5, text="c"), history, BodyOptions("m", is_stream=False))
    assert [message["content"] for message in body["messages"]] == ["a", "b", "c"]
    assert "stream" not in body and "prompt" not in body and body["ignore_eos"] is True


def test_poisson_arrivals() -> None:
    times = draw_arrivals(20_000, rate=50.0, seed=3)
    assert times == draw_arrivals(20_000, rate=50.0, seed=3) and times == sorted(times)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)  # of an exponential: its mean


@pytest.mark.parametrize("text", ["", "0", "-3", "a", "5:2", "0:4", "1:2:3", "1.5"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="--prompt-tokens"):
        Lengths.parse(text, "--prompt-tokens")


def test_lengths() -> None:
    assert Lengths.parse("64", "") == Lengths(64, 64) and str(Lengths(64, 64)) == "64"
    assert Lengths.parse("3:9", "") == Lengths(3, 9) and str(Lengths(3, 9)) == "3 to 9"


def test_the_context_holds_the_longest_request() -> None:
    assert Workload(prompt=Lengths(3, 9), output=Lengths(5, 5)).max_context == 14
    workload = Workload("shared-prefix", Lengths(9, 9), Lengths(5, 5), prefix=100)
    assert workload.max_context == 114
    workload = Workload("multi-turn", Lengths(100, 100), Lengths(100, 100), turns=5)
    assert workload.max_context >= 1000


@pytest.mark.parametrize("change", [{"kind": "other"}, {"groups": 0}, {"turns": 0}, {"prefix": 0}])
def test_workloads_that_are_none(change: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        Workload(**change)  # type: ignore[arg-type]
