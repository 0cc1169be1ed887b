"""Tools of a request and the choice among them: JSON values in, checked values and a schema out.

With tool choice `required` or a named tool, a grammar constrains the reply to the JSON of calls:
`tool_call_schema` is the schema, and the format `json` parses the reply.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.parsers.syntax.calls import NAME

Tool = Mapping[str, object]
TOOL_EXAMPLE = 'use {"type": "function", "function": {"name": ..., "parameters": {...}}}'
MODES = ("none", "auto", "required")
# Keywords whose values are data, not schemas: a "$ref" in them is no reference.
DATA_KEYWORDS = ("const", "enum", "default", "examples")
# Keywords whose values are objects of schemas, under names that may be keywords by chance.
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True)
class ToolChoice:
    """mode: none, auto, required (any of `names`) or named (the one in `names`)."""

    mode: str
    names: tuple[str, ...]

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar forces the reply to be calls."""
        return self.mode in ("required", "named")


def read_tools(tools: Sequence[object]) -> list[dict[str, object]]:
    """Check the tools of a request. Returns them as OpenAI writes them, with parameters."""
    checked: list[dict[str, object]] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise ArgumentError(f"tools[{index}] is no function", next=TOOL_EXAMPLE)
        if not isinstance(function, Mapping):
            raise ArgumentError(f"tools[{index}] has no function", next=TOOL_EXAMPLE)
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ArgumentError(
                f"tools[{index}].function.name is {name!r}",
                next="use letters, digits, underscores and dashes",
            )
        if name in names:
            raise ArgumentError(f"two tools have the name {name!r}", next="rename one of them")
        names.add(name)
        checked.append({"type": "function", "function": _check_function(function, index)})
    return checked


def _check_function(function: Mapping[str, object], index: int) -> dict[str, object]:
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ArgumentError(
            f"tools[{index}].function.parameters is no JSON Schema",
            next='use {"type": "object", "properties": {...}}',
        )
    kept = {key: value for key, value in function.items() if value is not None}
    kept.setdefault("description", "")
    kept["parameters"] = parameters or {"type": "object", "properties": {}}
    return kept


def read_tool_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """Read a `tool_choice`: none, auto, required, or {"type": "function", "function": {"name": …}}.

    Nothing given means auto with tools, and none without.
    """
    names = tuple(_name_of(tool) for tool in tools)
    if choice is None:
        return ToolChoice("auto" if names else "none", names)
    if isinstance(choice, str) and choice in MODES:
        if choice == "required" and not names:
            raise ArgumentError(
                "tool_choice is required, but there are no tools", next="pass tools"
            )
        return ToolChoice(choice if names else "none", names)
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ArgumentError(
            f"tool_choice is {str(choice)[:100]!r}",
            next='use none, auto, required or {"type": "function", "function": {"name": ...}}',
        )
    if name not in names:
        raise ArgumentError(
            f"tool_choice names {name!r}, which is no tool of the request",
            next=f"use one of {', '.join(names)}" if names else "pass tools",
        )
    return ToolChoice("named", (name,))


def tool_call_schema(
    tools: Sequence[Tool], names: Sequence[str] | None = None, parallel: bool = True
) -> dict[str, object]:
    """The JSON Schema of calls: {"name": …, "arguments": {…}}, or a list of them with `parallel`.

    `names` are the tools that may be called; None: all.
    """
    definitions: dict[str, object] = {}
    calls = [
        _call_schema(tool, definitions)
        for tool in tools
        if names is None or _name_of(tool) in names
    ]
    if not calls:
        raise ArgumentError("there is no tool to call", next="pass tools, or tool_choice none")
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, object] = {"type": "array", "items": call, "minItems": 1}
    schema = schema if parallel else dict(call)
    return {**schema, "$defs": definitions} if definitions else schema


def _call_schema(tool: Tool, definitions: dict[str, object]) -> dict[str, object]:
    """One call. Parameters with references move to `definitions`, so that the references hold."""
    function = tool["function"]
    assert isinstance(function, Mapping), "read_tools checks this"
    name = _name_of(tool)
    parameters = copy.deepcopy(function.get("parameters")) or {}
    if parameters == {} or parameters == {"type": "object", "properties": {}}:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    place = f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"
    if _move_references(parameters, place):
        definitions[name] = parameters
        parameters = {"$ref": place}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _move_references(schema: object, place: str) -> bool:
    """Change references within `schema` for its new place. Returns whether there are any."""
    found = False
    children: list[object] = []
    if isinstance(schema, list):
        children = schema
    elif isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            schema["$ref"] = place + reference[1:]
            found = True
        for key, value in schema.items():
            if key in NAMED_SCHEMAS and isinstance(value, dict):
                children.extend(value.values())
            elif key not in DATA_KEYWORDS:
                children.append(value)
    for child in children:
        found = _move_references(child, place) or found
    return found


def _name_of(tool: Tool) -> str:
    function = tool["function"]
    assert isinstance(function, Mapping), "read_tools checks this"
    return str(function["name"])
