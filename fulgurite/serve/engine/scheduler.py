"""Who runs in the next step: waiting and running requests in, `Piece`s of tokens out.

One step takes at most `step_tokens` tokens of at most `max_sequences` requests, in this order:

1. each running request's next token, so nobody who is writing waits for somebody's prompt;
2. what is left of running requests' prompts, a piece at a time (chunked prefill);
3. waiting requests, first come first served; nobody overtakes the first in line, so nobody starves.

Where blocks run out, the request that came last gives up its keys and goes back to the front of the
line. Its tokens are kept and its keys computed again, so it writes on as if nothing had happened.
The request that came first is never stopped, and any request fits alone: the engine always moves on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fulgurite.serve.engine.block_tables import BlockTables
from fulgurite.serve.engine.request import Request, State


class Piece(NamedTuple):
    """`count` tokens of a request, from `start` on."""

    request: Request
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which a piece has no use for

    @property
    def last(self) -> bool:
        """Whether a new token comes of it: it ends with the last token there is."""
        return self.start + self.count == self.request.length


class Scheduler:
    """`stale_after`: see `Decoder`; a request that outgrows it has its keys computed anew."""

    def __init__(
        self,
        tables: BlockTables,
        max_sequences: int,
        step_tokens: int,
        stale_after: int | None = None,
    ) -> None:
        assert step_tokens >= max_sequences, "every running request has to get its next token"
        self.tables = tables
        self.max_sequences = max_sequences
        self.step_tokens = step_tokens
        self.stale_after = stale_after
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order they came
        self.preemptions = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is, and give its blocks back."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self.tables.close(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)

    def end(self, request: Request) -> None:
        """A running request is done: its blocks are free."""
        self.running.remove(request)
        self.tables.close(request)

    def schedule(self) -> list[Piece]:
        """The pieces of the next step; none when there is nothing to do."""
        pieces: dict[Request, Piece] = {}
        preemptions = self.preemptions
        self._outgrow()
        writing = [request for request in self.running if request.length - request.computed == 1]
        reading = [request for request in self.running if request.length - request.computed > 1]
        budget = self.step_tokens
        reserve, running = self.tables.reserve, State.RUNNING
        for request in writing + reading:
            start = request.computed
            count = min(request.length - start, budget)
            if not count or request.state is not running:
                continue
            if not reserve(request, start + count):
                budget += self._make_room(request, start + count, pieces)
                if request.state is not running:
                    continue
            pieces[request] = Piece(request, start, count)
            budget -= count
        while budget and self.preemptions == preemptions and (admitted := self._admit()):
            count = min(admitted.length - admitted.computed, budget)
            room = self.tables.reserve(admitted, admitted.computed + count)
            assert room, f"{admitted.id} was admitted without room"
            pieces[admitted] = Piece(admitted, admitted.computed, count)
            budget -= count
        return list(pieces.values())

    def done(self, pieces: Sequence[Piece]) -> None:
        """The keys of these pieces are in the cache."""
        publish = self.tables.publish if self.tables.reuse else None
        for request, _, count in pieces:
            request.computed += count
            if publish is not None:
                publish(request)

    def _make_room(self, request: Request, tokens: int, pieces: dict[Request, Piece]) -> int:
        """Preempt from the end of the line until the tokens fit, or the request itself went.

        Returns the tokens of this step that became free with the preempted pieces.
        """
        given_back = 0
        while not self.tables.reserve(request, tokens):
            victim = self.running.pop()
            self.tables.close(victim)
            victim.state = State.WAITING
            victim.preemptions += 1
            self.preemptions += 1
            self.waiting.appendleft(victim)
            dropped = pieces.pop(victim, None)
            given_back += dropped.count if dropped else 0
            if victim is request:
                break
        return given_back

    def _admit(self) -> Request | None:
        """The first in line, if there is a row and blocks for all of its tokens."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return None
        request = self.waiting[0]
        self.tables.open(request)
        if not self.tables.admits(request):
            self.tables.close(request)
            return None
        if not request.preemptions:
            request.cached_tokens = request.computed
        request.outgrown = self.stale_after is not None and request.length > self.stale_after
        request.state = State.RUNNING
        self.running.append(self.waiting.popleft())
        return request

    def _outgrow(self) -> None:
        """LongRoPE: keys of a request that became too long are turned wrongly; start them anew."""
        if self.stale_after is None:
            return
        for request in self.running:
            if request.length > self.stale_after and not request.outgrown:
                self.tables.close(request)
                self.tables.open(request)
                request.outgrown = True
