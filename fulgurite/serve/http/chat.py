"""A conversation → chat events. Chat completions, responses and Anthropic messages stand on this.

    Conversation ─ template, tools ─▶ prompt ─ generation.py ─▶ Deltas ─ parsers/ ─▶ ChatDeltas

With tool choice `required` or a named tool a grammar constrains the reply to the JSON of calls. With
`auto` and strict tools it constrains the calls that the model begins (parsers/call_grammar.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Message, Tokenizer
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.http.admission import Ticket
from fulgurite.serve.http.api.sampling import SamplingFields
from fulgurite.serve.http.errors import invalid
from fulgurite.serve.http.events import ParserEvent, TextDelta, ToolCallArguments, ToolCallStart
from fulgurite.serve.http.generation import (
    ChoiceFinish,
    Delta,
    Generation,
    GenerationRequest,
    Usage,
    WireLogprob,
    WirePromptLogprob,
)
from fulgurite.serve.http.parsers import (
    TOOL_FORMATS,
    OutputParser,
    ToolChoice,
    read_tool_choice,
    read_tools,
    render_tools,
    starts_in_reasoning,
    tool_call_schema,
)
from fulgurite.serve.http.parsers.call_grammar import (
    has_strict_tools,
    read_strictly,
    write_call_grammar,
)
from fulgurite.serve.http.parsers.reasoning import ReasoningFormat
from fulgurite.serve.http.parsers.tool_formats import ToolFormat
from fulgurite.serve.http.server import Server

# Variables of a chat template that a request can't set: they are the request's own fields.
RESERVED_VALUES = frozenset({"messages", "tools", "add_generation_prompt", "chat_template", "self"})


@dataclass(frozen=True)
class Conversation:
    """What a chat endpoint asks for, in OpenAI's words.

    template_values    variables of the chat template (`chat_template_kwargs`)
    parse_reasoning    False: reasoning is a part of the text
    continue_last      the reply continues the last message, which is the assistant's
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    template_values: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    parse_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_last: bool = False


class ChatDelta(msgspec.Struct, frozen=True):
    """New events of one choice. `finish` comes with the last one: stop, length or tool_calls.

    `prompt_logprobs`: see `Delta`.
    """

    index: int
    events: list[ParserEvent]
    token_ids: list[int]
    logprobs: list[WireLogprob] | None
    finish: ChoiceFinish | None
    prompt_logprobs: list[WirePromptLogprob] | None = None


@dataclass(frozen=True)
class ReplyFormat:
    """How replies to a prompt are parsed.

    has_calls_only   the grammar allows calls and no text: what is left of one that was cut is dropped
    call_grammar     the structural tag of replies with strict tools and tool choice auto
    """

    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    tools: Sequence[Mapping[str, object]]
    starts_in_reasoning: bool
    parse_reasoning: bool
    parallel: bool
    has_calls_only: bool = False
    call_grammar: Mapping[str, Any] | None = None

    def make_parser(self) -> OutputParser:
        return OutputParser(
            self.tool_format,
            self.reasoning_format,
            tools=self.tools,
            starts_in_reasoning=self.starts_in_reasoning,
            parse_reasoning=self.parse_reasoning,
        )


async def render_prompt(
    server: Server, conversation: Conversation, tools: Sequence[Mapping[str, Any]]
) -> str:
    """The text of a conversation; ArgumentError if the template refuses it."""
    tokenizer, template = choose_template(server, conversation)
    format = server.formats.tool_format or TOOL_FORMATS["generic"]
    starts_turn = conversation.add_generation_prompt and not conversation.continue_last

    def prepare() -> tuple[list[dict[str, object]], dict[str, object]]:
        choice = conversation.tool_choice
        rendered = render_tools(conversation.messages, tools, choice, template, format)
        return rendered.messages, {**conversation.template_values, **rendered.values}

    def render() -> str:
        messages, values = prepare()
        return tokenizer.apply_chat_template(messages, starts_turn, **values)

    if conversation.chat_template is None:
        return await server.run_in_pool(render)
    messages, values = await server.run_in_pool(prepare)
    return await server.templates.render(
        template, tokenizer.template_values(messages, starts_turn, values)
    )


async def prepare_chat(
    server: Server, conversation: Conversation
) -> tuple[list[int], ReplyFormat, ToolChoice]:
    """Prompt ids, and how the reply is parsed; ApiError 400 for a conversation that can't be used."""
    reserved = RESERVED_VALUES.intersection(conversation.template_values)
    if reserved:
        raise invalid(
            f"chat_template_kwargs can't set {sorted(reserved)[0]!r}", "chat_template_kwargs"
        )
    if len(conversation.tools) > server.config.limits.tools:
        raise invalid(f"more than {server.config.limits.tools} tools", "tools")
    param = "tools"
    try:
        tools = read_tools(conversation.tools)
        param = "tool_choice"
        choice = read_tool_choice(conversation.tool_choice, tools)
        param = "messages"
        text = await render_prompt(server, conversation, tools)
    except ArgumentError as error:
        raise invalid(error.one_line(), param) from None
    if conversation.continue_last:
        text = cut_at_last_message(text, conversation.messages)
    ids = await server.encode(text, False)
    reasoning = server.formats.reasoning_format
    if choice.is_constrained:
        calls: ToolFormat | None = TOOL_FORMATS["json"]
        reasoning = None  # the grammar allows calls only
    else:
        calls = server.formats.tool_format if choice.mode == "auto" else None
    is_in_reasoning, grammar = starts_in_reasoning(text, reasoning), None
    if not choice.is_constrained and calls is not None and has_strict_tools(tools):
        try:
            grammar = write_call_grammar(calls, reasoning, tools, is_in_reasoning)
        except ArgumentError as error:
            raise invalid(error.one_line(), "tools") from None
        calls = read_strictly(calls)
    format = ReplyFormat(
        calls,
        reasoning,
        tools,
        is_in_reasoning,
        conversation.parse_reasoning,
        conversation.parallel_tool_calls,
        choice.is_constrained,
        grammar,
    )
    return ids, format, choice


def choose_template(server: Server, conversation: Conversation) -> tuple[Tokenizer, str]:
    """The tokenizer and its chat template, or the request's if that is allowed."""
    tokenizer = server.require_tokenizer()
    if conversation.chat_template is not None:
        if not server.config.allow_request_template:
            raise invalid(
                "'chat_template' in requests is not allowed; start with --allow-request-template",
                "chat_template",
            )
        return tokenizer, conversation.chat_template
    if tokenizer.chat_template is None:
        raise invalid(
            "this model has no chat template; use /v1/completions, or start with --chat-template"
        )
    if conversation.tools and conversation.tool_choice != "none" and tokenizer.tool_template:
        return replace(tokenizer, chat_template=tokenizer.tool_template), tokenizer.tool_template
    return tokenizer, tokenizer.chat_template


def cut_at_last_message(text: str, messages: Sequence[Message]) -> str:
    """The prompt up to the end of the last message's text, so that the reply continues it."""
    content = messages[-1].get("content") if messages else None
    last = content.rstrip() if isinstance(content, str) else ""
    if not last or messages[-1].get("role") != "assistant" or last not in text:
        raise invalid("'continue_final_message' needs a last message of the assistant", "messages")
    return text[: text.rindex(last) + len(last)]


def constrain_to_calls(
    format: ReplyFormat, choice: ToolChoice, constraint: dict[str, Any]
) -> dict[str, Any]:
    """The constraint of a reply: the JSON of calls if the tool choice asks for it.

    Without another constraint, replies with strict tools follow the grammar of their calls.
    """
    if not choice.is_constrained:
        is_free = not constraint and format.call_grammar is not None
        return {"structural_tag": format.call_grammar} if is_free else constraint
    schema = tool_call_schema(
        format.tools, choice.names, format.parallel and choice.mode != "named"
    )
    return {"json_schema": schema}


class ChatGeneration:
    """The replies to one conversation."""

    def __init__(self, generation: Generation, format: ReplyFormat) -> None:
        self.generation, self.format = generation, format
        self.parsers = [format.make_parser() for _ in range(generation.request.n)]

    @property
    def usage(self) -> Usage:
        return self.generation.usage

    async def deltas(self) -> AsyncIterator[ChatDelta]:
        stream = self.generation.deltas()
        try:
            async for delta in stream:
                yield self._parse(delta)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def _parse(self, delta: Delta) -> ChatDelta:
        parser = self.parsers[delta.index]
        events = parser.push(delta.text) if delta.text else []
        finish = delta.finish
        if finish is not None:
            events += parser.finish()
            if parser.num_calls and finish.reason == "stop":
                finish = ChoiceFinish("tool_calls", finish.stopped_by)
        if not self.format.parallel:
            events = [event for event in events if not is_later_call(event)]
        if self.format.has_calls_only:
            events = [event for event in events if not isinstance(event, TextDelta)]
        return ChatDelta(
            delta.index, events, delta.token_ids, delta.logprobs, finish, delta.prompt_logprobs
        )


def is_later_call(event: ParserEvent) -> bool:
    """Whether an event belongs to a call after the first; one is wanted."""
    return isinstance(event, ToolCallStart | ToolCallArguments) and event.index > 0


async def start_chat(
    server: Server,
    conversation: Conversation,
    body: SamplingFields,
    ticket: Ticket,
    *,
    max_tokens: int | None = None,
    max_tokens_param: str = "max_completion_tokens",
    logprobs: int | None = None,
    constraint: dict[str, Any] | None = None,
) -> ChatGeneration:
    """Render, tokenize and check a conversation; the generation runs when its deltas are read."""
    limits = server.config.limits
    ids, format, choice = await prepare_chat(server, conversation)
    left = server.check_prompt(ids, "messages")
    count = server.choose_max_tokens(max_tokens, left, max_tokens_param)
    given, constraint = constraint, constrain_to_calls(format, choice, constraint or {})
    defaults = server.sampling_defaults
    params: SamplingParams = body.build_params(limits, count, logprobs, constraint, defaults)
    is_of_tools = choice.is_constrained or constraint is not given
    await server.check_params(params, "tools" if is_of_tools else "response_format")
    plan = server.detokenize_plan
    request = GenerationRequest(
        ids,
        params,
        body.count(limits),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        skip_special_tokens=plan.skip_special_tokens and body.skip_special_tokens is not False,
        hidden_ids=plan.hidden_ids if body.skip_special_tokens is not False else frozenset(),
    )
    return ChatGeneration(server.generate(request, ticket), format)
