"""Conversations in Anthropic's form in, chat messages in OpenAI's form out.

A turn of Anthropic is a list of blocks. Results of tools are blocks of the user's turn; chat templates
expect them as messages of their own. Turns of one role that follow each other are one turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from msgspec import Struct

from fulgurite.serve.http.api.sampling import ExtraFields
from fulgurite.serve.http.chat import Conversation
from fulgurite.serve.http.errors import ApiError, invalid

# Anthropic's tool runner then sends the whole conversation with each request.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
ERROR_PREFIX = "Error: "  # chat templates have no field for a tool that failed


class TextBlock(Struct, tag="text"):
    text: str


class TextPart(Struct):
    """A text block where there can be no other blocks."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag="redacted_thinking"):
    """Thinking that only its author can read: it is left out of the prompt."""

    data: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextPart] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(Struct, kw_only=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class MessageToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """Whether the model thinks before it answers, and whether the reply shows it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_on(self) -> bool:
        return self.type != "disabled"


class MessageOutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageOutputFormat | None = None


class ConversationFields(ExtraFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that make the prompt. `cache_control` is accepted anywhere: prefixes are always cached."""

    model: str
    messages: list[InputMessage]
    system: str | list[TextPart] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    container: Any = None
    speed: Literal["standard", "fast"] | None = None  # accepted, as `user_profile_id`
    user_profile_id: str | None = None
    workspace_id: str | None = None
    thread: dict[str, Any] | None = None  # refused in a way that clients understand
    chat_template_kwargs: dict[str, Any] | None = None  # not of Anthropic

    def to_conversation(self) -> Conversation:
        if self.thread is not None:
            raise ApiError(
                400,
                "'thread' is not supported: send the whole conversation in 'messages'",
                param="thread",
                details=NO_THREADS,
            )
        if self.mcp_servers:
            raise invalid("'mcp_servers' is not supported; pass 'tools'", "mcp_servers")
        if self.container:
            raise invalid("'container' is not supported: the client runs all tools", "container")
        messages = to_chat_messages(self.system, self.messages)
        choice = self.tool_choice
        return Conversation(
            messages,
            [describe_tool(tool) for tool in self.tools or ()],
            read_tool_choice(choice),
            choice is None or not choice.disable_parallel_tool_use,
            self.read_template_values(),
            continue_last=messages[-1]["role"] == "assistant",
        )

    @property
    def shows_thinking(self) -> bool:
        """Without `thinking`, clients expect the first block to be text."""
        thinking = self.thinking
        return thinking is not None and thinking.is_on and thinking.display != "omitted"

    def read_template_values(self) -> dict[str, Any]:
        values = dict(self.chat_template_kwargs or {})
        thinking = self.thinking
        values.setdefault("enable_thinking", thinking is not None and thinking.is_on)
        if thinking is not None and thinking.budget_tokens is not None:
            values.setdefault("thinking_budget", thinking.budget_tokens)
        if self.output_config is not None and self.output_config.effort is not None:
            values.setdefault("reasoning_effort", self.output_config.effort)
        return values

    def read_format(self) -> list[tuple[str, Any]]:
        config = self.output_config
        if config is None or config.format is None:
            return []
        return [("json_schema", config.format.schema)]


def describe_tool(tool: MessageTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict or None,
    }
    return {"type": "function", "function": function}


def read_tool_choice(choice: MessageToolChoice | None) -> Any:
    """The choice in OpenAI's words."""
    if choice is None:
        return None
    if choice.type == "any":
        return "required"
    if choice.type != "tool":
        return choice.type
    if choice.name is None:
        raise invalid("'tool_choice' of type tool needs the tool's 'name'", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


# ---- messages -------------------------------------------------------------------------------------


def to_chat_messages(
    system: str | list[TextPart] | None, messages: Sequence[InputMessage]
) -> list[dict[str, Any]]:
    """The conversation as chat messages; ApiError 400 for blocks in the wrong place."""
    if not messages:
        raise invalid("'messages' is empty", "messages")
    chat: list[dict[str, Any]] = []
    if system:
        chat.append({"role": "system", "content": join_texts(system)})
    numbered = enumerate(messages)
    for role, group in groupby(numbered, lambda pair: pair[1].role):
        turn = [read_blocks(index, message) for index, message in group]
        blocks = [block for part in turn for block in part]
        if role == "assistant":
            chat.append(read_assistant_turn(blocks))
        else:
            chat += read_user_turn(role, blocks)
    check_prefill(chat[-1])
    return chat


def join_texts(content: str | Sequence[TextBlock | TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def read_blocks(index: int, message: InputMessage) -> list[Block]:
    """The blocks of a message, of which each may be there for this role."""
    where = f"messages[{index}].content"
    if isinstance(message.content, str):
        return [TextBlock(message.content)]
    if not message.content:
        raise invalid(f"{where} is empty", where)
    allowed: dict[str, tuple[type[Struct], ...]] = {
        "user": (TextBlock, ToolResultBlock),
        "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
        "system": (TextBlock,),
    }
    for number, block in enumerate(message.content):
        if not isinstance(block, allowed[message.role]):
            kind = block.__struct_config__.tag
            place = f"{where}[{number}]"
            raise invalid(f"{place}: a {kind} block can't be in a {message.role} message", place)
    return message.content


def read_user_turn(role: str, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Texts as messages of the role, results of tools as messages of tools, in their order."""
    chat: list[dict[str, Any]] = []
    for is_text, group in groupby(blocks, lambda block: isinstance(block, TextBlock)):
        if is_text:
            texts = [block for block in group if isinstance(block, TextBlock)]
            chat.append({"role": role, "content": join_texts(texts)})
        else:
            chat += [read_tool_result(one) for one in group if isinstance(one, ToolResultBlock)]
    return chat


def read_tool_result(block: ToolResultBlock) -> dict[str, Any]:
    text = join_texts(block.content or "")
    content = ERROR_PREFIX + text if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def read_assistant_turn(blocks: Sequence[Block]) -> dict[str, Any]:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thinking = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [describe_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": join_texts(texts) or None}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def describe_call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def check_prefill(last: dict[str, Any]) -> None:
    """A conversation that ends with the assistant's message is continued: it must be text."""
    if last["role"] != "assistant":
        return
    if "tool_calls" in last:
        raise invalid(
            "the last message has tool_use blocks; add a user message with their tool_result blocks",
            "messages",
        )
    if not (last["content"] or "").strip():
        raise invalid("the last message is the assistant's and has no text to continue", "messages")
