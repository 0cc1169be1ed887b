"""Events of a chat: what the output parsers emit and the APIs turn into JSON or SSE.

A message is text, reasoning and tool calls in the order in which the model wrote them. Deltas of one
kind that follow each other form one piece: their texts are concatenated.
"""

from __future__ import annotations

import msgspec

from fulgurite.serve.engine.request import TokenLogprob


class TextDelta(msgspec.Struct):
    """A part of the visible answer, and the tokens that became text since the last delta."""

    text: str
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None


class ReasoningDelta(msgspec.Struct):
    """A part of the reasoning before the answer."""

    text: str


class ToolCallStart(msgspec.Struct):
    """A tool call begins. `index` counts the calls of one message from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


ParserEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments
