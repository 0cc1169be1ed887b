"""`POST /v1/chat/completions`: a conversation in, a message out, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from fulgurite.serve.http.admission import Ticket
from fulgurite.serve.http.api.completions import (
    MIN_LOGPROB,
    describe_prompt_logprobs,
    describe_usage,
)
from fulgurite.serve.http.api.sampling import (
    ResponseFormat,
    SamplingFields,
    refuse_unsupported,
)
from fulgurite.serve.http.asgi import (
    DONE_EVENT,
    JsonResponse,
    encode_event,
    start_stream,
    while_connected,
)
from fulgurite.serve.http.body import parse_body, read_body
from fulgurite.serve.http.chat import ChatDelta, ChatGeneration, Conversation, start_chat
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import invalid, to_api_error
from fulgurite.serve.http.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from fulgurite.serve.http.generation import WireLogprob
from fulgurite.serve.http.server import Server, new_id

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class AllowedFunction(Struct):
    name: str


class AllowedTool(Struct):
    type: Literal["function"]
    function: AllowedFunction


class AllowedTools(Struct):
    """The tools of a request that may be called; `required`: one of them must be."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


def read_name(tool: dict[str, Any]) -> str | None:
    """The name of a tool that is not checked yet."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat completion."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    # accepted, without a meaning here
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    verbosity: str | None = None
    # refused unless they ask for nothing
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    moderation: Any = None
    # extras
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # True
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None  # True

    def to_conversation(self) -> Conversation:
        values = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            values.setdefault("reasoning_effort", self.reasoning_effort)
            values.setdefault("enable_thinking", self.reasoning_effort != "none")
        tools, choice = self.choose_tools()
        return Conversation(
            self.messages,
            tools,
            choice,
            self.parallel_tool_calls is not False,
            values,
            self.chat_template,
            self.include_reasoning is not False,
            self.add_generation_prompt is not False,
            bool(self.continue_final_message),
        )

    def choose_tools(self) -> tuple[list[dict[str, Any]], Any]:
        """The tools that may be called, and the choice among them; `allowed_tools` names some."""
        tools, choice = self.tools or [], self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return tools, choice
        try:
            allowed = msgspec.convert(choice.get("allowed_tools"), AllowedTools)
        except msgspec.ValidationError as error:
            raise invalid(f"'tool_choice.allowed_tools': {error}", "tool_choice") from None
        names = {one.function.name for one in allowed.tools}
        unknown = sorted(names - {read_name(tool) for tool in tools})
        if unknown:
            raise invalid(f"'tool_choice' allows {unknown[0]!r}, which is no tool", "tool_choice")
        return [tool for tool in tools if read_name(tool) in names], allowed.mode

    def read_max_tokens(self) -> tuple[int | None, str]:
        """The limit, and the field that has it."""
        if self.max_completion_tokens is None and self.max_tokens is not None:
            return self.max_tokens, "max_tokens"
        return self.max_completion_tokens, "max_completion_tokens"

    def count_logprobs(self, limits: Limits) -> int | None:
        """Alternatives a token; None: no log-probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        if not self.logprobs:
            return None
        count = self.top_logprobs or 0
        if not 0 <= count <= limits.logprobs:
            raise invalid(f"'top_logprobs' must be 0 to {limits.logprobs}", "top_logprobs")
        return count


class FunctionPart(Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallPart(Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionPart | None = None


def check_body(body: ChatCompletionRequest) -> None:
    body.check_stream()
    if not body.messages:
        raise invalid("'messages' is empty", "messages")
    refuse_unsupported(
        body,
        {
            "modalities": (["text"],),
            "audio": (),
            "web_search_options": (),
            "functions": ([],),
            "function_call": ("none",),
            "moderation": (),
        },
    )


async def create_chat_completion(request: Request, server: Server) -> Response:
    """Handle a request."""
    limits = server.config.limits
    raw = await read_body(request, limits)
    body = parse_body(raw, ChatCompletionRequest, limits)
    model = server.check_model(body.model)
    check_body(body)
    max_tokens, max_tokens_param = body.read_max_tokens()
    ticket = server.enter(request, len(raw), body.deadline)
    try:
        chat = await start_chat(
            server,
            body.to_conversation(),
            body,
            ticket,
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            logprobs=body.count_logprobs(limits),
            constraint=body.grammar_fields(body.response_format),
        )
        id = new_id("chatcmpl-", body.request_id)
        if body.stream:
            events = stream_events(server, body, chat, id, model, ticket)
            return await start_stream(request, events)
        reply = await while_connected(request, complete(server, body, chat, id, model))
        ticket.close()
        return JsonResponse(reply)
    except BaseException:  # also a cancelled task: the place is given back, then it goes on
        ticket.close()
        raise


# ---- replies --------------------------------------------------------------------------------------


def describe_logprobs(server: Server, logprobs: list[WireLogprob]) -> list[dict[str, Any]]:
    texts = server.token_texts
    assert texts is not None, "chats need a tokenizer"

    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = texts[token]
        return {"token": text, "logprob": max(value, MIN_LOGPROB), "bytes": data}

    return [
        {**entry(token, value), "top_logprobs": [entry(*one) for one in top]}
        for token, value, top in logprobs
    ]


class Message:
    """One choice's message, collected from events."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[WireLogprob] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: ChatDelta) -> None:
        for event in delta.events:
            match event:
                case TextDelta(text=text):
                    self.content.append(text)
                case ReasoningDelta(text=text):
                    self.reasoning.append(text)
                case ToolCallStart(id=id, name=name):
                    function = {"name": name, "arguments": ""}
                    self.calls.append({"id": id, "type": "function", "function": function})
                case ToolCallArguments(index=index, text=text):
                    self.calls[index]["function"]["arguments"] += text
        self.logprobs += delta.logprobs or ()
        self.token_ids += delta.token_ids
        if delta.finish is not None:
            self.finish_reason = delta.finish.reason
            self.stop_reason = delta.finish.stopped_by

    def to_choice(self, server: Server, body: ChatCompletionRequest) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self.calls else None,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        choice: dict[str, Any] = {
            "index": self.index,
            "message": message,
            "logprobs": {"content": describe_logprobs(server, self.logprobs), "refusal": None}
            if body.logprobs
            else None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = self.token_ids
        return choice


async def complete(
    server: Server, body: ChatCompletionRequest, chat: ChatGeneration, id: str, model: str
) -> dict[str, Any]:
    messages = [Message(index) for index in range(len(chat.parsers))]
    extras: dict[str, Any] = {}
    async for delta in chat.deltas():
        messages[delta.index].add(delta)
        if body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            described = describe_prompt_logprobs(
                server, delta.prompt_logprobs, body.prompt_logprobs
            )
            extras["prompt_logprobs"] = described
    if body.return_token_ids:
        extras["prompt_token_ids"] = chat.generation.request.prompt_ids
    return {
        "id": id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [message.to_choice(server, body) for message in messages],
        "usage": describe_usage(chat.usage),
        **extras,
    }


async def stream_events(
    server: Server,
    body: ChatCompletionRequest,
    chat: ChatGeneration,
    id: str,
    model: str,
    ticket: Ticket,
) -> AsyncIterator[bytes]:
    """A chunk with the role of each choice, then its deltas; usage at the end if asked for."""
    chunk: dict[str, Any] = {
        "id": id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }
    options = body.stream_options
    include_usage = options is not None and options.include_usage
    continuous = options is not None and options.continuous_usage_stats
    started: set[int] = set()
    has_prompt = False  # its token ids come with the first chunk
    stream = chat.deltas()
    try:
        async for delta in stream:
            for choice in describe_delta(server, body, delta, delta.index not in started):
                event = {**chunk, "choices": [choice]}
                if body.return_token_ids and not has_prompt:
                    has_prompt = True
                    event["prompt_token_ids"] = chat.generation.request.prompt_ids
                if continuous:
                    event["usage"] = describe_usage(chat.usage)
                elif include_usage:
                    event["usage"] = None
                yield encode_event(event)
            started.add(delta.index)
        if include_usage:
            yield encode_event({**chunk, "choices": [], "usage": describe_usage(chat.usage)})
        yield DONE_EVENT
    except Exception as error:  # a stream that has begun can only end with an event
        failure = to_api_error(error)
        if failure is None or not started:
            raise
        yield encode_event(failure.to_openai())
        yield DONE_EVENT
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
        ticket.close()


def describe_delta(
    server: Server, body: ChatCompletionRequest, delta: ChatDelta, is_first: bool
) -> list[dict[str, Any]]:
    """The chunks of a delta: one for each event, the last with the finish reason."""
    parts: list[dict[str, Any]] = [describe_event(event) for event in delta.events]
    if is_first:
        first = parts[0] if parts else {}
        empty = None if "tool_calls" in first else ""  # a reply of calls has no content
        parts = [{"role": "assistant", "content": empty, **first}, *parts[1:]]
    has_tokens = bool(delta.token_ids) and (body.logprobs or body.return_token_ids)
    if not parts and (delta.finish is not None or has_tokens):
        parts = [{}]
    choices: list[dict[str, Any]] = [
        {"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None}
        for part in parts
    ]
    if choices and body.logprobs and delta.logprobs is not None:
        content = describe_logprobs(server, delta.logprobs)
        choices[0]["logprobs"] = {"content": content, "refusal": None}
    if choices and body.return_token_ids:
        choices[0]["token_ids"] = delta.token_ids
    if delta.finish is not None:
        choices[-1]["finish_reason"] = delta.finish.reason
        choices[-1]["stop_reason"] = delta.finish.stopped_by
    return choices


def describe_event(event: Any) -> dict[str, Any]:
    match event:
        case TextDelta(text=text):
            return {"content": text}
        case ReasoningDelta(text=text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallStart(index=index, id=id, name=name):
            function = FunctionPart(name=name, arguments="")
            return {"tool_calls": [ToolCallPart(index, id, "function", function)]}
        case ToolCallArguments(index=index, text=text):
            return {"tool_calls": [ToolCallPart(index, function=FunctionPart(arguments=text))]}
    raise AssertionError(f"an unknown event: {event!r}")
