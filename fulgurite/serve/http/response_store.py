"""Responses that clients can read again, continue or cancel: kept in memory, the oldest leave first.

A response belongs to the API key that made it. For others it does not exist.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 256 << 20  # of the conversations of all stored responses


class EventLog:
    """The events of a response in the background, by number. Several clients may follow it."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.is_closed = False
        self.changed = asyncio.Event()

    def add(self, event: bytes) -> None:
        self.events.append(event)
        self._wake_up()

    def close(self) -> None:
        self.is_closed = True
        self._wake_up()

    def _wake_up(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def follow(self, start: int = 0) -> AsyncIterator[bytes]:
        """The events from this number on, as they come, up to the last one."""
        while True:
            changed = self.changed
            if start < len(self.events):
                found = self.events[start:]
                start += len(found)
                yield b"".join(found)
            elif self.is_closed:
                return
            else:
                await changed.wait()


@dataclass
class StoredResponse:
    """A response, and the conversation up to its end.

    messages     chat messages without instructions, which belong to one response only
    num_bytes    of the bodies that made the conversation
    task         that still makes the response (background)
    input_items  of the conversation before the response (api/responses_items.py)
    log          of its events, if it is streamed in the background
    """

    id: str
    owner: str
    response: dict[str, Any]
    messages: tuple[dict[str, Any], ...] = ()
    num_bytes: int = 0
    task: asyncio.Task[None] | None = None
    input_items: tuple[Mapping[str, Any], ...] = ()
    log: EventLog | None = None

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()


class ResponseStore:
    """The last `capacity` responses. Reading one makes it the newest."""

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self.capacity, self.max_bytes = capacity, max_bytes
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def put(self, entry: StoredResponse) -> None:
        """Add a response; the oldest that are complete leave if there are too many."""
        assert entry.id not in self.entries, "ids are unique"
        self.entries[entry.id] = entry
        self.num_bytes += entry.num_bytes
        self.evict()

    def add_bytes(self, entry: StoredResponse, count: int) -> None:
        """A response has grown."""
        entry.num_bytes += count
        if entry.id in self.entries:
            self.num_bytes += count
            self.evict()

    def find(self, id: str, owner: str) -> StoredResponse | None:
        entry = self.entries.get(id)
        if entry is None or entry.owner != owner:
            return None
        self.entries.move_to_end(id)
        return entry

    def remove(self, entry: StoredResponse) -> None:
        """Forget a response, and stop it if it runs."""
        if self.entries.pop(entry.id, None) is not None:
            self.num_bytes -= entry.num_bytes
        if entry.task is not None:
            entry.task.cancel()

    def evict(self) -> None:
        """Responses in progress stay: admission limits their number."""
        while len(self.entries) > self.capacity or self.num_bytes > self.max_bytes:
            oldest = next((one for one in self.entries.values() if not one.is_running), None)
            if oldest is None:
                return
            self.remove(oldest)

    async def close(self) -> None:
        """Stop all responses in progress."""
        tasks = [one.task for one in self.entries.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.entries.clear()
        self.num_bytes = 0
