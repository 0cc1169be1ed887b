"""The parser of one reply: text as it is detokenized in, chat events out.

    reply ─ reasoning.py ─▶ reasoning ─ tool_calls.py ─▶ text and calls ─▶ events
          └ harmony.py, which does both ──────────────────────────────────┘

A parser never raises on model output: what is no call stays text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fulgurite.serve.http.events import ParserEvent, TextDelta
from fulgurite.serve.http.parsers.cursor import Cursor, Steps, markers_of
from fulgurite.serve.http.parsers.emitter import Emitter
from fulgurite.serve.http.parsers.harmony import parse_harmony
from fulgurite.serve.http.parsers.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    read_reasoning,
)
from fulgurite.serve.http.parsers.syntax.calls import Schemas
from fulgurite.serve.http.parsers.tool_calls import parse_tool_calls
from fulgurite.serve.http.parsers.tool_formats import TOOL_FORMATS, ToolFormat

HARMONY_CALLS = TOOL_FORMATS["harmony"]
HARMONY_REASONING = REASONING_FORMATS["harmony"]
NO_SCHEMA: Mapping[str, object] = {}


class OutputParser:
    """Parses one reply.

    Args:
        tool_format: None: calls are not looked for.
        reasoning_format: None: reasoning is not looked for.
        tools: the tools of the request, as OpenAI writes them. Their schemas give types to arguments
            that a format writes as plain text.
        starts_in_reasoning: the prompt has opened the reasoning.
        parse_reasoning: False: reasoning is a part of the text.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        tools: Sequence[Mapping[str, object]] = (),
        starts_in_reasoning: bool = False,
        parse_reasoning: bool = True,
    ) -> None:
        self.tool_format = tool_format
        self.reasoning_format = reasoning_format
        self.tools = read_schemas(tools)
        self.starts_in_reasoning = starts_in_reasoning
        self.parse_reasoning = parse_reasoning
        self._cursor = Cursor()
        self._emitter = Emitter()
        has_format = tool_format is not None or reasoning_format is not None
        self._steps: Steps[None] | None = self._parse() if has_format else None

    def push(self, text: str) -> list[ParserEvent]:
        """Add text and return the events that are final. Adjacent deltas are merged."""
        if self._steps is None:
            return [TextDelta(text)] if text else []
        self._cursor.feed(text)
        next(self._steps, None)
        return self._emitter.take_events()

    def finish(self) -> list[ParserEvent]:
        """The remaining events when no more text comes."""
        if self._steps is None:
            return []
        self._cursor.ended = True
        for _ in self._steps:  # once more; steps that end need no more text
            pass
        self._emitter.finish()
        return self._emitter.take_events()

    @property
    def num_calls(self) -> int:
        """The number of calls so far; with any, the finish reason is `tool_calls`."""
        return self._emitter.num_calls

    def _parse(self) -> Steps[None]:
        cursor, emitter, tool_format = self._cursor, self._emitter, self.tool_format
        reasoning = self.reasoning_format
        if tool_format is HARMONY_CALLS or (tool_format is None and reasoning is HARMONY_REASONING):
            yield from parse_harmony(
                cursor, emitter, self.starts_in_reasoning, self.parse_reasoning
            )
            return
        if reasoning is not None and reasoning.opens:
            yield from read_reasoning(
                cursor,
                emitter,
                reasoning,
                self.starts_in_reasoning,
                self.parse_reasoning,
                _special_opens(tool_format),
            )
        if tool_format is not None:
            yield from parse_tool_calls(cursor, emitter, tool_format, self.tools)
        else:
            yield from cursor.copy_until(markers_of(), emitter.text)


def _special_opens(format: ToolFormat | None) -> tuple[str, ...]:
    """Markers that are special tokens in every model of the format, so never a part of reasoning."""
    if format is None or not format.ignored:
        return ()
    return (*format.opens, *format.ignored)


def read_schemas(tools: Sequence[Mapping[str, object]]) -> Schemas:
    """Name → JSON Schema of the arguments."""
    schemas: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else NO_SCHEMA
    return schemas
