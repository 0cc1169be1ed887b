"""The body of `POST /v1/responses`: its fields in, a conversation, sampling fields and an echo out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from fulgurite.serve.http.api.responses_input import add_instructions
from fulgurite.serve.http.api.sampling import (
    ExtraFields,
    SamplingFields,
    choose_constraint,
    read_structured_outputs,
    refuse_unsupported,
)
from fulgurite.serve.http.body import parse_body
from fulgurite.serve.http.chat import Conversation
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import ApiError, invalid

LOGPROBS = "message.output_text.logprobs"
TOOL_TYPE = re.compile(r"(?P<tool>tools\[\d+\])\.(type|name)")
MAX_METADATA = 16

Include = Literal[
    "message.output_text.logprobs",
    # accepted: nothing here has these
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class FunctionTool(Struct, kw_only=True):
    """A function that the client runs."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat_tool(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict or None,
        }
        return {"type": "function", "function": function}


class AllowedTool(Struct):
    type: Literal["function"]
    name: str


class ResponseToolChoice(Struct, kw_only=True):
    """A function that must be called, or the tools that may be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool] | None = None


class TextFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponseRequest(ExtraFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a response."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[Include] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    # accepted, without a meaning here
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    # refused unless they ask for nothing
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    # not of OpenAI, with `ExtraFields`
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def check(self) -> None:
        """ApiError 400 for what can't be served."""
        names = ("conversation", "prompt", "context_management", "moderation")
        refuse_unsupported(self, dict.fromkeys(names, ([],)))
        if not self.input and self.input != "":
            raise invalid("'input' is empty", "input")
        if self.background and not self.is_stored:
            raise invalid("'background' needs 'store': true", "background")
        if len(self.metadata or ()) > MAX_METADATA:
            raise invalid(f"'metadata' has more than {MAX_METADATA} keys", "metadata")

    def count_logprobs(self, limits: Limits) -> int | None:
        """Alternatives a token; None: no log-probabilities."""
        count = self.top_logprobs or 0
        if not 0 <= count <= limits.logprobs:
            raise invalid(f"'top_logprobs' must be 0 to {limits.logprobs}", "top_logprobs")
        return count if count or LOGPROBS in (self.include or ()) else None

    def to_sampling_fields(self) -> SamplingFields:
        return SamplingFields(
            temperature=self.temperature, top_p=self.top_p, stop=self.stop, **self.copy_extras()
        )

    def read_constraint(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that `text.format`, or vLLM's field, asks for."""
        given = read_structured_outputs(self.structured_outputs)
        return choose_constraint([*self.read_format(), *given])

    def read_format(self) -> list[tuple[str, Any]]:
        format = None if self.text is None else self.text.format
        if format is None or format.type == "text":
            return []
        if format.type == "json_object":
            return [("json_object", True)]
        if format.schema is None:
            raise invalid("'text.format' of type json_schema needs 'schema'", "text.format.schema")
        return [("json_schema", format.schema)]

    def to_conversation(self, messages: Sequence[dict[str, Any]]) -> Conversation:
        """The conversation with these messages, without those of `instructions`."""
        values = dict(self.chat_template_kwargs or {})
        effort = None if self.reasoning is None else self.reasoning.effort
        if effort is not None:
            values.setdefault("reasoning_effort", effort)
            values.setdefault("enable_thinking", effort != "none")
        tools, choice = self.choose_tools()
        return Conversation(
            add_instructions(self.instructions, messages),
            [tool.to_chat_tool() for tool in tools],
            choice,
            self.parallel_tool_calls is not False,
            values,
        )

    def choose_tools(self) -> tuple[list[FunctionTool], Any]:
        """The tools that may be called, and the choice among them in the words of chats."""
        tools, choice = self.tools or [], self.tool_choice
        if not isinstance(choice, ResponseToolChoice):
            return tools, choice
        if choice.type == "function":
            if choice.name is None:
                raise invalid("'tool_choice' needs the function's 'name'", "tool_choice.name")
            return tools, {"type": "function", "function": {"name": choice.name}}
        names = {one.name for one in choice.tools or ()}
        unknown = names - {tool.name for tool in tools}
        if unknown:
            raise invalid(f"'tool_choice' allows {min(unknown)!r}, which is no tool", "tool_choice")
        return [tool for tool in tools if tool.name in names], choice.mode

    def describe(self, defaults: Mapping[str, float]) -> dict[str, Any]:
        """The fields of the request that a response repeats; `defaults`: the model's."""
        reasoning = self.reasoning or Reasoning()
        text = self.text or TextConfig()
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.is_stored,
            "temperature": choose(self.temperature, defaults.get("temperature"), 1.0),
            "text": {
                "format": describe_format(text.format),
                "verbosity": text.verbosity or "medium",
            },
            "tool_choice": describe_choice(self.tool_choice),
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": choose(self.top_p, defaults.get("top_p"), 1.0),
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


def choose(*values: float | None) -> float | None:
    """The first that is given."""
    return next((value for value in values if value is not None), None)


def describe_choice(choice: str | ResponseToolChoice | None) -> Any:
    if not isinstance(choice, ResponseToolChoice):
        return choice or "auto"
    if choice.type == "function":
        return {"type": choice.type, "name": choice.name}
    return {"type": choice.type, "mode": choice.mode, "tools": choice.tools or []}


def describe_format(format: TextFormat | None) -> dict[str, Any]:
    if format is None or format.type != "json_schema":
        return {"type": "text" if format is None else format.type}
    return {
        "type": format.type,
        "name": format.name or "schema",
        "description": format.description,
        "schema": format.schema,
        "strict": format.strict,
    }


def parse_response_body(raw: bytes, limits: Limits) -> ResponseRequest:
    """The body; tools that the server would have to run are refused in plain words."""
    try:
        return parse_body(raw, ResponseRequest, limits)
    except ApiError as error:
        found = TOOL_TYPE.fullmatch(error.param or "")
        if found is not None:
            error.message += (
                f" {found['tool']} must be of type function and have a name: the server has no "
                "tools of its own (web_search, file_search, code_interpreter, computer_use, mcp)."
            )
        raise
