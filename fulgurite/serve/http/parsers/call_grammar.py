"""The grammar of replies with strict tools and tool choice auto: text, or calls of their schemas.

A tool format and tools in, a structural tag out. Text is free up to the first characters of a call; the
call then follows the schema of a tool with `"strict": true`. Other tools take any arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.parsers.reasoning import ReasoningFormat
from fulgurite.serve.http.parsers.syntax.json_calls import JsonCalls, NamedCalls
from fulgurite.serve.http.parsers.syntax.pythonic_calls import PythonicCalls
from fulgurite.serve.http.parsers.syntax.tagged_calls import TaggedCalls
from fulgurite.serve.http.parsers.syntax.written import (
    Format,
    WrittenTool,
    constant,
    either,
    json_value,
    reference,
    regex,
    separated,
    sequence,
)
from fulgurite.serve.http.parsers.tool_formats import ToolFormat

SPACE, LINE = regex(r"[ \n]?"), regex(r"\n?")


def has_strict_tools(tools: Sequence[Mapping[str, Any]]) -> bool:
    return any(tool["function"].get("strict") is True for tool in tools)


def read_strictly(format: ToolFormat) -> ToolFormat:
    """The format with calls as the grammar writes them: those without a marker begin with the name."""
    if not format.bare_opens:
        return format
    syntaxes = tuple(
        replace(one, name_first=True, wrapper_keys=(), id_keys=(), other_keys=())
        if isinstance(one, JsonCalls)
        else one
        for one in format.syntaxes
    )
    return replace(format, syntaxes=syntaxes)


def write_call_grammar(
    format: ToolFormat,
    reasoning: ReasoningFormat | None,
    tools: Sequence[Mapping[str, Any]],
    is_in_reasoning: bool,
) -> dict[str, Any]:
    """The structural tag of a reply; ArgumentError for a schema that the format can't enforce."""
    written = [read_tool(tool) for tool in tools]
    if format.name == "harmony":
        calls = [{"name": one.name, "content": json_value(one.schema)} for one in written]
        return {"format": {"type": "harmony_calls", "calls": calls, "is_open": is_in_reasoning}}
    return GrammarWriter(read_strictly(format), written).write(reasoning, is_in_reasoning)


class GrammarWriter:
    """Writes the grammar of one format. Arguments stand in `definitions`: several calls use them."""

    def __init__(self, format: ToolFormat, tools: Sequence[WrittenTool]) -> None:
        self.format, self.tools = format, tools
        self.definitions = {
            f"{index}.{tool.name}": syntax.write_arguments(tool)
            for index, syntax in enumerate(format.syntaxes)
            for tool in tools
        }

    def write(self, reasoning: ReasoningFormat | None, is_in_reasoning: bool) -> dict[str, Any]:
        format = self.format
        marked: dict[str, Any] = {
            "triggers": list(format.opens),
            "content": either(*map(self.write_marked_calls, range(len(format.syntaxes)))),
            "ends": list(format.closes),
            "must_close": format.example.endswith(format.closes),
        }
        tag: dict[str, Any] = {"type": "text_with_calls", "calls": [marked]}
        tag["ignored"] = list(format.ignored)
        if format.bare_opens:
            tag["repeats"] = list(map(self.write_next_call, range(len(format.syntaxes))))
            tag["calls"] = [marked, *self.write_bare_calls()]
        if reasoning is not None:
            opens, closes = list(reasoning.opens), list(reasoning.closes)
            tag["reasoning"] = {"opens": opens, "closes": closes, "is_open": is_in_reasoning}
        return {"format": tag, "definitions": self.definitions}

    def write_calls(self, index: int) -> Format:
        """A call of any tool in one of the format's syntaxes."""
        syntax = self.format.syntaxes[index]
        return either(
            *(syntax.write_call(one.name, reference(f"{index}.{one.name}")) for one in self.tools)
        )

    def write_marked_calls(self, index: int) -> Format:
        """What stands between the markers."""
        format, syntax, calls = self.format, self.format.syntaxes[index], self.write_calls(index)
        if isinstance(syntax, NamedCalls):
            return calls
        if format.in_list and not isinstance(syntax, TaggedCalls):
            calls = sequence(constant("["), separated(calls, ", "), constant("]"))
        elif syntax.repeats:
            calls = separated(calls, "\n" if format.closes else "; ")
        return sequence(SPACE, calls, LINE) if format.closes else sequence(SPACE, calls)

    def write_next_call(self, index: int) -> Format:
        """A call after another one without a marker between them."""
        syntax, calls = self.format.syntaxes[index], self.write_calls(index)
        if isinstance(syntax, TaggedCalls):
            return sequence(LINE, calls)
        return sequence(constant("; " if isinstance(syntax, JsonCalls) else ", "), calls)

    def write_bare_calls(self) -> Iterator[dict[str, Any]]:
        """Calls without a marker: they begin with the text that has the tool's name."""
        for index, syntax in enumerate(self.format.syntaxes):
            for tool in self.tools:
                if isinstance(syntax, TaggedCalls):
                    begin: dict[str, Any] = {"triggers": [syntax.write_head(tool.name)]}
                else:
                    assert isinstance(syntax, JsonCalls | PythonicCalls), "others have markers"
                    begin = {"pattern": syntax.bare_pattern(tool.name)}
                tail = constant("]" if isinstance(syntax, PythonicCalls) else "")
                content = reference(f"{index}.{tool.name}")
                yield {**begin, "content": content, "repeat": index, "tail": tail}


def read_tool(tool: Mapping[str, Any]) -> WrittenTool:
    """A tool; one that is not strict takes any values."""
    function = tool["function"]
    parameters: dict[str, Any] = dict(function.get("parameters") or {})
    if parameters.get("type", "object") != "object":
        raise ArgumentError(
            f"the parameters of {function['name']!r} are of type {parameters['type']!r}",
            next="use an object",
        )
    parameters["type"] = "object"
    if function.get("strict") is not True:
        names = parameters.get("properties") or {}
        parameters = {"type": "object", "properties": {name: {} for name in names}}
    return WrittenTool(function["name"], parameters)
