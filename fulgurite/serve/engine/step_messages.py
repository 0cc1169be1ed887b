"""What rank 0 and the other ranks send each other: events of requests, steps and tokens; data only.

rank 0 ─▶ all ranks    StepMessage: the events since the last step, and what rank 0 runs, as JSON
all ranks ─▶ rank 0    a token a request, with its log-probabilities, as integers; counts of a replica
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from fulgurite.serve.engine.request import Request, RequestOptions, SamplingParams, TokenLogprob
from fulgurite.serve.engine.sampler import GREEDY_VARIANT, SamplingVariant

NO_LOGPROBS = -1


class RequestAdded(NamedTuple):
    """A request was added. `number` identifies it in tensors, `id` in messages."""

    id: str
    number: int
    replica: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    options: RequestOptions


class TokenSampled(NamedTuple):
    """A request got a token."""

    id: str
    token: int


class RequestEnded(NamedTuple):
    """A request finished, or was cancelled while waiting or running."""

    id: str
    cancelled: bool = False


class PrefixCacheReset(NamedTuple):
    """The prefix cache was cleared."""


class GrammarStarted(NamedTuple):
    """Rank 0 compiles a grammar. Ranks that sample start with it, too, before a request needs it."""

    kind: str
    source: str


class LoadSaved(NamedTuple):
    """Rank 0 saves the expert load: all ranks sum theirs."""


class StepsDropped(NamedTuple):
    """Rank 0 reads none of the steps in flight: all their requests have ended."""


Event = (
    RequestAdded
    | TokenSampled
    | RequestEnded
    | PrefixCacheReset
    | GrammarStarted
    | LoadSaved
    | StepsDropped
)


@dataclass(frozen=True)
class StepMessage:
    """The events since the last step, and what rank 0 runs in this one.

    variant        how rank 0 samples
    can_replay     rank 0 may run a captured step
    can_launch     False: rank 0 must read a step first
    num_logprobs   the most log-probabilities a token that a request on another replica asks for
    is_last        workers stop
    has_step       False: events only, no step follows
    """

    events: list[Event]
    num_requests: int
    num_tokens: int
    variant: SamplingVariant = GREEDY_VARIANT
    can_replay: bool = False
    can_launch: bool = True
    num_logprobs: int = NO_LOGPROBS
    is_last: bool = False
    has_step: bool = True


EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(RequestAdded, TokenSampled, RequestEnded, PrefixCacheReset, GrammarStarted, LoadSaved),
        StepsDropped,
    )
}


def encode_step(message: StepMessage) -> bytes:
    """A message as JSON. It crosses a socket, so it is data only: no pickle."""
    events = [[type(event).__name__, *event] for event in message.events]
    counts = [message.num_requests, message.num_tokens, message.variant]
    can = [message.can_replay, message.can_launch]
    rest = [message.num_logprobs, message.is_last, message.has_step]
    return json.dumps([events, *counts, *can, *rest], default=_to_plain).encode()


def decode_step(data: bytes) -> StepMessage:
    events, requests, tokens, variant, *rest = json.loads(data)
    events = [_read_event(*event) for event in events]
    return StepMessage(events, requests, tokens, SamplingVariant(*variant), *rest)


def _to_plain(value: object) -> object:
    if isinstance(value, SamplingParams | RequestOptions):
        return dataclasses.asdict(value)
    if isinstance(value, Integral):  # of numpy
        return int(value)
    assert isinstance(value, frozenset), f"{type(value)} is not part of an event"
    return sorted(value)


def _read_event(kind: str, *fields: Any) -> Event:
    event: Event = EVENTS[kind](*fields)
    if not isinstance(event, RequestAdded):
        return event
    params: dict[str, Any] = dict(fields[4])
    params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    return event._replace(
        params=SamplingParams(**params),
        stop_ids=frozenset(event.stop_ids),
        options=RequestOptions(**fields[7]),
    )


class RemoteToken(NamedTuple):
    """A token that another replica sampled for a request, and how the request has started there.

    cached_tokens    tokens of its prompt that were found in the prefix cache
    microseconds     since its first step
    """

    id: str
    token: int
    logprob: TokenLogprob | None = None
    cached_tokens: int = 0
    microseconds: int = 0


# ---- tokens as integers ----------------------------------------------------------------------------


def encode_row(
    number: int, request: Request, token: int, logprob: TokenLogprob | None, num_logprobs: int
) -> list[int]:
    """A token of a request, for `decode_row`."""
    microseconds = int(1e6 * (time.perf_counter() - request.first_step_time))
    head = [number, request.cached_tokens, microseconds]
    return head + encode_token(token, logprob, num_logprobs)


def decode_row(id_of: Mapping[int, str], row: Sequence[int]) -> RemoteToken:
    number, cached_tokens, microseconds, *words = row
    found = decode_token(id_of[number], words)
    return found._replace(cached_tokens=cached_tokens, microseconds=microseconds)


def count_row_words(num_logprobs: int) -> int:
    """Integers of a row."""
    return 3 + count_words(num_logprobs)


def count_words(num_logprobs: int) -> int:
    """Integers of a token: itself, its log-probability, and ids and values of the likeliest."""
    return 1 if num_logprobs == NO_LOGPROBS else 2 + 2 * num_logprobs


def encode_token(token: int, logprob: TokenLogprob | None, num_logprobs: int) -> list[int]:
    """A token as `count_words` integers; floats by their bits, ids that are missing as -1."""
    words = [token]
    if num_logprobs != NO_LOGPROBS:
        top = () if logprob is None else logprob.top
        missing = num_logprobs - len(top)
        words.append(_float_bits(np.nan if logprob is None else logprob.logprob))
        words += [id for id, _ in top] + [-1] * missing
        words += [_float_bits(value) for _, value in top] + [0] * missing
    return words


def decode_token(id: str, words: Sequence[int]) -> RemoteToken:
    token, *rest = words
    if not rest:
        return RemoteToken(id, token)
    half = (len(rest) - 1) // 2
    ids, values = rest[1 : 1 + half], rest[1 + half :]
    top = tuple((one, _bits_float(bits)) for one, bits in zip(ids, values, strict=True) if one >= 0)
    return RemoteToken(id, token, TokenLogprob(token, _bits_float(rest[0]), top))


def _float_bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _bits_float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
