"""One engine over many ranks: rank 0 takes requests and writes text, everybody computes.

    rank 0     add, cancel ─▶ events ─┐ one message a step                  ┌▶ text, results
                                      ▼                                     │
    all ranks                       the same scheduler ─▶ pieces ─▶ model ─▶ tokens of rank 0

A scheduler depends on nothing but what happened to its requests, so it is not told what to run: each
rank has one, is told what happened (`Event`s: a request came, got a token, ended), and finds the same
pieces by itself. Rank 0 sends what it found along, and a rank that found something else says so.

With a data axis each of its ranks has requests of its own, its home's: rank 0 gives a new request to the
home with the fewest, the first rank of each home chooses its tokens, and rank 0 gathers them. A home
without requests runs its steps with no tokens, since its experts may be wanted.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.models.cache import AttentionSpec
from fulgurite.parallel.channel import Channel
from fulgurite.parallel.collectives import gather, least_over
from fulgurite.parallel.mesh import Mesh
from fulgurite.plan.memory import MemoryPlan, with_cache
from fulgurite.serve.engine.request import Request, SamplingParams
from fulgurite.serve.engine.scheduler import Piece

UNFIXED = "its layers talk to other ranks: every step is run as it comes"


class Added(NamedTuple):
    """A request came."""

    id: str
    number: int
    home: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int


class Chosen(NamedTuple):
    """A request got a token."""

    id: str
    token: int


class Ended(NamedTuple):
    """A request is done; `cancelled`: before its end, wherever it was."""

    id: str
    cancelled: bool = False


class Forgot(NamedTuple):
    """Cached keys are not to be found any more."""


Event = Added | Chosen | Ended | Forgot


@dataclass(frozen=True)
class Message:
    """What happened since the last step, and what rank 0 runs in this one; `last`: nothing any more."""

    events: list[Event]
    pieces: int
    tokens: int
    last: bool = False


class Link:
    """An engine's place among the ranks. On rank 0 what it decides goes out through it."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.channel = Channel(mesh)
        self.home = mesh.data.index
        self.events: list[Event] = []
        self.homes: dict[str, int] = {}  # of the requests there are
        self.numbers: dict[str, int] = {}
        self.ids: dict[int, str] = {}  # by number
        self.count = itertools.count()

    # ---- rank 0 ------------------------------------------------------------------------------------

    def added(self, request: Request, prompt_ids: list[int]) -> None:
        """Find a home for a request. Grammars and log-probabilities are with rank 0 only."""
        if self.mesh.rank != 0:
            raise ArgumentError(
                "requests go to rank 0, and this rank follows it",
                where=f"rank {self.mesh.rank}",
                next="if llm.leads: llm.generate(...); every rank calls llm.close() at the end",
            )
        home = 0
        if request.constraint is None and request.params.logprobs is None:
            loads = [[*self.homes.values()].count(one) for one in range(self.mesh.data.size)]
            home = loads.index(min(loads))
        id, number = request.id, next(self.count)
        self.homes[id], self.numbers[id], self.ids[number] = home, number, id
        params = replace(request.params, stop=())  # stop strings are looked for by rank 0
        self.events.append(Added(id, number, home, prompt_ids, params, request.seed))

    def chose(self, request: Request, token: int) -> None:
        self.events.append(Chosen(request.id, token))

    def ended(self, request: Request, cancelled: bool = False) -> None:
        self.events.append(Ended(request.id, cancelled))
        del self.homes[request.id], self.ids[self.numbers.pop(request.id)]

    def forgot(self) -> None:
        self.events.append(Forgot())

    def here(self, request: Request) -> bool:
        """Whether a request's keys are on rank 0's home."""
        return self.homes[request.id] == self.home

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Let all ranks take the next step."""
        self._send(Message(self.events, *digest(pieces)))

    def _send(self, message: Message) -> None:
        self.channel.send(pickle.dumps(message))
        self.events = []

    def from_others(self, most: int) -> list[Chosen]:
        """What the other homes have chosen in this step."""
        if self.mesh.data.size == 1:
            return []
        found = self.gather({}, most)
        return [Chosen(self.ids[number], token) for number, token in found if number >= 0]

    def stop(self) -> None:
        """Send the others home."""
        self._send(Message(self.events, 0, 0, last=True))

    # ---- all ranks ---------------------------------------------------------------------------------

    def gather(self, chosen: Mapping[int, int], most: int) -> list[list[int]]:
        """Numbers and tokens of all homes, among the first ranks of each."""
        pairs = [*chosen.items()]
        pairs += [(-1, -1)] * (most - len(pairs))
        found: Tensor = gather(torch.tensor(pairs), self.mesh.data, "gather of tokens chosen")
        rows: list[list[int]] = found.tolist()
        return rows


def digest(pieces: Sequence[Piece]) -> tuple[int, int]:
    """How many requests and tokens a step has."""
    return len(pieces), sum(piece.count for piece in pieces)


def open_mesh(data: int | None, tensor: int, expert: int, timeout: float) -> Mesh | None:
    """The mesh that was asked for; None for a single rank, whatever else was started beside it."""
    if (data or 1) == tensor == expert == 1:
        return None
    mesh = Mesh(data, tensor, expert, timeout=timeout)
    if mesh.device.type == "cuda":
        torch.cuda.set_device(mesh.device)
    return mesh


def agree(
    plan: MemoryPlan | CapacityError, specs: Sequence[AttentionSpec], mesh: Mesh
) -> MemoryPlan:
    """The plan that every rank has room for. A rank that has none for any says so to all."""
    own = 0 if isinstance(plan, CapacityError) else plan.cache_tokens
    least = least_over(own, mesh.world, "least room for a cache")
    if isinstance(plan, CapacityError):
        raise plan
    if least == 0:
        raise CapacityError(
            "the model does not fit on every rank", next="the error of the rank it doesn't fit on"
        )
    limits = replace(plan.limits, cache_tokens=least)
    return with_cache(replace(plan, limits=limits, cache=0, blocks=()), specs)
