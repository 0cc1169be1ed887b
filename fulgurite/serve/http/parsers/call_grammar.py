"""The grammar of replies with strict tools and tool choice auto: text, or calls of their schemas.

A tool format and tools in, a structural tag out. Text is free up to the first characters of a call; the
call then follows the schema of a tool with `"strict": true`. Other tools take any arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.parsers.reasoning import ReasoningFormat
from fulgurite.serve.http.parsers.syntax.calls import CallSyntax
from fulgurite.serve.http.parsers.syntax.json_calls import JsonCalls, NamedCalls
from fulgurite.serve.http.parsers.syntax.pythonic_calls import PythonicCalls
from fulgurite.serve.http.parsers.syntax.tagged_calls import TaggedCalls
from fulgurite.serve.http.parsers.syntax.written import (
    Format,
    WrittenTool,
    constant,
    either,
    json_value,
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
    format, written = read_strictly(format), [read_tool(tool) for tool in tools]
    if format.name == "harmony":
        calls = [{"name": one.name, "content": json_value(one.schema)} for one in written]
        tag = {"type": "harmony_calls", "calls": calls, "is_open": is_in_reasoning}
        return {"format": tag}
    marked = write_marked_calls(format, written)
    ends = {
        "ends": list(format.closes),
        "must_close": format.example.endswith(format.closes),
    }
    triggered = [{"trigger": open, "content": marked, **ends} for open in format.opens]
    bare = [one for tool in written for one in write_bare_calls(format, tool, written)]
    tag = {"type": "text_with_calls", "calls": triggered + bare, "ignored": list(format.ignored)}
    if reasoning is not None:
        opens, closes = list(reasoning.opens), list(reasoning.closes)
        tag["reasoning"] = {"opens": opens, "closes": closes, "is_open": is_in_reasoning}
    return {"format": tag}


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


def write_marked_calls(format: ToolFormat, tools: Sequence[WrittenTool]) -> Format:
    """What stands between the markers of a format."""
    forms = []
    for syntax in format.syntaxes:
        one = either(*(syntax.write_call(tool) for tool in tools))
        if isinstance(syntax, NamedCalls):
            forms.append(one)
            continue
        if format.in_list and not isinstance(syntax, TaggedCalls):
            one = sequence(constant("["), separated(one, ", "), constant("]"))
        elif syntax.repeats:
            one = separated(one, "\n" if format.closes else "; ")
        forms.append(sequence(SPACE, one, LINE) if format.closes else sequence(SPACE, one))
    return either(*forms)


def write_bare_calls(
    format: ToolFormat, tool: WrittenTool, tools: Sequence[WrittenTool]
) -> list[dict[str, Any]]:
    """Calls of a tool that have no marker: they begin with the text that has its name."""
    if not format.bare_opens:
        return []
    return [write_bare_call(syntax, tool, tools) for syntax in format.syntaxes]


def write_bare_call(
    syntax: CallSyntax, tool: WrittenTool, tools: Sequence[WrittenTool]
) -> dict[str, Any]:
    calls = either(*(syntax.write_call(one) for one in tools))
    if isinstance(syntax, JsonCalls):
        return {
            "pattern": syntax.bare_pattern(tool.name),
            "content": syntax.write_arguments(tool),
            "repeat": sequence(constant("; "), calls),
        }
    if isinstance(syntax, PythonicCalls):
        more = sequence(constant(", "), separated(calls, ", "), constant("]"))
        return {
            "pattern": syntax.bare_pattern(tool.name),
            "content": sequence(syntax.write_arguments(tool), either(constant("]"), more)),
        }
    assert isinstance(syntax, TaggedCalls), "no other syntax has calls without a marker"
    return {
        "trigger": syntax.name_open + tool.name + syntax.name_ends[0],
        "content": syntax.write_arguments(tool),
        "repeat": sequence(LINE, calls),
    }
