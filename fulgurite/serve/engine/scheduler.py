"""The scheduler: waiting and running requests in, `ScheduledChunk`s of the next step out.

One step computes at most `max_batched_tokens` tokens of at most `max_sequences` requests:

1. The next token of every running request in decode, so that decode never waits for a prefill.
2. The rest of running requests' prompts, in chunks (chunked prefill).
3. Waiting requests in arrival order. Nobody overtakes the first, so no request starves.

If blocks run out, the request that arrived last is preempted. Its blocks are freed, its tokens are
kept, and it returns to the front of the queue. Its keys are recomputed later, so the result is the
same. The oldest request is never preempted, and every request fits alone: the engine always makes
progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fulgurite.serve.engine.block_manager import BlockManager
from fulgurite.serve.engine.request import Request, RequestState


class ScheduledChunk(NamedTuple):
    """`num_tokens` tokens of a request, from position `start` on."""

    request: Request
    start: int
    num_tokens: int

    @property
    def needs_sampling(self) -> bool:
        """Whether the chunk ends with the request's last token, so that a new token is sampled."""
        return self.start + self.num_tokens == self.request.length


class Scheduler:
    """`recompute_after`: see `CausalLM`; a longer request has its keys recomputed once."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_sequences: int,
        max_batched_tokens: int,
        recompute_after: int | None = None,
    ) -> None:
        assert max_batched_tokens >= max_sequences, "every running request must get its next token"
        self.block_manager = block_manager
        self.max_sequences = max_sequences
        self.max_batched_tokens = max_batched_tokens
        self.recompute_after = recompute_after
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in arrival order
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

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
        chunks: dict[Request, ScheduledChunk] = {}
        num_preemptions = self.num_preemptions
        self._recompute_stale()
        remaining = {r: r.length - r.num_computed_tokens for r in self.running}
        decoding = [request for request, tokens in remaining.items() if tokens == 1]
        prefilling = [request for request, tokens in remaining.items() if tokens > 1]
        budget = self.max_batched_tokens
        for request in decoding + prefilling:
            start = request.num_computed_tokens
            count = min(request.length - start, budget)
            if not count or request.state is not RequestState.RUNNING:
                continue
            if not self.block_manager.reserve(request, start + count):
                budget += self._preempt_for(request, start + count, chunks)
                if request.state is not RequestState.RUNNING:
                    continue
            chunks[request] = ScheduledChunk(request, start, count)
            budget -= count
        while budget and self.num_preemptions == num_preemptions and (admitted := self._admit()):
            start = admitted.num_computed_tokens
            count = min(admitted.length - start, budget)
            reserved = self.block_manager.reserve(admitted, start + count)
            assert reserved, f"{admitted.id} was admitted without enough blocks"
            chunks[admitted] = ScheduledChunk(admitted, start, count)
            budget -= count
        return list(chunks.values())

    def mark_computed(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Record that the keys of these chunks are in the KV cache."""
        prefix_caching = self.block_manager.prefix_caching
        for request, _, num_tokens in chunks:
            request.num_computed_tokens += num_tokens
            if prefix_caching:
                self.block_manager.cache_full_blocks(request)

    def _preempt_for(
        self, request: Request, tokens: int, chunks: dict[Request, ScheduledChunk]
    ) -> int:
        """Preempt the latest requests until the tokens fit, or the request itself is preempted.

        Returns the tokens of this step that the preempted chunks give back.
        """
        returned = 0
        while not self.block_manager.reserve(request, tokens):
            victim = self.running.pop()
            self.block_manager.free(victim)
            victim.state = RequestState.WAITING
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.waiting.appendleft(victim)
            dropped = chunks.pop(victim, None)
            returned += dropped.num_tokens if dropped else 0
            if victim is request:
                break
        return returned

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
            request.cached_tokens = request.num_computed_tokens
        request.uses_long_rope = self._needs_long_rope(request)
        request.state = RequestState.RUNNING
        self.running.append(self.waiting.popleft())
        return request

    def _needs_long_rope(self, request: Request) -> bool:
        return self.recompute_after is not None and request.length > self.recompute_after

    def _recompute_stale(self) -> None:
        """LongRoPE: restart requests that grew past the limit, since all their keys change."""
        if self.recompute_after is None:
            return
        for request in self.running:
            if self._needs_long_rope(request) and not request.uses_long_rope:
                self.block_manager.free(request)
                self.block_manager.allocate(request)
                request.uses_long_rope = True
