"""What is asked and what comes back: prompt and `SamplingParams` in, `Update`s and a `Result` out.

A `Request` is one generation on its way: its tokens so far, how many of them have their keys in the
cache, and where it stands:

    WAITING ──▶ RUNNING ──▶ FINISHED
       ▲           │ blocks ran out: its keys are given up, its tokens kept
       └───────────┘
"""

from __future__ import annotations

import enum
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from torch import Tensor

from fulgurite.errors import ArgumentError

MAX_LOGPROBS = 1000
MOST = 1e30  # of a temperature, penalty or bias: float32 can compute with it
NO_BIAS: Mapping[int, float] = {}


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. The default is greedy.

    temperature 0 takes the likeliest token and reads none of top_p, top_k and min_p. `stop` strings
    end the text and are not part of it. `logprobs=n` reports the chosen token and the n likeliest.
    `seed` and a token's position alone decide the random number it is drawn with; None picks a seed
    that is then found in `Request.seed`. `banned` and `logit_bias` are token ids.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: NO_BIAS)
    banned: Sequence[int] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop, "texts")
        object.__setattr__(self, "stop", stops)
        for name in ("stop_token_ids", "banned"):
            object.__setattr__(self, name, _tokens(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        _number("temperature", self.temperature, "0 (greedy) to 1e30", lambda x: 0 <= x <= MOST)
        _number("top_p", self.top_p, "more than 0 and at most 1 (off)", lambda x: 0 < x <= 1)
        _number("min_p", self.min_p, "from 0 (off) to 1", lambda x: 0 <= x <= 1)
        _integer("top_k", self.top_k, 0, "0 (off) or more")
        _integer("max_tokens", self.max_tokens, 1, "1 or more")
        penalty = self.repetition_penalty
        _number(
            "repetition_penalty", penalty, "more than 0; 1 is off", lambda x: 1 / MOST <= x <= MOST
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _number(name, getattr(self, name), "from -2 to 2; 0 is off", lambda x: -2 <= x <= 2)
        if self.seed is not None:
            _integer("seed", self.seed, 0, "from 0 to 2**64 - 1", 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, f"from 0 to {MAX_LOGPROBS}", MAX_LOGPROBS)
        if any(not isinstance(text, str) or not text for text in stops):
            raise ArgumentError(f"stop={list(stops)!r} must hold texts that are not empty")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse token ids that the model does not have."""
        named = [*self.logit_bias, *self.banned, *self.stop_token_ids]
        wrong = [token for token in named if not 0 <= token < vocabulary]
        if wrong:
            raise ArgumentError(
                f"token {wrong[0]} is not in the vocabulary",
                next=f"token ids go from 0 to {vocabulary - 1}",
            )
        barred = {token for token, bias in self.logit_bias.items() if bias == -math.inf}
        if len(barred.union(self.banned)) == vocabulary:
            raise ArgumentError("every token is banned", next="leave at least one")


def _number(name: str, value: object, allowed: str, right: Callable[[float], bool]) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not right(float(value)):
        raise ArgumentError(f"{name}={value!r} must be {allowed}")


def _integer(name: str, value: object, least: int, allowed: str, most: float = math.inf) -> None:
    if not _is_whole(value) or not least <= value <= most:
        raise ArgumentError(f"{name}={value!r} must be a whole number, {allowed}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _several(name: str, values: object, what: str) -> tuple[Any, ...]:
    """Whatever holds several; a text is no list of its letters."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ArgumentError(f"{name}={values!r} must be a list of {what}")
    return tuple(values)


def _tokens(name: str, values: object) -> tuple[int, ...]:
    tokens = _several(name, values, "token ids")
    wrong = [token for token in tokens if not _is_whole(token)]
    if wrong:
        raise ArgumentError(f"{name} has {wrong[0]!r}", next="token ids are whole numbers")
    return tuple(int(token) for token in tokens)


def _biases(values: object) -> dict[int, float]:
    """A copy: a frozen setting does not change with somebody's dict."""
    if not isinstance(values, Mapping):
        raise ArgumentError(f"logit_bias={values!r} must be a dict of token ids and numbers")
    for token, bias in zip(_tokens("logit_bias", values), values.values(), strict=True):
        name, allowed = f"logit_bias of token {token}", "a number; use -100 to 100, or -inf"
        _number(name, bias, allowed, lambda x: x == -math.inf or -MOST <= x <= MOST)
    return {int(token): float(bias) for token, bias in values.items()}


class Constraint(Protocol):
    """Which tokens may come next, for structured output: a grammar walks beside the request."""

    def allowed(self) -> Tensor | None:
        """A bool tensor over the vocabulary; None: all of it."""
        ...

    def accept(self, token: int) -> None:
        """The token that was chosen."""
        ...


@dataclass(frozen=True)
class TokenLogprob:
    """log p of a token under the model's own distribution, before bias, penalties and temperature.

    `top` has the likeliest tokens and theirs, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Result:
    """A finished generation. `finish_reason`: stop, length (max_tokens or context) or cancelled.

    `stopped_by` is the stop string or the id of the stop token. `token_ids` has that token too, and
    all tokens of a stop string; `text` ends before them.
    """

    id: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stopped_by: str | int | None
    logprobs: list[TokenLogprob] | None
    cached_tokens: int  # of the prompt, whose keys were found in the cache
    first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first."""
        after = self.seconds - self.first_token_seconds
        return (len(self.token_ids) - 1) / after if after > 0 else 0.0


class Update(NamedTuple):
    """What one step added to a request; `result` on the last one."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    result: Result | None = None


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One generation. `tokens[:length]` are prompt and reply, the first `computed` of them cached."""

    def __init__(
        self,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        limit: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.id = id
        self.params = params
        self.constraint = constraint
        self.changes_logits = bool(
            params.logit_bias or params.banned or params.penalised or constraint is not None
        )
        self.draws = not params.greedy
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.prompt_length = self.length = len(prompt_ids)
        self.limit = min(limit, self.length + params.max_tokens)  # tokens in all
        self.tokens = np.empty(self.limit, dtype=np.int64)
        self.tokens[: self.length] = prompt_ids
        self.state = State.WAITING
        self.computed = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.outgrown = False  # LongRoPE: keys are turned by the long factors
        self.row = -1  # in the block tables, while running
        self.block_hashes: list[bytes] = []
        self.published = 0  # blocks that others may reuse
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = ""
        self.stopped_by: str | int | None = None
        self.arrived = time.perf_counter()
        self.first_token_at = self.finished_at = self.arrived

    def append(self, token: int) -> None:
        if self.length == self.prompt_length:
            self.first_token_at = time.perf_counter()
        self.tokens[self.length] = token
        self.length += 1

    @property
    def generated(self) -> np.ndarray:
        return self.tokens[self.prompt_length : self.length]

    def finish(self, reason: str, stopped_by: str | int | None = None) -> None:
        self.state = State.FINISHED
        self.finish_reason, self.stopped_by = reason, stopped_by
        self.finished_at = time.perf_counter()

    def result(self, text: str) -> Result:
        return Result(
            id=self.id,
            prompt_ids=self.tokens[: self.prompt_length].tolist(),
            token_ids=self.generated.tolist(),
            text=text,
            finish_reason=self.finish_reason,
            stopped_by=self.stopped_by,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            cached_tokens=self.cached_tokens,
            first_token_seconds=self.first_token_at - self.arrived,
            seconds=self.finished_at - self.arrived,
        )
