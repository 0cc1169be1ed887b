"""The scheduler: waiting and running requests in, `ScheduledChunk`s of the next step out.

One step computes at most `max_batched_tokens` tokens of at most `max_sequences` requests:

1. The next token of every running request in decode, so that decode never waits for a prefill.
2. The rest of running requests' prompts, in chunks (chunked prefill). With `max_mixed_tokens` chunks are
   smaller while requests decode, so that their tokens come more evenly.
3. Waiting requests by priority, then in arrival order. Nobody overtakes the first of them.

If blocks run out, the last running request in this order is preempted. Its blocks are freed, its
tokens are kept, and it returns to its place in the queue. Its keys are recomputed later, so the result
is the same. The first request is never preempted, and every request fits alone: the engine always
makes progress.

A step may be scheduled while the one before still runs. Its sampled tokens then count, although they
are not known (`Request.num_pending`). Preemption waits until all tokens are known.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from fulgurite.serve.engine.block_manager import BlockManager
from fulgurite.serve.engine.request import Request, RequestState

SCHEDULE_KEY = attrgetter("schedule_key")
MIN_MIXED_PREFILL = 16  # tokens of prompts in a step that decodes: prompts must end some time


class ScheduledChunk(NamedTuple):
    """`num_tokens` tokens of a request, from position `start` on.

    needs_sampling    the chunk ends with the request's last token, so that a new token is sampled
    ends_pending      its last token is still being sampled: the host does not know it yet
    """

    request: Request
    start: int
    num_tokens: int
    needs_sampling: bool
    ends_pending: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def make_chunk(request: Request, num_tokens: int) -> ScheduledChunk:
    """The next `num_tokens` tokens of a request."""
    start = request.num_computed_tokens
    end = start + num_tokens
    return ScheduledChunk(
        request, start, num_tokens, end == request.scheduled_length, end > request.length
    )


def sampled_requests(chunks: Sequence[ScheduledChunk]) -> list[Request]:
    """The requests that get a token in this step."""
    return [chunk.request for chunk in chunks if chunk.needs_sampling]


class Scheduler:
    """Schedules the requests of a `BlockManager`.

    recompute_after     see `CausalLM`; a longer request has its keys recomputed once
    has_states          the model has layers with states. A step that was interrupted leaves states of
                        unknown content, so its requests run again from their first token
    prefill_alignment   a prompt is cut at multiples of this, where a step can hold that many tokens
    max_mixed_tokens    see `EngineLimits`; a prompt gets `MIN_MIXED_PREFILL` tokens of a step at least
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_sequences: int,
        max_batched_tokens: int,
        recompute_after: int | None = None,
        *,
        has_states: bool = False,
        prefill_alignment: int = 1,
        max_mixed_tokens: int | None = None,
    ) -> None:
        assert max_batched_tokens >= max_sequences, "every running request must get its next token"
        self.block_manager = block_manager
        self.max_sequences = max_sequences
        self.max_batched_tokens = max_batched_tokens
        self.recompute_after = recompute_after
        self.has_states = has_states
        self.prefill_alignment = prefill_alignment
        self.max_mixed_tokens = max_mixed_tokens
        self.waiting: list[Request] = []  # both in the order of `schedule_key`
        self.running: list[Request] = []
        self.arrivals = itertools.count()
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        request.arrival_number = next(self.arrivals)
        insort(self.waiting, request, key=SCHEDULE_KEY)

    def cancel(self, request: Request) -> None:
        """Remove a waiting or running request and free its blocks."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self.block_manager.free(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)

    def finish(self, request: Request) -> None:
        """Remove a running request that is done and free its blocks."""
        self.running.remove(request)
        self.block_manager.free(request)

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step; empty if there is nothing to do."""
        chunks = self._schedule(is_ahead=False)
        assert chunks is not None, "only a step that is scheduled ahead waits"
        return chunks

    def schedule_ahead(self) -> list[ScheduledChunk] | None:
        """`schedule`, while a step still runs. None: the tokens that it samples must be known first."""
        return self._schedule(is_ahead=True)

    def _schedule(self, is_ahead: bool) -> list[ScheduledChunk] | None:
        chunks: dict[Request, ScheduledChunk] = {}
        num_preemptions = self.num_preemptions
        if is_ahead and any(map(self._is_stale, self.running)):
            return None
        self._recompute_stale()
        remaining = {
            r: r.scheduled_length - r.num_computed_tokens
            for r in self.running
            if r.scheduled_length < r.max_length  # the others end with their pending token
        }
        decoding = [request for request, tokens in remaining.items() if tokens == 1]
        prefilling = [request for request, tokens in remaining.items() if tokens > 1]
        budget = self._find_budget(len(decoding))
        for request in decoding + prefilling:
            start = request.num_computed_tokens
            count = self._chunk_size(start, remaining[request], budget)
            if not count or request.state is not RequestState.RUNNING:
                continue
            if not self.block_manager.reserve(request, start + count):
                if is_ahead:
                    return None
                budget += self._preempt_for(request, start + count, chunks)
                if request.state is not RequestState.RUNNING:
                    continue
            chunks[request] = make_chunk(request, count)
            budget -= count
        while budget and self.num_preemptions == num_preemptions and (admitted := self._admit()):
            start = admitted.num_computed_tokens
            count = self._chunk_size(start, admitted.length - start, budget)
            if not count:  # it begins with the next step
                break
            reserved = self.block_manager.reserve(admitted, admitted.num_computed_tokens + count)
            assert reserved, f"{admitted.id} was admitted without enough blocks"
            chunks[admitted] = make_chunk(admitted, count)
            budget -= count
        return list(chunks.values())

    def _find_budget(self, num_decoding: int) -> int:
        """The most tokens of the next step."""
        if not num_decoding or self.max_mixed_tokens is None:
            return self.max_batched_tokens
        least = num_decoding + max(MIN_MIXED_PREFILL, self.prefill_alignment)
        return min(self.max_batched_tokens, max(self.max_mixed_tokens, least))

    def _chunk_size(self, start: int, remaining: int, budget: int) -> int:
        """The next tokens of a request in this step; 0 if an aligned cut does not fit."""
        if remaining <= budget or self.prefill_alignment > self.max_batched_tokens:
            return min(remaining, budget)
        end = (start + budget) // self.prefill_alignment * self.prefill_alignment
        return max(end - start, 0)

    def mark_computed(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Record that a step of these chunks was launched; later steps find its keys."""
        for chunk in chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens
            chunk.request.num_state_tokens = chunk.request.num_computed_tokens
            chunk.request.num_pending += chunk.needs_sampling

    def cache_blocks(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Enter the blocks of a step that has run into the prefix cache."""
        if not self.block_manager.prefix_caching:
            return
        for chunk in chunks:
            if chunk.request.state is RequestState.RUNNING:
                self.block_manager.cache_full_blocks(chunk.request, chunk.end)

    def _preempt_for(
        self, request: Request, tokens: int, chunks: dict[Request, ScheduledChunk]
    ) -> int:
        """Preempt the latest requests until the tokens fit, or the request itself is preempted.

        Returns the tokens of this step that the preempted chunks give back.
        """
        returned = 0
        while not self.block_manager.reserve(request, tokens):
            victim = self.running[-1]
            self.preempt(victim)
            dropped = chunks.pop(victim, None)
            returned += dropped.num_tokens if dropped else 0
            if victim is request:
                break
        return returned

    def preempt(self, request: Request) -> None:
        """Put a running request back to its place in the queue and free its blocks."""
        assert not request.num_pending, f"{request.id} is preempted, but a step samples for it"
        self.running.remove(request)
        self.block_manager.free(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=SCHEDULE_KEY)

    def _admit(self) -> Request | None:
        """Start the first waiting request if a row and blocks for all of its tokens are free."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return None
        request = self.waiting[0]
        self.block_manager.allocate(request)
        if not self.block_manager.can_finish_prefill(request):
            self.block_manager.free(request)
            return None
        if not request.num_preemptions:
            request.cached_tokens = min(request.num_computed_tokens, request.prompt_length)
        request.uses_long_rope = self._needs_long_rope(request)
        request.state = RequestState.RUNNING
        request.first_step_time = request.first_step_time or time.perf_counter()
        insort(self.running, self.waiting.pop(0), key=SCHEDULE_KEY)
        return request

    def _needs_long_rope(self, request: Request) -> bool:
        return self.recompute_after is not None and request.scheduled_length > self.recompute_after

    def _is_stale(self, request: Request) -> bool:
        """Whether what was computed for a request can't be used.

        LongRoPE: the request grew past the limit since its keys were computed. States: a step was
        interrupted, which may have added its tokens.
        """
        if self.has_states and request.num_state_tokens != request.num_computed_tokens:
            return True
        return self._needs_long_rope(request) and not request.uses_long_rope

    def _recompute_stale(self) -> None:
        """Restart requests whose keys or states can't be used."""
        if self.recompute_after is None and not self.has_states:
            return
        for request in self.running:
            if self._is_stale(request):
                self.block_manager.free(request)
                self.block_manager.allocate(request)
                request.uses_long_rope = self._needs_long_rope(request)
