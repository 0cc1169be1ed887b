"""Items of the Responses API in, chat messages out.

The assistant's items of one turn (reasoning, message, function calls) become one message, as chat
templates expect it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.errors import invalid
from fulgurite.serve.http.parsers.prompt.messages import join_content

ROLES = ("user", "assistant", "system", "developer")
ITEM_TYPES = "message, function_call, function_call_output, reasoning"


class MessageCollector:
    """Chat messages so far, and the assistant's message that still may grow."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None

    def add(self, message: dict[str, Any]) -> None:
        self.open = None
        self.messages.append(message)

    def extend_assistant(self, without: Sequence[str]) -> dict[str, Any]:
        """The assistant's open message; a new one if that has one of these fields already."""
        if self.open is None or any(self.open.get(name) for name in without):
            self.open = {"role": "assistant", "content": None}
            self.messages.append(self.open)
        return self.open


def to_chat_messages(items: str | Sequence[Any], where: str = "input") -> list[dict[str, Any]]:
    """The messages of a list of items; ApiError 400 that names the item."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    collector = MessageCollector()
    for index, item in enumerate(items):
        add_item(collector, item, f"{where}[{index}]")
    return collector.messages


def add_item(collector: MessageCollector, item: dict[str, Any], where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        add_message(collector, item, where)
    elif kind == "reasoning":
        text = read_reasoning(item, where)
        if text:
            message = collector.extend_assistant(("reasoning_content", "content", "tool_calls"))
            message["reasoning_content"] = text
    elif kind == "function_call":
        message = collector.extend_assistant(())
        message.setdefault("tool_calls", []).append(read_call(item, where))
    elif kind == "function_call_output":
        if item.get("output") is None:
            raise invalid(f"{where} has no 'output'", f"{where}.output")
        output = join_parts(item["output"], f"{where}.output")
        id = read_text(item, "call_id", where)
        collector.add({"role": "tool", "tool_call_id": id, "content": output})
    elif kind == "item_reference":
        raise invalid(f"{where} is an item_reference; use 'previous_response_id' instead", where)
    else:
        raise invalid(
            f"{where} has type {str(kind)[:100]!r}, which is not supported; use {ITEM_TYPES}", where
        )


def add_message(collector: MessageCollector, item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    if item.get("content") is None:
        raise invalid(f"{where} has no content", f"{where}.content")
    text = join_parts(item["content"], where)
    if role == "assistant":
        collector.extend_assistant(("content", "tool_calls"))["content"] = text
    else:
        collector.add({"role": role, "content": text})


def join_parts(content: Any, where: str) -> str:
    try:
        return join_content(content, where)
    except ArgumentError as error:
        raise invalid(error.one_line(), where) from None


def read_reasoning(item: dict[str, Any], where: str) -> str:
    """The text of a reasoning item: its content, or else its summary."""
    for name in ("content", "summary"):
        parts = [] if item.get(name) is None else item[name]
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise invalid(f"{where}.{name} must be a list of parts", where)
        texts = [part.get("text") for part in parts]
        if texts:
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def read_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    function = {
        "name": read_text(item, "name", where),
        "arguments": read_text(item, "arguments", where),
    }
    return {"id": read_text(item, "call_id", where), "type": "function", "function": function}


def read_text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where} has no '{name}'", f"{where}.{name}")
    return value


def add_instructions(
    instructions: str | None, messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages after a system message; many chat templates take one, and only as the first."""
    if not instructions:
        return [*messages]
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{instructions}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
