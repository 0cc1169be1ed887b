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
to the replica that has its prefix, unless that one is busy (replica_choice.py). The first rank of each
replica samples its tokens, and rank 0 gathers them. A replica without requests runs steps without
tokens, since its experts may be needed.

Host collectives of a step:

    one replica      none, unless the step is larger than any before
    several          one agreement (`StepProposal`): the memory limit, and whether all replicas decode;
                     all ranks then replay a captured step of one size, those without requests too.
                     And one gather of the tokens, with log-probabilities if somebody asked for them.
                     Those of a prompt, if they are asked for, are posted in the store before

Rank 0 must finish a step that it has begun, since the other ranks do. Ctrl-C waits for its end. If
anything else ends it early, the ranks are out of step, and the next step raises `RankError`.

Grammars are compiled by rank 0, which knows where a reply ends, and by the first rank of the request's
replica, which needs the masks. A `constraint=` is an object of rank 0's process: it stays there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, RankError
from fulgurite.parallel.collectives import all_gather, all_reduce_mins
from fulgurite.parallel.health import RankTime
from fulgurite.parallel.mesh import Mesh
from fulgurite.parallel.processes.channel import BroadcastChannel
from fulgurite.parallel.symmetric.collectives import use_symmetric_collectives
from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.engine.interrupts import defer_interrupts
from fulgurite.serve.engine.logprobs import pack_logprobs, unpack_logprobs
from fulgurite.serve.engine.replica_choice import BLOCK_TOKENS, ReplicaChooser, hash_prefixes
from fulgurite.serve.engine.replica_counts import ReplicaCounts
from fulgurite.serve.engine.request import Request, SamplingParams
from fulgurite.serve.engine.sampler import SamplingVariant
from fulgurite.serve.engine.scheduler import ScheduledChunk
from fulgurite.serve.engine.step_messages import (
    NO_LOGPROBS,
    Event,
    GrammarStarted,
    LoadSaved,
    PrefixCacheReset,
    RemoteToken,
    RequestAdded,
    RequestEnded,
    StepMessage,
    StepsDropped,
    TokenSampled,
    count_row_words,
    decode_row,
    encode_step,
)

NO_GRAMMAR: dict[str, Any] = {
    "json_schema": None,
    "json_object": False,
    "regex": None,
    "grammar": None,
    "choices": None,
    "structural_tag": None,
    "bad_words": (),
}


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


class Coordinator:
    """Keeps the engines of all ranks in step. Rank 0 broadcasts its events through it."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.channel = BroadcastChannel(mesh)
        self.replica = mesh.data.index
        self.events: list[Event] = []
        self.replica_of: dict[str, int] = {}  # by request id
        self.loads = dict.fromkeys(range(mesh.data.size), 0)  # unfinished requests by replica
        self.chooser: ReplicaChooser | None = None  # these by `use_prefix_caches`
        self.max_requests = 0
        self.num_reply_tokens = 0
        self.number_of: dict[str, int] = {}
        self.id_of: dict[int, str] = {}  # by number
        self.num_logprobs: dict[str, int] = {}  # of requests on other replicas that ask for them
        # Requests on other replicas: with their first token come the log-probabilities of their prompts.
        self.awaited_prompts: set[str] = set()
        self.counter = itertools.count()
        self.replica_counts: dict[int, ReplicaCounts] = {}  # of the other replicas, on rank 0
        self.step_logprobs = NO_LOGPROBS  # of the step that was begun last
        self.last_message = -1  # number of the message that was sent last
        self.samples = mesh.data.size > 1 and 0 in mesh.data.ranks  # rank 0 gathers its tokens
        self.is_in_step = False  # rank 0 has begun something that the other ranks finish, too
        self.left_by = ""  # the error by which rank 0 has left it: the ranks are out of step

    # ---- rank 0 ------------------------------------------------------------------------------------

    def add_request(self, request: Request, prompt_ids: list[int]) -> None:
        """Assign a request to a replica. One with a `constraint=` stays."""
        if self.mesh.rank != 0:
            raise ArgumentError(
                "only rank 0 takes requests, and this rank is a worker",
                where=f"rank {self.mesh.rank}",
                next="if llm.is_driver: llm.generate(...); every rank calls llm.close() at the end",
            )
        params = request.params
        has_object = request.constraint is not None and params.grammar_spec is None
        replica = 0 if has_object else self._choose_replica(request, prompt_ids)
        self.loads[replica] += 1
        id, number = request.id, next(self.counter)
        self.replica_of[id], self.number_of[id], self.id_of[number] = replica, number, id
        # Only rank 0 looks for stop strings; its replica needs no other grammar than its own.
        params = replace(params, stop=())
        if replica == 0:
            params = replace(params, **NO_GRAMMAR)
        else:
            if params.logprobs is not None:
                self.num_logprobs[id] = params.logprobs
            if has_posted_prompt(params, prompt_ids):
                self.awaited_prompts.add(id)
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

    def use_prefix_caches(self, cache_tokens: int, max_requests: int) -> None:
        """Assign requests to replicas that have their prefixes in a cache of so many tokens, as long as
        one has fewer requests than it can run at once."""
        self.chooser, self.max_requests = ReplicaChooser(), max_requests
        for replica in self.loads:
            self.chooser.known[replica].limit = max(cache_tokens // BLOCK_TOKENS, 1)

    def _choose_replica(self, request: Request, prompt_ids: list[int]) -> int:
        """Where a request costs least, of the replicas that can run it now if there are any."""
        loads = self.loads
        if self.chooser is None or len(loads) == 1:
            return min(loads, key=lambda replica: loads[replica])
        free = {r: load for r, load in loads.items() if load < self.max_requests}
        keys = hash_prefixes(prompt_ids, request.options.cache_salt)
        replica = self.chooser.choose(free or loads, keys)
        reply_tokens = self.num_reply_tokens / (self.chooser.num_requests + 1)
        self.chooser.record(replica, keys, round(reply_tokens / BLOCK_TOKENS))
        return replica

    def record_token(self, request: Request, token: int) -> None:
        self.events.append(TokenSampled(request.id, token))
        self.num_reply_tokens += 1

    def record_end(self, request: Request, cancelled: bool = False) -> None:
        self.events.append(RequestEnded(request.id, cancelled))
        self.loads[self.replica_of.pop(request.id)] -= 1
        del self.id_of[self.number_of.pop(request.id)]
        self.num_logprobs.pop(request.id, None)
        self.awaited_prompts.discard(request.id)

    def record_grammar(self, spec: GrammarSpec) -> None:
        if self.mesh.data.size > 1:
            self.events.append(GrammarStarted(spec.kind, spec.source))

    def record_prefix_cache_reset(self) -> None:
        self.events.append(PrefixCacheReset())
        if self.chooser is not None:
            self.chooser.clear()

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

    def finish_step(self) -> None:
        """What the other ranks wait for in the step that was begun is done."""
        self.is_in_step = False

    @contextmanager
    def finish_together(self) -> Iterator[None]:
        """Around what rank 0 does together with the other ranks: notes if it ends early."""
        with defer_interrupts():
            try:
                yield
            except BaseException as error:
                if self.is_in_step:
                    self.left_by = describe_briefly(error)
                raise
            self.is_in_step = False

    def check_in_step(self) -> None:
        """RankError if rank 0 has left a step before its end."""
        if self.left_by:
            raise RankError(
                f"rank 0 has left a step that the other ranks are still in: {self.left_by}",
                next="all ranks must start again",
                ranks=(self.mesh.rank,),
            )

    def _send(self, message: StepMessage) -> None:
        self.is_in_step = True
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
        gathered = self.gather_tokens(ReplicaCounts(), [], max_tokens, self.step_logprobs)
        self.replica_counts = {replica: counts for replica, (counts, _) in gathered.items()}
        return [decode_row(self.id_of, row) for _, rows in gathered.values() for row in rows]

    def take_prompt_logprobs(self, request: Request) -> None:
        """Add what the replica of a request has posted with its first token."""
        if request.id in self.awaited_prompts:
            self.awaited_prompts.discard(request.id)
            posted = self.channel.take(f"prompt-{self.number_of[request.id]}")
            tokens = request.tokens[1 : request.prompt_length].tolist()
            words_LW = np.frombuffer(posted, np.int64).reshape(len(tokens), -1)
            request.add_prompt_logprobs(1, unpack_logprobs(tokens, words_LW))

    def post_prompt_logprobs(self, number: int, request: Request) -> None:
        """On the first rank of another replica: leave those of a prompt for rank 0."""
        logprobs = [one for one in request.prompt_logprobs if one is not None]
        self.channel.post(f"prompt-{number}", pack_logprobs(logprobs).tobytes())

    def read_rank_times(self) -> tuple[RankTime, ...]:
        """How each rank spends its steps; empty before the first ones."""
        health = self.mesh.health
        return () if health is None else health.read_times()

    def stop(self) -> None:
        """Make all workers stop."""
        self._send(StepMessage(self.events, 0, 0, is_last=True))

    # ---- all ranks ---------------------------------------------------------------------------------

    def gather_tokens(
        self,
        counts: ReplicaCounts,
        sampled: Sequence[Sequence[int]],
        max_tokens: int,
        num_logprobs: int,
    ) -> dict[int, tuple[ReplicaCounts, list[list[int]]]]:
        """Counts and rows (`encode_row`) of the other replicas; called by the first rank of each.

        Every replica sends its counts and `max_tokens` rows; those that are not used start with -1.
        """
        width = count_row_words(num_logprobs)
        values = torch.full((len(counts) + max_tokens * width,), -1)
        values[: len(counts)] = torch.tensor(counts)
        used = [word for row in sampled for word in row]
        values[len(counts) : len(counts) + len(used)] = torch.tensor(used, dtype=torch.int64)
        axis = self.mesh.data
        gathered: Tensor = all_gather(values, axis, "all-gather of sampled tokens")
        found = {}
        for replica, words in enumerate(gathered.view(axis.size, -1).tolist()):
            rest = words[len(counts) :]
            rows = [rest[start : start + width] for start in range(0, len(rest), width)]
            if replica != self.replica:
                used_rows = [row for row in rows if row[0] >= 0]
                found[replica] = ReplicaCounts(*words[: len(counts)]), used_rows
        return found

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


def describe_briefly(error: BaseException) -> str:
    """Its type, and the first line of its text if it has any."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def has_posted_prompt(params: SamplingParams, prompt_ids: Sequence[int]) -> bool:
    """Whether the replica of a request posts log-probabilities of its prompt; the first token has none."""
    return params.prompt_logprobs is not None and len(prompt_ids) > 1


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
