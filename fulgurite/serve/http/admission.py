"""Admission: whether a request may enter, and when it is its turn. Nothing costly runs before it.

    enter    counts and limits only: 429 with Retry-After by queue, memory, or predicted time to first
             token; 503 while the server drains or no engine is ready
    acquire  waits for a place in the engines, fair among API keys

Fairness is start-time fair queueing: each key has a virtual time that grows with the tokens of its
requests, and the key with the smallest goes next. Within a key the order is priority, then arrival.
Engines get few more requests than they can run at once, so that the order here is the order that counts.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fulgurite.serve.http.errors import ApiError, overloaded, too_late

T = TypeVar("T")
LOOKAHEAD = 2  # requests beyond those that run, so that an engine never waits for the server
SMOOTHING = 0.2  # weight of the newest observation in averages


@dataclass
class Ticket:
    """A request's place: bytes and slots that it holds until `close`."""

    admission: Admission
    key: str
    num_bytes: int
    arrival: float
    deadline: float | None  # by time.monotonic()
    num_slots: int = 0  # places in the engines
    submitted: float = 0.0
    is_open: bool = True

    def remaining_seconds(self) -> float | None:
        """Until the deadline; None: there is none."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    async def wait(self, work: Awaitable[T]) -> T:
        """The result of `work`; ApiError 504, after cancelling it, if the deadline passes first."""
        try:
            return await asyncio.wait_for(work, self.remaining_seconds())
        except TimeoutError:
            waited = time.monotonic() - self.arrival
            raise too_late(f"the deadline passed after {waited:.1f} s") from None

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.admission.leave(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(order=True)
class Waiter:
    priority: int
    number: int
    ticket: Ticket = field(compare=False)
    slots: int = field(compare=False)
    cost: float = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


@dataclass
class KeyQueue:
    """Waiting requests of one API key."""

    virtual_time: float = 0.0
    waiters: list[Waiter] = field(default_factory=list)


class Admission:
    """Counts requests, and lets them into the engines one by one.

    `capacity()` is the number of requests that the ready engines run at once.
    """

    def __init__(self, max_waiting: int, max_bytes: int, capacity: Callable[[], int]) -> None:
        self.max_waiting, self.max_bytes, self.capacity = max_waiting, max_bytes, capacity
        self.is_draining = False
        self.entered = 0  # requests between `enter` and `close`
        self.running = 0  # slots in the engines
        self.pending_bytes = 0
        self.queues: dict[str, KeyQueue] = {}
        self.virtual_time = 0.0
        self.numbers = itertools.count()
        self.seconds_per_turn = 0.0  # between turns while requests wait, averaged
        self.first_token_seconds = 0.0  # of requests in the engines, averaged
        self.last_turn = 0.0

    # ---- enter -------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return sum(len(queue.waiters) for queue in self.queues.values())

    def predict_first_token(self) -> float:
        """Seconds until a request that enters now gets its first token."""
        excess = self.running + self.waiting + 1 - self.capacity()
        turns = max(excess, 0) if self.running + self.waiting >= self.capacity() else 0
        return turns * self.seconds_per_turn + self.first_token_seconds

    def enter(self, key: str, num_bytes: int, deadline_seconds: float | None) -> Ticket:
        """A ticket; ApiError if the request can't be served in time."""
        now = time.monotonic()
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        capacity = self.capacity()
        if capacity == 0:
            headers = {"retry-after": "5"}
            raise ApiError(503, "no engine is ready", code="engine_not_ready", headers=headers)
        predicted = self.predict_first_token()
        if self.entered >= capacity + self.max_waiting:
            message = f"{self.waiting} requests wait already (limit {self.max_waiting})"
            raise overloaded(message, predicted, "queue_full")
        if self.pending_bytes + num_bytes > self.max_bytes:
            message = f"waiting requests hold {self.pending_bytes} bytes (limit {self.max_bytes})"
            raise overloaded(message, predicted, "memory_full")
        deadline = None if deadline_seconds is None else now + deadline_seconds
        if deadline_seconds is not None and predicted > deadline_seconds:
            message = (
                f"the first token is expected after {predicted:.1f} s, later than the deadline of "
                f"{deadline_seconds:.1f} s"
            )
            raise overloaded(message, predicted - deadline_seconds, "deadline_unreachable")
        self.entered += 1
        self.pending_bytes += num_bytes
        return Ticket(self, key, num_bytes, now, deadline)

    def leave(self, ticket: Ticket) -> None:
        self.entered -= 1
        self.pending_bytes -= ticket.num_bytes
        self.release(ticket)

    # ---- turns -------------------------------------------------------------------------------------

    async def acquire(self, ticket: Ticket, slots: int, cost: float, priority: int) -> None:
        """Wait for a turn; `cost` in tokens. ApiError if the deadline passes first."""
        queue = self.queues.setdefault(ticket.key, KeyQueue())
        if not queue.waiters:
            queue.virtual_time = max(queue.virtual_time, self.virtual_time)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(priority, next(self.numbers), ticket, slots, cost, turn)
        heapq.heappush(queue.waiters, waiter)
        self.grant_turns()
        try:
            await asyncio.wait_for(asyncio.shield(turn), ticket.remaining_seconds())
        except TimeoutError:
            waited = time.monotonic() - ticket.arrival
            raise too_late(f"the deadline passed after {waited:.1f} s in the queue") from None
        finally:
            if not turn.done():
                turn.cancel()
                queue.waiters.remove(waiter)
                heapq.heapify(queue.waiters)
                self.forget_if_empty(ticket.key)

    def grant_turns(self) -> None:
        """Give turns while there are places in the engines."""
        capacity = self.capacity()
        limit = capacity + LOOKAHEAD if capacity else 0
        while self.running < limit:
            ready = [
                (queue.virtual_time, key) for key, queue in self.queues.items() if queue.waiters
            ]
            if not ready:
                return
            virtual_time, key = min(ready)
            queue = self.queues[key]
            waiter = heapq.heappop(queue.waiters)
            self.virtual_time = max(self.virtual_time, virtual_time)
            queue.virtual_time = virtual_time + waiter.cost
            self.start(waiter)
            self.forget_if_empty(key)

    def start(self, waiter: Waiter) -> None:
        now = time.monotonic()
        if self.waiting and self.last_turn:
            self.seconds_per_turn = average(self.seconds_per_turn, now - self.last_turn)
        self.last_turn = now
        waiter.ticket.num_slots += waiter.slots
        waiter.ticket.submitted = now
        self.running += waiter.slots
        waiter.turn.set_result(None)

    def release(self, ticket: Ticket, slots: int | None = None) -> None:
        """Give back places in the engines; None: all of the ticket's."""
        count = ticket.num_slots if slots is None else min(slots, ticket.num_slots)
        ticket.num_slots -= count
        self.running -= count
        self.grant_turns()

    def forget_if_empty(self, key: str) -> None:
        """Drop an empty queue, unless its key is ahead of the others and has to wait for them."""
        queue = self.queues.get(key)
        if queue is None or queue.waiters:
            return
        if not self.waiting:
            self.queues.clear()  # nobody waits: all keys start equal again
        elif queue.virtual_time <= self.virtual_time:
            del self.queues[key]

    def observe_first_token(self, seconds: float) -> None:
        """A request in an engine got its first token after so many seconds there."""
        self.first_token_seconds = average(self.first_token_seconds, seconds)

    def audit(self) -> dict[str, int]:
        """What is left when nothing runs; all 0."""
        return {
            "tickets": self.entered,
            "slots": self.running,
            "queued": self.waiting,
            "bytes": self.pending_bytes,
        }


def average(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - SMOOTHING) * old + SMOOTHING * new
