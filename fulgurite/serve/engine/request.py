"""A request and its result: a prompt and `SamplingParams` in, `Update`s and a `Result` out.

A `Request` holds the tokens of one generation, the number of tokens whose keys are in the KV cache,
the number of tokens that a launched step still samples, and a state:

    WAITING ──▶ RUNNING ──▶ FINISHED
       ▲           │ preemption: its blocks are freed, its tokens are kept
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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.grammar import (
    Grammar,
    GrammarSpec,
    ban_words,
    check_grammar_options,
    make_grammar_spec,
)

if TYPE_CHECKING:  # the server imports this module, and no torch
    from torch import Tensor

MAX_LOGPROBS = 1000
MAX_MAGNITUDE = 1e30  # of a temperature, penalty or bias; float32 can still compute with it
NO_BIAS: Mapping[int, float] = {}
ERROR_CAUSES = {  # of a request that ended with an error
    "": "the engine",
    "request": "the request itself: it would fail again",
    "ranks": "a rank was lost, and the engine restarts or ends",
}


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled and when a request stops. The default is greedy decoding.

    Attributes:
        temperature: 0: greedy decoding, which ignores `top_p`, `top_k` and `min_p`.
        top_p: sample from the most likely tokens of this total probability. 1: all.
        top_k: sample from the k most likely tokens. 0: all.
        min_p: minimum probability relative to the most likely token. 0: no limit.
        max_tokens: maximum number of tokens of the reply.
        min_tokens: before the reply has so many tokens, stop and end tokens are not sampled, and stop
            strings do not end it.
        stop: strings that end the reply. They are not part of its text.
        stop_token_ids: tokens that end the reply.
        ignore_eos: continue after an end-of-sequence token.
        seed: the seed and the position of a token determine its random number. None: a random seed,
            see `Request.seed`.
        repetition_penalty: above 1, tokens of prompt and reply become less likely. 1: off.
        frequency_penalty: subtracted from a logit for each occurrence in the reply. 0: off.
        presence_penalty: subtracted once from the logits of tokens in the reply. 0: off.
        logit_bias: token id → a number that is added to its logit.
        banned_token_ids: tokens that are never sampled.
        allowed_token_ids: the only tokens that are sampled. None: all. An end token that is not in the
            list never ends the reply.
        logprobs: n: report the log-probability of the sampled token and of the top n.
        prompt_logprobs: n: the same for the tokens of the prompt, given those before them. The prompt
            is then computed as a whole, also what the prefix cache has.
        json_schema: the reply is JSON of this schema: a dict, its JSON text, or True for any JSON.
        json_object: the reply is a JSON object.
        regex: the reply matches this regex from its first to its last character. Rust's syntax, with
            ASCII \\d and \\w.
        grammar: the reply follows this grammar, in llguidance's dialect of Lark.
        choices: the reply is one of these strings.
        structural_tag: the reply is text with tagged parts that follow schemas: a dict in the form of
            vLLM or xgrammar, or its JSON text. At most one of these six.
        bad_words: texts that the reply never has, however they are split into tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: NO_BIAS)
    banned_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choices: Sequence[str] | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    bad_words: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        stop = self.stop
        stops = (stop,) if isinstance(stop, str) else _check_sequence("stop", stop, "strings")
        object.__setattr__(self, "stop", stops)
        for name in ("stop_token_ids", "banned_token_ids"):
            object.__setattr__(self, name, _check_token_ids(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            allowed = _check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ArgumentError(
                    "allowed_token_ids is empty, so no token can be sampled",
                    next="list at least one token, or use None to allow all",
                )
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "logit_bias", _check_logit_bias(self.logit_bias))
        _check_number(
            "temperature", self.temperature, "0 (greedy) to 1e30", lambda x: 0 <= x <= MAX_MAGNITUDE
        )
        _check_number("top_p", self.top_p, "more than 0 and at most 1 (off)", lambda x: 0 < x <= 1)
        _check_number("min_p", self.min_p, "from 0 (off) to 1", lambda x: 0 <= x <= 1)
        _check_integer("top_k", self.top_k, 0, "0 (off) or more")
        _check_integer("max_tokens", self.max_tokens, 1, "1 or more")
        limit = f"from 0 to max_tokens={self.max_tokens}"
        _check_integer("min_tokens", self.min_tokens, 0, limit, self.max_tokens)
        penalty = self.repetition_penalty
        _check_number(
            "repetition_penalty",
            penalty,
            "more than 0; 1 is off",
            lambda x: 1 / MAX_MAGNITUDE <= x <= MAX_MAGNITUDE,
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(
                name, getattr(self, name), "from -2 to 2; 0 is off", lambda x: -2 <= x <= 2
            )
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, "from 0 to 2**64 - 1", 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _check_integer(name, count, 0, f"from 0 to {MAX_LOGPROBS}", MAX_LOGPROBS)
        if any(not isinstance(text, str) or not text for text in stops):
            raise ArgumentError(f"stop={list(stops)!r} must contain non-empty strings only")
        words = self.bad_words
        words = (words,) if isinstance(words, str) else _check_sequence("bad_words", words, "texts")
        if any(not isinstance(word, str) or not word for word in words):
            raise ArgumentError(f"bad_words={list(words)!r} must contain non-empty strings only")
        object.__setattr__(self, "bad_words", words)
        schema, choices, tag = check_grammar_options(
            self.json_schema,
            self.json_object,
            self.regex,
            self.grammar,
            self.choices,
            self.structural_tag,
        )
        object.__setattr__(self, "json_schema", schema)  # as text: later changes have no effect
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "structural_tag", tag)

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        """The grammar of the reply and the words that it can't have, if there are any."""
        schema, choices, tag = self.json_schema, self.choices, self.structural_tag
        assert schema is None or isinstance(schema, str), "it was encoded"
        assert tag is None or isinstance(tag, str), "it was encoded"
        names = None if choices is None else tuple(choices)
        spec = make_grammar_spec(schema, self.json_object, self.regex, self.grammar, names, tag)
        return ban_words(self.bad_words, spec)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    def check_token_ids(self, vocab_size: int) -> None:
        """ArgumentError for token ids outside the model's vocabulary."""
        allowed = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        for name in ("logit_bias", "banned_token_ids", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise ArgumentError(
                        f"{name} has token {token}, which is not in the vocabulary",
                        next=f"token ids range from 0 to {vocab_size - 1}",
                    )
        banned = {token for token, bias in self.logit_bias.items() if bias == -math.inf}
        if banned.union(self.banned_token_ids).issuperset(allowed):
            raise ArgumentError("every token is banned", next="allow at least one token")


def _check_number(
    name: str, value: object, allowed: str, is_valid: Callable[[float], bool]
) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not is_valid(float(value)):
        raise ArgumentError(f"{name}={value!r} must be {allowed}")


def _check_integer(
    name: str, value: object, minimum: int, allowed: str, maximum: float = math.inf
) -> None:
    if not _is_integer(value) or not minimum <= value <= maximum:
        raise ArgumentError(f"{name}={value!r} must be an integer, {allowed}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_sequence(name: str, values: object, what: str) -> tuple[Any, ...]:
    """The values of any iterable except a string."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ArgumentError(f"{name}={values!r} must be a list of {what}")
    return tuple(values)


def _check_token_ids(name: str, values: object) -> tuple[int, ...]:
    tokens = _check_sequence(name, values, "token ids")
    invalid = [token for token in tokens if not _is_integer(token)]
    if invalid:
        raise ArgumentError(f"{name} contains {invalid[0]!r}", next="token ids are integers")
    return tuple(int(token) for token in tokens)


def _check_logit_bias(values: object) -> dict[int, float]:
    """A checked copy, so that later changes of the caller's dict have no effect."""
    if not isinstance(values, Mapping):
        raise ArgumentError(f"logit_bias={values!r} must be a dict from token ids to numbers")
    if not values:
        return {}
    for token, bias in zip(_check_token_ids("logit_bias", values), values.values(), strict=True):
        name, allowed = f"logit_bias of token {token}", "a number; use -100 to 100, or -inf"
        _check_number(
            name, bias, allowed, lambda x: x == -math.inf or -MAX_MAGNITUDE <= x <= MAX_MAGNITUDE
        )
    return {int(token): float(bias) for token, bias in values.items()}


@dataclass(frozen=True)
class RequestOptions:
    """How the engine treats a request. None of it changes the request's tokens.

    Attributes:
        priority: requests of a lower number start first, and are preempted last.
        cache_salt: requests share KV-cache blocks of equal prefixes only if their salts are equal.
        detokenize: make text and look for stop strings. False: updates have token ids only.
        continues_text: the reply goes on from the prompt, in the same text. True for a prompt of text.
    """

    priority: int = 0
    cache_salt: str = ""
    detokenize: bool = True
    continues_text: bool = False


class Constraint(Protocol):
    """A grammar for structured output: it says which tokens may come next.

    If a method raises, its request ends with an error; the others continue. One that also has the
    methods of `Grammar` (grammar.py) can force tokens and end the reply.
    """

    def allowed_tokens(self) -> Tensor | None:
        """A mask over the vocabulary; None: every token.

        Either bool [O], or int32 [ceil(O / 32)] with bit `i % 32` of word `i // 32` for token i. A
        mask may be shorter: tokens past its end are not allowed.
        """
        ...

    def accept_token(self, token: int) -> None:
        """Advance the grammar by the sampled token."""
        ...


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token from the raw logits, before bias, penalties and temperature.

    `top` lists the most likely token ids with their log-probabilities, best first. `rank` is the token's
    place among all, from 1 on; None for tokens of the reply.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class Result:
    """A finished generation.

    `finish_reason` is stop, length (max_tokens or context), cancelled or error; `error` then says what
    happened. `stopped_by` is the stop string or the id of the stop token. `token_ids` includes the
    stop token or the tokens of the stop string; `text` ends before them. `restarts` counts how often it
    was continued after a rank was lost (`on_rank_failure="retry"`). `prompt_logprobs` has an entry for
    each token of the prompt; that of the first is None, since nothing comes before it.
    """

    id: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stopped_by: str | int | None
    logprobs: list[TokenLogprob] | None
    cached_tokens: int  # prompt tokens found in the prefix cache
    first_token_seconds: float
    seconds: float
    error: str | None = None
    restarts: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def tokens_per_second(self) -> float:
        """The decode rate: of the tokens after the first."""
        after = self.seconds - self.first_token_seconds
        return (len(self.token_ids) - 1) / after if after > 0 else 0.0


class Update(NamedTuple):
    """The text and tokens that one step added to a request. The last update has the `result`."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    result: Result | None = None


class RequestState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One generation.

    `tokens[:length]` are prompt and reply. A launched step that was not read yet samples
    `num_pending` more. The keys of the first `num_computed_tokens` are in the KV cache, or will be
    once the launched steps have run.
    """

    def __init__(
        self,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: int,
        constraint: Constraint | None = None,
        stop_ids: frozenset[int] = frozenset(),
        options: RequestOptions | None = None,
    ) -> None:
        self.id = id
        self.options = RequestOptions() if options is None else options
        self.arrival_number = -1  # set by the scheduler
        self.params = params
        self.stop_ids = stop_ids  # stop and end tokens
        self.set_constraint(constraint)
        self.is_sampled = not params.is_greedy
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.prompt_length = self.length = len(prompt_ids)
        self.num_pending = 0
        self.num_sampled = 0  # tokens of the reply that were not forced
        self.num_reported = self.length  # of prompt and reply, with those that were reported
        self.num_restarts = 0  # after a rank was lost
        self.lost_at = -1  # `num_reported` when a rank was lost the last time
        self.max_length = min(context, self.length + params.max_tokens)  # prompt and reply
        self.tokens = np.empty(self.max_length, dtype=np.int64)
        self.tokens[: self.length] = prompt_ids
        self.state = RequestState.WAITING
        self.num_computed_tokens = 0
        self.num_state_tokens = 0  # tokens in its states, for layers without attention; -1: unknown
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.uses_long_rope = False  # LongRoPE: its keys are rotated by the long factors
        self.block_table_row = -1  # while running
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0  # full blocks in the prefix cache
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]  # of its first tokens, so far
        self.finish_reason = ""
        self.stopped_by: str | int | None = None
        self.error: str | None = None
        self.error_cause = ""  # one of ERROR_CAUSES
        self.arrival_time = time.perf_counter()
        self.first_step_time = 0.0  # 0: it has not run yet
        self.first_token_time = self.finish_time = self.arrival_time

    @property
    def schedule_key(self) -> tuple[int, int]:
        """Requests are admitted in this order, and preempted from its end."""
        return self.options.priority, self.arrival_number

    def set_constraint(self, constraint: Constraint | None) -> None:
        """Set the constraint before the request runs: its grammar was compiled."""
        params = self.params
        self.constraint = constraint
        self.grammar = constraint if isinstance(constraint, Grammar) else None
        # With `ignore_eos` the reply goes on as long as the grammar allows, and ends with it.
        ends = () if self.grammar is None or not params.ignore_eos else self.grammar.eos_token_ids
        self.hidden_ids = frozenset(ends) - frozenset(params.stop_token_ids)
        self.constraint_error: str | None = None  # why there is no mask for the next token
        self.needs_logit_processing = bool(
            params.logit_bias
            or params.banned_token_ids
            or params.allowed_token_ids is not None
            or params.min_tokens
            or params.has_penalties
            or constraint is not None
        )

    @property
    def scheduled_length(self) -> int:
        """The number of tokens, with those that are being sampled."""
        return self.length + self.num_pending

    @property
    def reusable_length(self) -> int:
        """How many of its first tokens need not be computed if their keys are cached.

        The log-probability of a token comes from the logits of the one before it.
        """
        known = len(self.prompt_logprobs)
        if self.params.prompt_logprobs is None or known == self.prompt_length:
            return self.length - 1  # the last token always runs, since its logits are needed
        return known - 1

    def add_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprob | None]) -> None:
        """Add those of the tokens from position `start` on; after a preemption some are known."""
        known = len(self.prompt_logprobs)
        assert start <= known, (
            f"{self.id}: log-probabilities of tokens {known} to {start} are missing"
        )
        self.prompt_logprobs += logprobs[known - start :]

    def append(self, token: int, is_forced: bool = False) -> None:
        """Add a sampled token, or one that the grammar forces."""
        if not is_forced:
            self.num_pending = max(self.num_pending - 1, 0)  # of another rank's request always 0
            if not self.num_sampled:
                self.first_token_time = time.perf_counter()
            self.num_sampled += 1
        self.tokens[self.length] = token
        self.length += 1

    @property
    def output_ids(self) -> np.ndarray:
        return self.tokens[self.prompt_length : self.length]

    def restart(self) -> None:
        """Back to the queue after its rank was lost: nothing is computed any more.

        Tokens that were reported stay. One that was sampled and not reported is sampled again.
        """
        if self.state is RequestState.RUNNING or self.length > self.prompt_length:
            self.num_preemptions += 1  # so that its cached tokens are those of its first start
        dropped = self.length - self.num_reported
        self.length -= dropped
        self.num_sampled -= dropped
        if self.params.logprobs is not None:
            del self.logprobs[self.length - self.prompt_length :]
        self.prompt_logprobs = [None]  # new ranks know none, and all must compute the same ones
        self.state = RequestState.WAITING
        self.num_pending = self.num_computed_tokens = self.num_state_tokens = 0
        self.block_table_row, self.num_cached_blocks = -1, 0
        self.block_hashes.clear()
        self.uses_long_rope = False

    def finish(self, reason: str, stopped_by: str | int | None = None) -> None:
        self.state = RequestState.FINISHED
        self.finish_reason, self.stopped_by = reason, stopped_by
        self.finish_time = time.perf_counter()
        if not self.num_sampled:
            self.first_token_time = self.finish_time

    def build_result(self, text: str) -> Result:
        return Result(
            id=self.id,
            prompt_ids=self.tokens[: self.prompt_length].tolist(),
            token_ids=self.output_ids.tolist(),
            text=text,
            finish_reason=self.finish_reason,
            stopped_by=self.stopped_by,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            cached_tokens=self.cached_tokens,
            first_token_seconds=self.first_token_time - self.arrival_time,
            seconds=self.finish_time - self.arrival_time,
            error=self.error,
            restarts=self.num_restarts,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
        )
