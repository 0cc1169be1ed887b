"""The prompt side of tools: messages, tools and a tool choice in, values for the chat template out.

Most chat templates describe the tools of a request themselves. For others, a system message does:
the JSON Schemas of the tools, and the format of a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.parsers.prompt.messages import Message, normalize_messages
from fulgurite.serve.http.parsers.prompt.templates import (
    rejects_system,
    shows_tool_calls,
    takes_tools_in_system_message,
    uses_tools,
)
from fulgurite.serve.http.parsers.prompt.tool_choice import ToolChoice, read_tool_choice, read_tools
from fulgurite.serve.http.parsers.tool_formats import TOOL_FORMATS, ToolFormat

GENERIC = TOOL_FORMATS["generic"]


@dataclass(frozen=True)
class RenderedTools:
    """Arguments of `Tokenizer.apply_chat_template`: the messages, and the template's variables."""

    messages: list[dict[str, object]]
    values: dict[str, object] = field(default_factory=dict)


def render_tools(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] | None,
    tool_choice: object,
    template: str,
    tool_format: ToolFormat = GENERIC,
) -> RenderedTools:
    """Prepare a conversation with tools for a chat template.

        rendered = render_tools(messages, tools, "auto", tokenizer.chat_template)
        prompt = tokenizer.apply_chat_template(rendered.messages, **rendered.values)

    `tool_format` is the format that a described tool is to be called in, where the template does not
    say it. With tool choice `none`, the model sees no tools.
    """
    normalized = normalize_messages(messages, template)
    checked = [_without_strict(tool) for tool in read_tools(tools or ())]
    choice = read_tool_choice(tool_choice, checked)
    if not shows_tool_calls(template):
        normalized = [_write_as_text(message) for message in normalized]
    if not checked or choice.mode == "none":
        return RenderedTools(normalized)
    if takes_tools_in_system_message(template):
        functions = json.dumps([tool["function"] for tool in checked], ensure_ascii=False)
        return RenderedTools(_with_system_field(normalized, "tools", functions))
    if uses_tools(template):
        return RenderedTools(normalized, {"tools": checked})
    description = describe_tools(checked, choice, tool_format)
    return RenderedTools(_add_instructions(normalized, description, template))


def _without_strict(tool: dict[str, object]) -> dict[str, object]:
    """A tool as models see it: a grammar enforces `strict`."""
    function = tool["function"]
    assert isinstance(function, Mapping), "read_tools checks this"
    return {**tool, "function": {key: one for key, one in function.items() if key != "strict"}}


def describe_tools(
    tools: Sequence[Mapping[str, object]], choice: ToolChoice, format: ToolFormat
) -> str:
    """The instructions for a model whose chat template does not know tools."""
    signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = format.example
    if choice.mode in ("required", "named"):
        example = TOOL_FORMATS["json"].example  # the grammar allows nothing else
        rule = "Reply with calls only. Do not write any other text."
        if choice.mode == "named":
            rule = f"Call the tool {choice.names[0]}. Do not write any other text."
    else:
        rule = "If no tool is needed, answer directly."
    return (
        "You can call tools. Each line is a tool with the JSON Schema of its parameters:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        f"To call a tool, write its name and its arguments in this format:\n{example}\n\n{rule}"
    )


def _write_as_text(message: dict[str, object]) -> dict[str, object]:
    """Calls and results of tools as text, for templates that would leave them out."""
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    texts = [str(message["content"] or "")]
    for call in calls:
        function = call["function"]
        value = {"name": function["name"], "arguments": function["arguments"]}
        texts.append(f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(text for text in texts if text)}


def _with_system_field(
    messages: list[dict[str, object]], key: str, value: str
) -> list[dict[str, object]]:
    """The messages with a field in the first system message, which is added if there is none."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], key: value}, *messages[1:]]
    return [{"role": "system", "content": "", key: value}, *messages]


def _add_instructions(
    messages: list[dict[str, object]], text: str, template: str
) -> list[dict[str, object]]:
    """The messages with instructions in the system message, or in the first one of the user."""
    role = "user" if rejects_system(template) else "system"
    if messages and messages[0]["role"] == role:
        content = str(messages[0]["content"] or "")
        parts = (text, content) if role == "user" else (content, text)
        joined = "\n\n".join(part for part in parts if part)
        return [{**messages[0], "content": joined}, *messages[1:]]
    if role == "user" and messages and messages[0]["role"] != "assistant":
        raise ArgumentError(
            "this model's chat template takes neither tools nor system messages",
            next="remove the system message, or put it into the first user message",
        )
    return [{"role": role, "content": text}, *messages]
