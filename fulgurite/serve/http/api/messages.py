"""`POST /v1/messages` of Anthropic: a conversation in, a message of blocks out, whole or streamed.

deltas of chat.py ─ ContentBuilder: blocks, and the events of a stream ─▶ a message, or events
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from fulgurite.serve.http.admission import Ticket
from fulgurite.serve.http.api.messages_input import ConversationFields
from fulgurite.serve.http.api.sampling import (
    SamplingFields,
    choose_constraint,
    read_structured_outputs,
)
from fulgurite.serve.http.asgi import (
    JsonResponse,
    encode_named_event,
    start_stream,
    while_connected,
)
from fulgurite.serve.http.body import parse_body, read_body
from fulgurite.serve.http.chat import ChatDelta, ChatGeneration, prepare_chat, start_chat
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import ApiError, to_api_error
from fulgurite.serve.http.events import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from fulgurite.serve.http.generation import ChoiceFinish, Usage
from fulgurite.serve.http.server import Server, new_id

T = TypeVar("T", bound=Struct)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = encode_named_event("ping", {"type": "ping"})
PING_SECONDS = 10.0  # between events, at most, while tokens come that have no event
BLOCK_TYPE = re.compile(r"(?P<block>(messages|system)\[.*\])\.type")
TOOL_TYPE = re.compile(r"(?P<tool>tools\[\d+\])\.(type|input_schema)")


class MessageRequest(ConversationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a message."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    # accepted, without a meaning here
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None

    def to_sampling_fields(self) -> SamplingFields:
        return SamplingFields(
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop_sequences,
            **self.copy_extras(),
        )

    def read_constraint(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that `output_config`, or vLLM's field, asks for."""
        given = read_structured_outputs(self.structured_outputs)
        return choose_constraint([*self.read_format(), *given])


class CountTokensRequest(ConversationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to count the tokens of a prompt. Its extra fields change no count."""


async def create_message(request: Request, server: Server) -> Response:
    """Handle a request."""
    limits = server.config.limits
    raw = await read_body(request, limits)
    body = parse_message_body(raw, MessageRequest, limits)
    model = server.check_model(body.model)
    conversation = body.to_conversation()
    ticket = server.enter(request, len(raw), body.deadline)
    try:
        chat = await start_chat(
            server,
            conversation,
            body.to_sampling_fields(),
            ticket,
            max_tokens=body.max_tokens,
            constraint=body.read_constraint(),
        )
        reply = Reply(new_id("msg_"), model, body.shows_thinking)
        if body.stream:
            stream = stream_events(chat, reply, ticket, request.state.id)
            return await start_stream(request, stream)
        message = await while_connected(request, complete(chat, reply))
        ticket.close()
        return JsonResponse(message)
    except BaseException:  # also a cancelled task: the place is given back, then it goes on
        ticket.close()
        raise


async def count_tokens(request: Request, server: Server) -> Response:
    """The tokens of the prompt that the same conversation would have."""
    limits = server.config.limits
    raw = await read_body(request, limits)
    body = parse_message_body(raw, CountTokensRequest, limits)
    server.check_model(body.model)
    conversation = body.to_conversation()
    ticket = server.enter(request, len(raw), None)
    try:
        ids, _, _ = await prepare_chat(server, conversation)
    finally:
        ticket.close()
    return JsonResponse({"input_tokens": len(ids)})


def parse_message_body(raw: bytes, kind: type[T], limits: Limits) -> T:
    """The body as a Struct; blocks and tools that can't be used are refused in plain words."""
    try:
        return parse_body(raw, kind, limits)
    except ApiError as error:
        block = BLOCK_TYPE.fullmatch(error.param or "")
        tool = TOOL_TYPE.fullmatch(error.param or "")
        if block is not None:
            error.message += (
                f" {block['block']} must be a text, thinking, tool_use or tool_result block: "
                "this model reads text only."
            )
        elif tool is not None:
            error.message += (
                f" {tool['tool']} must have a name and an input_schema: the client runs all tools."
            )
        raise


# ---- replies --------------------------------------------------------------------------------------


class ContentBuilder:
    """Collects the blocks of a reply. `add` and `close` return what a stream says about it."""

    def __init__(self, shows_thinking: bool) -> None:
        self.shows_thinking = shows_thinking
        self.blocks: list[dict[str, Any]] = []
        self.open_type = ""  # of the last block; empty: it is closed
        self.pieces: list[str] = []  # of the open block

    def add(self, event: ParserEvent) -> list[dict[str, Any]]:
        match event:
            case TextDelta(text=text):
                opened = self._open({"type": "text", "text": ""})
                return [*opened, self._extend("text_delta", "text", text)]
            case ReasoningDelta(text=text):
                if not self.shows_thinking:
                    return []
                opened = self._open({"type": "thinking", "thinking": "", "signature": ""})
                return [*opened, self._extend("thinking_delta", "thinking", text)]
            case ToolCallStart(id=id, name=name):
                closed = self.close()
                return [*closed, *self._open(describe_tool_use(id, name))]
            case ToolCallArguments(text=text):
                return [self._extend("input_json_delta", "partial_json", text)]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        if self.open_type == block["type"]:
            return []
        events = self.close()
        self.open_type = block["type"]
        start = {"type": "content_block_start", "index": len(self.blocks), "content_block": block}
        self.blocks.append(dict(block))
        return [*events, start]

    def _extend(self, type: str, field: str, text: str) -> dict[str, Any]:
        self.pieces.append(text)
        delta = {"type": type, field: text}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def close(self) -> list[dict[str, Any]]:
        """Complete the open block, if there is one."""
        if not self.open_type:
            return []
        text, block = "".join(self.pieces), self.blocks[-1]
        if self.open_type == "tool_use":
            block["input"] = read_input(text)
        else:
            block[self.open_type] = text
        self.open_type = ""
        self.pieces.clear()
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]


def describe_tool_use(id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": {}}


def read_input(text: str) -> dict[str, Any]:
    """The arguments of a call. Text that is no JSON object is kept under Anthropic's name for it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


class Reply:
    """One message: its blocks so far, and how it ended."""

    def __init__(self, id: str, model: str, shows_thinking: bool) -> None:
        self.id, self.model = id, model
        self.content = ContentBuilder(shows_thinking)
        self.finish: ChoiceFinish | None = None

    def add(self, delta: ChatDelta) -> list[dict[str, Any]]:
        """Add a delta; the events that a stream sends for it."""
        events = [one for event in delta.events for one in self.content.add(event)]
        if delta.finish is not None:
            self.finish = delta.finish
            events += self.content.close()
        return events

    def describe(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.content.blocks,
            **self.describe_stop(),
            "usage": describe_usage(usage),
        }

    def describe_stop(self) -> dict[str, Any]:
        if self.finish is None:
            return {"stop_reason": None, "stop_sequence": None}
        reason, stopped_by = STOP_REASONS[self.finish.reason], self.finish.stopped_by
        if reason == "end_turn" and isinstance(stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        return {"stop_reason": reason, "stop_sequence": None}


def describe_usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the others of the prompt."""
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }


async def complete(chat: ChatGeneration, reply: Reply) -> dict[str, Any]:
    async for delta in chat.deltas():
        reply.add(delta)
    return reply.describe(chat.usage)


async def stream_events(
    chat: ChatGeneration, reply: Reply, ticket: Ticket, request_id: str
) -> AsyncIterator[bytes]:
    """The message without content, its blocks, and how it ended."""
    deltas = chat.deltas()
    sent_at = 0.0  # of the last event; 0: nothing was sent
    try:
        async for delta in deltas:
            if not sent_at:
                message = {**reply.describe(chat.usage), "content": []}
                start = {"type": "message_start", "message": message}
                yield encode_named_event("message_start", start) + PING
                sent_at = time.monotonic()
            events = reply.add(delta)
            if events:
                yield b"".join(encode_named_event(event["type"], event) for event in events)
                sent_at = time.monotonic()
            elif time.monotonic() - sent_at > PING_SECONDS:
                yield PING
                sent_at = time.monotonic()
        yield encode_end(reply, chat.usage)
    except Exception as error:  # a stream that has begun can only end with an event
        failure = to_api_error(error)
        if failure is None or not sent_at:
            raise
        yield encode_named_event("error", failure.to_anthropic(request_id))
    finally:
        await deltas.aclose()  # type: ignore[attr-defined]
        ticket.close()


def encode_end(reply: Reply, usage: Usage) -> bytes:
    counts = describe_usage(usage)
    del counts["service_tier"]
    delta = {"type": "message_delta", "delta": reply.describe_stop(), "usage": counts}
    stop = {"type": "message_stop"}
    return encode_named_event("message_delta", delta) + encode_named_event("message_stop", stop)
