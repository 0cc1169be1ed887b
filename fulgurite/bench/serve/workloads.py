"""What the clients ask for: seeded conversations, and when they begin.

    random          prompts of random tokens: nothing is shared
    shared-prefix   G groups; the prompts of a group begin with the same tokens
    multi-turn      conversations of T turns; each turn sends the whole history again

A conversation of the first two is one request. Token ids go to `/v1/completions`; with `--api chat`, and in
multi-turn, text goes to `/v1/chat/completions`. A word of the text is about one token.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fulgurite.errors import ArgumentError

FIRST_TOKEN, LAST_TOKEN = 1000, 30_000  # ordinary tokens of nearly every vocabulary
WORDS: Sequence[str] = str.split("""
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car
city community name president team minute idea kid body information back parent face others level
office door health person art war history party result change morning
""")


@dataclass(frozen=True)
class Lengths:
    """A number of tokens: always `low`, or drawn evenly from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """From `64` or `32:128`."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            raise ArgumentError(
                f"{option} {text} must be a number or a range", next=f"{option} 64 or 32:128"
            )
        return cls(low, high)

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class Turn:
    """What one request adds: token ids or text, and the tokens that it asks for."""

    output_tokens: int
    prompt_ids: tuple[int, ...] = ()
    text: str = ""


Conversation = tuple[Turn, ...]


@dataclass(frozen=True)
class Workload:
    """A kind of load. `prefix`, `groups` and `turns` are for the kinds that have them.

    Attributes:
        prompt: tokens of a prompt; of shared-prefix: after the prefix; of multi-turn: of a message.
        output: tokens of a reply.
        prefix: tokens of a shared prefix.
        groups: number of shared prefixes.
        turns: requests of a conversation.
        is_chat: text for the chat interface instead of token ids.
    """

    kind: str = "random"
    prompt: Lengths = Lengths(64, 64)
    output: Lengths = Lengths(64, 64)
    prefix: int = 512
    groups: int = 8
    turns: int = 4
    is_chat: bool = False

    def __post_init__(self) -> None:
        if self.kind not in MAKERS:
            raise ArgumentError(
                f"--workload {self.kind} is unknown", next=f"one of {', '.join(MAKERS)}"
            )
        if min(self.prefix, self.groups, self.turns) < 1:
            raise ArgumentError("--prefix-tokens, --groups and --turns must be 1 or more")

    @property
    def uses_chat(self) -> bool:
        return self.is_chat or self.kind == "multi-turn"

    @property
    def turns_per_conversation(self) -> int:
        return self.turns if self.kind == "multi-turn" else 1

    @property
    def max_context(self) -> int:
        """Tokens of the longest prompt with its reply; text and chat templates need more: a quarter."""
        one = self.prompt.high + self.output.high
        whole = one * self.turns_per_conversation
        whole += self.prefix if self.kind == "shared-prefix" else 0
        return whole + (whole // 4 + 128 if self.uses_chat else 0)

    def describe(self) -> str:
        text = f"{self.kind} {self.prompt} in, {self.output} out"
        if self.kind == "shared-prefix":
            text += f", {self.groups} prefixes of {self.prefix}"
        if self.kind == "multi-turn":
            text += f", {self.turns} turns"
        return f"{text} · {'chat' if self.uses_chat else 'completions'}"

    def make_conversations(self, requests: int, seed: int) -> list[Conversation]:
        """Conversations of this many requests, rounded up. The same seed gives the same ones."""
        count = -(-requests // self.turns_per_conversation)
        return MAKERS[self.kind](self, count, random.Random(f"{self.kind} {seed}"))


def _make_random(workload: Workload, count: int, source: random.Random) -> list[Conversation]:
    return [
        (_make_turn(workload, source, _draw_tokens(source, workload.prompt.draw(source))),)
        for _ in range(count)
    ]


def _make_shared_prefix(
    workload: Workload, count: int, source: random.Random
) -> list[Conversation]:
    """Groups in turn, then shuffled: each has as many requests as the others, or one more."""
    prefixes = [_draw_tokens(source, workload.prefix) for _ in range(workload.groups)]
    conversations: list[Conversation] = []
    for number in range(count):
        tail = _draw_tokens(source, workload.prompt.draw(source))
        prompt = [*prefixes[number % workload.groups], *tail]
        conversations.append((_make_turn(workload, source, prompt),))
    source.shuffle(conversations)
    return conversations


def _make_multi_turn(workload: Workload, count: int, source: random.Random) -> list[Conversation]:
    return [
        tuple(
            _make_turn(workload, source, _draw_tokens(source, workload.prompt.draw(source)))
            for _ in range(workload.turns)
        )
        for _ in range(count)
    ]


MAKERS = {
    "random": _make_random,
    "shared-prefix": _make_shared_prefix,
    "multi-turn": _make_multi_turn,
}


def _draw_tokens(source: random.Random, count: int) -> list[int]:
    return [int(source.random() * (LAST_TOKEN - FIRST_TOKEN)) + FIRST_TOKEN for _ in range(count)]


def _make_turn(workload: Workload, source: random.Random, prompt: Sequence[int]) -> Turn:
    output = workload.output.draw(source)
    if workload.uses_chat:
        return Turn(output, text=" ".join(WORDS[token % len(WORDS)] for token in prompt))
    return Turn(output, prompt_ids=tuple(prompt))


def draw_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start of the run: a Poisson process of `rate` a second."""
    source, now, times = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        now += source.expovariate(rate)
        times.append(now)
    return times


@dataclass(frozen=True)
class BodyOptions:
    """What is the same in the body of every request. `extra` fields go last; None removes a field."""

    model: str
    is_stream: bool = True
    extra: tuple[tuple[str, Any], ...] = ()


def build_body(
    turn: Turn, history: Sequence[dict[str, str]], options: BodyOptions
) -> dict[str, Any]:
    """The JSON body of a request. Replies have exactly the tokens asked for, if the server can do that."""
    body: dict[str, Any] = {"model": options.model}
    if turn.text:
        body["messages"] = [*history, {"role": "user", "content": turn.text}]
    else:
        body["prompt"] = list(turn.prompt_ids)
    body |= {"max_tokens": turn.output_tokens, "temperature": 0.0, "ignore_eos": True}
    if options.is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= dict(options.extra)
    return {name: value for name, value in body.items() if value is not None}
