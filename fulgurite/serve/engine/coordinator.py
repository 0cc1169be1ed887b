"""One engine over many ranks: rank 0 (the driver) takes requests, all ranks run the model.

    rank 0     add, cancel ─▶ events ─┐ one message a step                   ┌▶ text, results
                                      ▼                                      │
    all ranks                       the same scheduler ─▶ chunks ─▶ model ─▶ tokens of rank 0

The scheduler is deterministic: it depends only on the events of its requests. So every rank has a
scheduler of its own. Rank 0 broadcasts the events (a request was added, got a token, ended), and
every rank schedules the same chunks. The message also has rank 0's token counts; a rank that
scheduled something else raises an error.

With asynchronous scheduling all ranks schedule, launch and read steps in the same order. Rank 0 sends a
message for every attempt to schedule a step. A step that must wait for tokens is launched on no rank,
and all ranks read the oldest step in flight. Tokens go from step to step on the device
(token_broadcast.py).

With a data axis every data rank is a replica with requests of its own. Rank 0 assigns a new request
to the replica with the fewest, the first rank of each replica samples its tokens, and rank 0 gathers
them. A replica without requests runs steps without tokens, since its experts may be needed.

Host collectives of a step:

    one replica      none, unless the step is larger than any before
    several          one agreement (`StepProposal`): the memory limit, and whether all replicas decode;
                     all ranks then replay a captured step of one size, those without requests too.
                     And one gather of the tokens, with log-probabilities if somebody asked for them

Grammars are compiled by rank 0, which knows where a reply ends, and by the first rank of the request's
replica, which needs the masks. A `constraint=` is an object of rank 0's process: it stays there.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.parallel.collectives import all_gather, all_reduce_mins
from fulgurite.parallel.health import RankTime
from fulgurite.parallel.mesh import Mesh
from fulgurite.parallel.processes.channel import BroadcastChannel
from fulgurite.parallel.symmetric.collectives import use_symmetric_collectives
from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.engine.request import Request, RequestOptions, SamplingParams, TokenLogprob
from fulgurite.serve.engine.sampler import GREEDY_VARIANT, SamplingVariant
from fulgurite.serve.engine.scheduler import ScheduledChunk

NO_GRAMMAR: dict[str, Any] = {
    "json_schema": None,
    "json_object": False,
    "regex": None,
    "grammar": None,
    "choices": None,
    "structural_tag": None,
    "bad_words": (),
}
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


class RemoteToken(NamedTuple):
    """A token that another replica sampled for a request."""

    id: str
    token: int
    logprob: TokenLogprob | None = None


class StepProposal(NamedTuple):
    """What a rank could run next; and what all ranks run, once they agreed.

    max_tokens     the most tokens of a step for which it has the memory
    can_replay     it has only decoding requests, or none, and may capture steps
    num_requests   requests of its replica; of the largest one
    num_tokens     tokens of its replica; of the largest one
    variant        how its requests are sampled; those of all replicas
    can_launch     it need not know tokens that are still being sampled
    """

    max_tokens: int
    can_replay: bool
    num_requests: int
    variant: SamplingVariant
    num_tokens: int
    can_launch: bool


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


class Coordinator:
    """Keeps the engines of all ranks in step. Rank 0 broadcasts its events through it."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.channel = BroadcastChannel(mesh)
        self.replica = mesh.data.index
        self.events: list[Event] = []
        self.replica_of: dict[str, int] = {}  # by request id
        self.number_of: dict[str, int] = {}
        self.id_of: dict[int, str] = {}  # by number
        self.num_logprobs: dict[str, int] = {}  # of requests on other replicas that ask for them
        self.counter = itertools.count()
        self.step_logprobs = NO_LOGPROBS  # of the step that was begun last
        self.last_message = -1  # number of the message that was sent last
        self.samples = mesh.data.size > 1 and 0 in mesh.data.ranks  # rank 0 gathers its tokens

    # ---- rank 0 ------------------------------------------------------------------------------------

    def add_request(self, request: Request, prompt_ids: list[int]) -> None:
        """Assign a request to a replica: to the one with the fewest, or to rank 0's.

        Those with a `constraint=` stay there, and those with `prompt_logprobs`: other replicas send
        tokens only.
        """
        if self.mesh.rank != 0:
            raise ArgumentError(
                "only rank 0 takes requests, and this rank is a worker",
                where=f"rank {self.mesh.rank}",
                next="if llm.is_driver: llm.generate(...); every rank calls llm.close() at the end",
            )
        replica, params = 0, request.params
        has_object = request.constraint is not None and params.grammar_spec is None
        if not has_object and params.prompt_logprobs is None:
            assigned = [*self.replica_of.values()]
            loads = [assigned.count(index) for index in range(self.mesh.data.size)]
            replica = loads.index(min(loads))
        id, number = request.id, next(self.counter)
        self.replica_of[id], self.number_of[id], self.id_of[number] = replica, number, id
        # Only rank 0 looks for stop strings; its replica needs no other grammar than its own.
        params = replace(params, stop=())
        if replica == 0:
            params = replace(params, **NO_GRAMMAR)
        elif params.logprobs is not None:
            self.num_logprobs[id] = params.logprobs
        self.events.append(
            RequestAdded(
                id,
                number,
                replica,
                prompt_ids,
                params,
                request.seed,
                request.stop_ids,
                request.options,
            )
        )

    def record_token(self, request: Request, token: int) -> None:
        self.events.append(TokenSampled(request.id, token))

    def record_end(self, request: Request, cancelled: bool = False) -> None:
        self.events.append(RequestEnded(request.id, cancelled))
        del self.replica_of[request.id], self.id_of[self.number_of.pop(request.id)]
        self.num_logprobs.pop(request.id, None)

    def record_grammar(self, spec: GrammarSpec) -> None:
        if self.mesh.data.size > 1:
            self.events.append(GrammarStarted(spec.kind, spec.source))

    def record_prefix_cache_reset(self) -> None:
        self.events.append(PrefixCacheReset())

    def record_drop(self) -> None:
        self.events.append(StepsDropped())

    def begin_saving_load(self) -> None:
        """Make all workers sum their expert load now; this rank then does the same."""
        self.events.append(LoadSaved())
        self._send(StepMessage(self.events, 0, 0, has_step=False))

    def is_local(self, request: Request) -> bool:
        """Whether the request runs on this rank's replica."""
        return self.replica_of[request.id] == self.replica

    def begin_step(self, step: StepProposal) -> None:
        """Make all workers schedule the next step, and launch it unless rank 0 can't."""
        num_logprobs = max(self.num_logprobs.values(), default=NO_LOGPROBS)
        self.step_logprobs = num_logprobs
        counts = step.num_requests, step.num_tokens
        can = step.can_replay, step.can_launch
        self._send(StepMessage(self.events, *counts, step.variant, *can, num_logprobs))

    def _send(self, message: StepMessage) -> None:
        self.last_message = self.channel.send(encode_step(message))
        self.events = []

    def release_messages(self, number: int, has_tokens: bool) -> None:
        """Rank 0 has read the step of this message. If it has the step's tokens, or replicas have agreed
        on the step, then all ranks have received the message."""
        if has_tokens or self.mesh.data.size > 1:
            self.channel.release(number)

    def gather_remote_tokens(self, max_tokens: int) -> list[RemoteToken]:
        """The tokens that the other replicas sampled in this step."""
        if self.mesh.data.size == 1:
            return []
        rows = self.gather_tokens([], max_tokens, self.step_logprobs)
        return [decode_token(self.id_of[row[0]], row[1:]) for row in rows if row[0] >= 0]

    def read_rank_times(self) -> tuple[RankTime, ...]:
        """How each rank spends its steps; empty before the first ones."""
        health = self.mesh.health
        return () if health is None else health.read_times()

    def stop(self) -> None:
        """Make all workers stop."""
        self._send(StepMessage(self.events, 0, 0, is_last=True))

    # ---- all ranks ---------------------------------------------------------------------------------

    def gather_tokens(
        self, sampled: Sequence[Sequence[int]], max_tokens: int, num_logprobs: int
    ) -> list[list[int]]:
        """Rows of all replicas (`encode_token`, after the request's number); called by the first rank
        of each. Every replica sends `max_tokens` rows; those that are not used start with -1.
        """
        rows = torch.full((max_tokens, 1 + count_words(num_logprobs)), -1)
        for index, row in enumerate(sampled):
            rows[index] = torch.tensor(row)
        gathered: Tensor = all_gather(rows, self.mesh.data, "all-gather of sampled tokens")
        result: list[list[int]] = gathered.tolist()
        return result

    def agree(self, proposal: StepProposal) -> StepProposal:
        """What all ranks can run; a host collective over all of them."""
        limit, can_replay, can_launch, requests, tokens, *bits = all_reduce_mins(
            [
                proposal.max_tokens,
                int(proposal.can_replay),
                int(proposal.can_launch),
                -proposal.num_requests,
                -proposal.num_tokens,
                *(-int(bit) for bit in proposal.variant),
            ],
            self.mesh.world,
            "agreement on a step",
        )
        variant = SamplingVariant(*(bit < 0 for bit in bits))
        can = bool(can_replay), bool(can_launch)
        return StepProposal(limit, can[0], -requests, variant, -tokens, can[1])


# ---- tokens as integers ----------------------------------------------------------------------------


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


def count_scheduled(chunks: Sequence[ScheduledChunk]) -> tuple[int, int]:
    """The number of requests and of tokens in a step."""
    return len(chunks), sum(chunk.num_tokens for chunk in chunks)


def open_mesh(
    data: int | None,
    tensor: int,
    expert: int,
    timeout: float,
    *,
    pipeline: int = 1,
    context: int = 1,
    nodes: int | None = None,
) -> Mesh | None:
    """The mesh of these axes; None for a single rank."""
    if (data or 1) == tensor == expert == pipeline == context == 1:
        return None
    mesh = Mesh(
        data, tensor, expert, pipeline=pipeline, context=context, timeout=timeout, nodes=nodes
    )
    if mesh.device.type == "cuda":
        torch.cuda.set_device(mesh.device)
        use_symmetric_collectives(mesh)
    return mesh
