"""One engine over many ranks: rank 0 (the driver) takes requests, all ranks run the model.

    rank 0     add, cancel ─▶ events ─┐ one message a step                   ┌▶ text, results
                                      ▼                                      │
    all ranks                       the same scheduler ─▶ chunks ─▶ model ─▶ tokens of rank 0

The scheduler is deterministic: it depends only on the events of its requests. So every rank has a
scheduler of its own. Rank 0 broadcasts the events (a request was added, got a token, ended), and
every rank schedules the same chunks. The message also has rank 0's token counts; a rank that
scheduled something else raises an error.

With a data axis every data rank is a replica with requests of its own. Rank 0 assigns a new request
to the replica with the fewest, the first rank of each replica samples its tokens, and rank 0 gathers
them. A replica without requests runs steps without tokens, since its experts may be needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.parallel.channel import BroadcastChannel
from fulgurite.parallel.collectives import all_gather, all_reduce_min
from fulgurite.parallel.mesh import Mesh
from fulgurite.plan.memory import MemoryPlan, add_kv_cache
from fulgurite.serve.engine.request import Request, RequestOptions, SamplingParams
from fulgurite.serve.engine.scheduler import ScheduledChunk

NO_GRAMMAR: dict[str, Any] = {
    "json_schema": None,
    "json_object": False,
    "regex": None,
    "grammar": None,
    "choices": None,
}
NO_CAPTURE_REASON = "layers communicate with other ranks, so decode steps are not captured"


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


Event = RequestAdded | TokenSampled | RequestEnded | PrefixCacheReset


@dataclass(frozen=True)
class StepMessage:
    """The events since the last step, and what rank 0 runs in this one. `is_last`: workers stop."""

    events: list[Event]
    num_requests: int
    num_tokens: int
    is_last: bool = False


EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (RequestAdded, TokenSampled, RequestEnded, PrefixCacheReset)
}


def encode_step(message: StepMessage) -> bytes:
    """A message as JSON. It crosses a socket, so it is data only: no pickle."""
    events = [[type(event).__name__, *event] for event in message.events]
    counts = [message.num_requests, message.num_tokens, message.is_last]
    return json.dumps([events, *counts], default=_to_plain).encode()


def decode_step(data: bytes) -> StepMessage:
    events, *counts = json.loads(data)
    return StepMessage([_read_event(*event) for event in events], *counts)


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
        self.counter = itertools.count()

    # ---- rank 0 ------------------------------------------------------------------------------------

    def add_request(self, request: Request, prompt_ids: list[int]) -> None:
        """Assign a request to a replica. Grammars and log-probabilities need rank 0's replica."""
        if self.mesh.rank != 0:
            raise ArgumentError(
                "only rank 0 takes requests, and this rank is a worker",
                where=f"rank {self.mesh.rank}",
                next="if llm.is_driver: llm.generate(...); every rank calls llm.close() at the end",
            )
        replica = 0
        if request.constraint is None and request.params.logprobs is None:
            assigned = [*self.replica_of.values()]
            loads = [assigned.count(index) for index in range(self.mesh.data.size)]
            replica = loads.index(min(loads))
        id, number = request.id, next(self.counter)
        self.replica_of[id], self.number_of[id], self.id_of[number] = replica, number, id
        # Only rank 0 looks for stop strings and has the grammar.
        params = replace(request.params, stop=(), **NO_GRAMMAR)
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

    def record_prefix_cache_reset(self) -> None:
        self.events.append(PrefixCacheReset())

    def is_local(self, request: Request) -> bool:
        """Whether the request runs on this rank's replica."""
        return self.replica_of[request.id] == self.replica

    def begin_step(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Make all workers run the next step."""
        self._send(StepMessage(self.events, *count_scheduled(chunks)))

    def _send(self, message: StepMessage) -> None:
        self.channel.send(encode_step(message))
        self.events = []

    def gather_remote_tokens(self, max_tokens: int) -> list[TokenSampled]:
        """The tokens that the other replicas sampled in this step."""
        if self.mesh.data.size == 1:
            return []
        pairs = self.gather_tokens({}, max_tokens)
        return [TokenSampled(self.id_of[number], token) for number, token in pairs if number >= 0]

    def stop(self) -> None:
        """Make all workers stop."""
        self._send(StepMessage(self.events, 0, 0, is_last=True))

    # ---- all ranks ---------------------------------------------------------------------------------

    def gather_tokens(self, sampled: Mapping[int, int], max_tokens: int) -> list[list[int]]:
        """Pairs of request number and token of all replicas; called by each replica's first rank.

        Every replica sends `max_tokens` pairs, padded with -1.
        """
        pairs = [*sampled.items()]
        pairs += [(-1, -1)] * (max_tokens - len(pairs))
        gathered: Tensor = all_gather(
            torch.tensor(pairs), self.mesh.data, "all-gather of sampled tokens"
        )
        rows: list[list[int]] = gathered.tolist()
        return rows


def count_scheduled(chunks: Sequence[ScheduledChunk]) -> tuple[int, int]:
    """The number of requests and of tokens in a step."""
    return len(chunks), sum(chunk.num_tokens for chunk in chunks)


def open_mesh(data: int | None, tensor: int, expert: int, timeout: float) -> Mesh | None:
    """The mesh of these axes; None for a single rank."""
    if (data or 1) == tensor == expert == 1:
        return None
    mesh = Mesh(data, tensor, expert, timeout=timeout)
    if mesh.device.type == "cuda":
        torch.cuda.set_device(mesh.device)
    return mesh


def agree_on_plan(
    plan: MemoryPlan | CapacityError, specs: Sequence[AttentionSpec], mesh: Mesh
) -> MemoryPlan:
    """The plan with the smallest KV cache of all ranks. If one rank has no room, all raise."""
    own = 0 if isinstance(plan, CapacityError) else plan.cache_tokens
    smallest = all_reduce_min(own, mesh.world, "minimum of KV-cache sizes")
    if isinstance(plan, CapacityError):
        raise plan
    if smallest == 0:
        raise CapacityError(
            "the model does not fit on every rank",
            next="see the error of the rank on which it does not fit",
        )
    limits = replace(plan.limits, cache_tokens=smallest)
    return add_kv_cache(replace(plan, limits=limits, kv_cache=0, group_blocks=()), specs)
