"""Messages as clients send them in, messages as chat templates expect them out.

OpenAI's `tool_calls` hold their arguments as JSON text, its contents may be lists of parts or null,
and it has a role `developer`. Templates were written for other habits; see `normalize_messages`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.parsers.cursor import NotACall
from fulgurite.serve.http.parsers.prompt.templates import (
    distinguishes_none,
    knows_developer,
    knows_role,
)
from fulgurite.serve.http.parsers.syntax.json_text import load_json

Message = Mapping[str, object]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FUNCTION_ID = "call_0"  # of calls without ids: there is one at a time
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Arguments(dict[str, object]):
    """Arguments of a call for templates: a mapping, and JSON text where a template adds strings."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: object) -> str:
        return str(self) + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + str(self)


def normalize_messages(messages: Sequence[Message], template: str) -> list[dict[str, object]]:
    """The messages as `template` expects them.

    Contents become text. Arguments of calls become mappings. `developer` becomes `system`, unless the
    template knows it. Results of tools get the name of the tool. The older `function_call` and role
    `function` become calls and results of tools.
    """
    names: dict[str, str] = {}  # id of a call → name of its tool
    normalized = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ArgumentError(f"messages[{index}] has no role", next="give it a role and content")
        where = f"messages[{index}]"
        _check_message(message, where, template)
        normalized.append(_normalize_message(message, where, template, names))
    return normalized


def _check_message(message: Message, where: str, template: str) -> None:
    """Refuse what templates would leave out without a word: other roles, and messages without content.

    A template may know further roles: it has their names.
    """
    role = message["role"]
    if role not in ROLES and not knows_role(template, str(role)):
        raise ArgumentError(
            f"{where}.role is {str(role)[:100]!r}", next=f"use one of {', '.join(ROLES)}"
        )
    if role in ("system", "developer", "user") and message.get("content") is None:
        raise ArgumentError(f"{where} has no content", next="pass a string or a list of text parts")


def _normalize_message(
    message: Message, where: str, template: str, names: dict[str, str]
) -> dict[str, object]:
    result = {key: value for key, value in message.items() if value is not None}
    role = message["role"]
    if role == "developer" and not knows_developer(template):
        result["role"] = "system"
    if role == "function":
        result = {"tool_call_id": FUNCTION_ID, **result, "role": "tool"}
    result["content"] = join_content(message.get("content"), where)
    if message.get("content") is None and role == "assistant" and distinguishes_none(template):
        result["content"] = None
    calls = result.pop("tool_calls", None)
    older = result.pop("function_call", None)
    if not calls and older is not None:
        calls = [{"id": FUNCTION_ID, "type": "function", "function": older}]
    if calls:
        result["tool_calls"] = _normalize_calls(calls, where, names)
    if result["role"] == "tool" and "name" not in result:
        id = message.get("tool_call_id")
        if isinstance(id, str) and id in names:
            result["name"] = names[id]
    _add_reasoning(result, template)
    return result


def _add_reasoning(message: dict[str, object], template: str) -> None:
    """Clients return reasoning under several names, and templates read it under several names."""
    reasoning = message.get("reasoning_content") or message.pop("reasoning", None)
    if not isinstance(reasoning, str):
        return
    message["reasoning_content"] = reasoning
    if "thinking" in template and not message["content"]:  # gpt-oss takes only one of them
        message.setdefault("thinking", reasoning)


def join_content(content: object, where: str) -> str:
    """The text of a content: a text, nothing, or a list of text parts (joined by line breaks)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise ArgumentError(
            f"{where}.content is no text", next="pass a string or a list of text parts"
        )
    return "\n".join(
        _read_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)
    )


def _read_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise ArgumentError(f"{where} has no type", next='use {"type": "text", "text": ...}')
    if kind not in TEXT_PARTS:
        raise ArgumentError(
            f"{where} has type {kind!r}, but this model reads text only",
            next="remove the part, or describe it in words",
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ArgumentError(f"{where} has no text", next='use {"type": "text", "text": ...}')
    return text


def _normalize_calls(calls: object, where: str, names: dict[str, str]) -> list[dict[str, object]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise ArgumentError(f"{where}.tool_calls is no list", next="pass a list of calls")
    return [
        _normalize_call(call, f"{where}.tool_calls[{index}]", names)
        for index, call in enumerate(calls)
    ]


def _normalize_call(call: object, where: str, names: dict[str, str]) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not name:
        raise ArgumentError(
            f"{where} names no function",
            next='use {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}',
        )
    if isinstance(call.get("id"), str):
        names[str(call["id"])] = str(name)
    arguments = _read_arguments(function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _read_arguments(arguments: object) -> object:
    """Arguments as a mapping. Text that is no JSON object stays text: a model wrote it so."""
    if isinstance(arguments, str):
        if not arguments.strip():
            return Arguments()
        try:
            value = load_json(arguments)
        except NotACall:
            return arguments
        return Arguments(value) if isinstance(value, dict) else arguments
    if isinstance(arguments, Mapping):
        return Arguments(arguments)
    return Arguments() if arguments is None else str(arguments)
