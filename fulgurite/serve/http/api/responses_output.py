"""The output of a response: deltas of a chat in, output items and the events of a stream out.

    response.output_item.added · content_part.added · output_text.delta … · output_text.done
    · content_part.done · output_item.done; the same with reasoning_text and function_call_arguments

One item is open at a time. An event of another kind closes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fulgurite.serve.http.chat import ChatDelta
from fulgurite.serve.http.events import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from fulgurite.serve.http.generation import WireLogprob
from fulgurite.serve.http.server import new_id

Event = dict[str, Any]
DescribeLogprobs = Callable[[list[WireLogprob]], list[dict[str, Any]]]


def make_text_part(text: str = "", logprobs: list[dict[str, Any]] | None = None) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def make_reasoning_part(text: str = "") -> Event:
    return {"type": "reasoning_text", "text": text}


class LogprobQueue:
    """Log-probabilities of tokens whose text has not been emitted yet.

    A parser holds text back, and drops markers and white space around calls. So tokens are found by
    their bytes. If that fails, all that wait belong to the text.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def take(self, text: str) -> list[dict[str, Any]]:
        """The entries of this text. Those before it are dropped."""
        data = text.encode()
        start = b"".join(bytes(entry["bytes"]) for entry in self.entries).find(data)
        if start < 0:
            taken, self.entries = self.entries, []
            return taken
        end, position, first, last = start + len(data), 0, len(self.entries), 0
        for index, entry in enumerate(self.entries):
            after = position + len(entry["bytes"])
            if position < end and after > start:
                first, last = min(first, index), index + 1
            position = after
        taken, self.entries = self.entries[first:last], self.entries[last:]
        return taken


class OutputBuilder:
    """Collects the items of a response. `add` returns what a stream says about them.

    `describe_logprobs`: None: there are none.
    """

    def __init__(self, describe_logprobs: DescribeLogprobs | None) -> None:
        self.describe_logprobs = describe_logprobs
        self.items: list[dict[str, Any]] = []
        self.is_open = False  # the last item
        self.pieces: list[str] = []  # of the open item
        self.logprobs: list[dict[str, Any]] = []  # of the open message
        self.pending = LogprobQueue()
        self.reasoning: list[str] = []

    # ---- in ----------------------------------------------------------------------------------------

    def add(self, delta: ChatDelta) -> list[Event]:
        finish = delta.finish
        if self.describe_logprobs is not None and delta.logprobs is not None:
            self.pending.entries += self.describe_logprobs(delta.logprobs)
        events = [one for event in delta.events for one in self.add_event(event)]
        if finish is not None:
            if not self.items:  # an empty reply is a message, too
                events += self.open(self.make_message())
            events += self.close("incomplete" if finish.reason == "length" else "completed")
        return events

    def add_event(self, event: ParserEvent) -> list[Event]:
        match event:
            case TextDelta(text=text):
                return [*self.open(self.make_message()), self.extend_text(text)]
            case ReasoningDelta(text=text):
                self.reasoning.append(text)
                opened = self.open(self.make_reasoning())
                return [*opened, self.extend("reasoning_text.delta", text, content_index=0)]
            case ToolCallStart(id=id, name=name):
                return [*self.close("completed"), *self.open(self.make_call(id, name))]
            case ToolCallArguments(text=text):
                return [self.extend("function_call_arguments.delta", text)]

    # ---- items -------------------------------------------------------------------------------------

    @staticmethod
    def make_message() -> dict[str, Any]:
        return {"id": "", "type": "message", "role": "assistant", "content": []}

    @staticmethod
    def make_reasoning() -> dict[str, Any]:
        return {"id": "", "type": "reasoning", "summary": [], "content": []}

    @staticmethod
    def make_call(id: str, name: str) -> dict[str, Any]:
        return {"id": "", "type": "function_call", "call_id": id, "name": name, "arguments": ""}

    def open(self, item: dict[str, Any]) -> list[Event]:
        """Open an item, unless one of its type is open."""
        kind = item["type"]
        if self.is_open and self.items[-1]["type"] == kind:
            return []
        events = self.close("completed")
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        item = {**item, "id": new_id(prefix), "status": "in_progress"}
        self.items.append(item)
        self.is_open = True
        events.append(self.event("output_item.added", item=dict(item)))
        if kind != "function_call":
            part = make_text_part() if kind == "message" else make_reasoning_part()
            events.append(self.item_event("content_part.added", content_index=0, part=part))
        return events

    def extend(self, name: str, text: str, **fields: Any) -> Event:
        self.pieces.append(text)
        self.pending.take(text)  # only text has log-probabilities
        return self.item_event(name, delta=text, **fields)

    def extend_text(self, text: str) -> Event:
        self.pieces.append(text)
        logprobs = self.pending.take(text)
        self.logprobs += logprobs
        return self.item_event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def close(self, status: str) -> list[Event]:
        """Complete the open item, if there is one."""
        if not self.is_open:
            return []
        item, text = self.items[-1], "".join(self.pieces)
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self.item_event("function_call_arguments.done", arguments=text)]
            events[0]["name"] = item["name"]
        elif item["type"] == "reasoning":
            part = make_reasoning_part(text)
            events = self.close_part(item, part, "reasoning_text.done", text=text)
        else:
            part = make_text_part(text, self.logprobs)
            events = self.close_part(
                item, part, "output_text.done", text=text, logprobs=self.logprobs
            )
            self.logprobs = []
        item["status"] = status
        events.append(self.event("output_item.done", item=dict(item)))
        self.is_open = False
        self.pieces.clear()
        return events

    def close_part(
        self, item: dict[str, Any], part: dict[str, Any], name: str, **fields: Any
    ) -> list[Event]:
        item["content"] = [part]
        return [
            self.item_event(name, content_index=0, **fields),
            self.item_event("content_part.done", content_index=0, part=part),
        ]

    # ---- events ------------------------------------------------------------------------------------

    def event(self, name: str, **fields: Any) -> Event:
        return {"type": f"response.{name}", "output_index": len(self.items) - 1, **fields}

    def item_event(self, name: str, **fields: Any) -> Event:
        return self.event(name, item_id=self.items[-1]["id"], **fields)
