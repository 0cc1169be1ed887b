"""Responses that clients can read again, continue or cancel: kept in memory, the oldest leave first.

A response belongs to the API key that made it. For others it does not exist.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 256 << 20  # of the conversations of all stored responses


@dataclass
class StoredResponse:
    """A response, and the conversation up to its end.

    messages     chat messages without instructions, which belong to one response only
    num_bytes    of the bodies that made the conversation
    task         that still makes the response (background)
    input_items  of the conversation before the response (api/responses_items.py)
    """

    id: str
    owner: str
    response: dict[str, Any]
    messages: tuple[dict[str, Any], ...] = ()
    num_bytes: int = 0
    task: asyncio.Task[None] | None = None
    input_items: tuple[Mapping[str, Any], ...] = ()

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
