"""Calls with one tag an argument; their values become JSON by the schema of the tool.

    <function=get_weather><parameter=city>Paris</parameter></function>
    get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>

An argument that the schema declares a string is streamed. Others wait for their end, because only
the whole text tells whether `12` is a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.parsers.cursor import EndOfOutput, NotACall, Steps, markers_of
from fulgurite.serve.http.parsers.syntax.calls import NOT_IN_NAMES, CallReader
from fulgurite.serve.http.parsers.syntax.json_text import SPACES, load_json
from fulgurite.serve.http.parsers.syntax.written import (
    ANNOTATIONS,
    Argument,
    Format,
    WrittenTool,
    any_text_until,
    constant,
    either,
    json_value,
    optional,
    regex,
    sequence,
)

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


@dataclass(frozen=True)
class TaggedCalls:
    """The tags of a call.

    name_open         before the name; "" if nothing is
    name_ends         after the name. A marker that belongs to what follows is left in place.
    key_open, key_end around an argument's name
    value_open        before the value, if that is a tag of its own
    value_close       after the value
    call_close        after the last argument; "" if nothing is
    not_in_name       characters that show that the text is no name
    strips_newlines   the value stands on lines of its own
    """

    name_open: str
    name_ends: tuple[str, ...]
    key_open: str
    key_end: str
    value_open: str
    value_close: str
    call_close: str
    not_in_name: tuple[str, ...] = (*NOT_IN_NAMES, "<")
    strips_newlines: bool = False
    repeats: bool = True
    tail: re.Pattern[str] = SPACES

    @property
    def markers(self) -> tuple[str, ...]:
        texts = (self.name_open, self.key_open, self.key_end, self.value_open, self.value_close)
        return tuple(text for text in (*texts, self.call_close) if len(text) > 2)

    def read_call(self, reader: CallReader) -> Steps[None]:
        yield from self._read_name(reader)
        next_tags = markers_of(*(tag for tag in (self.key_open, self.call_close) if tag))
        num_arguments = 0
        while True:
            yield from reader.skip_spaces()
            tag = yield from reader.cursor.match(next_tags)
            if tag != self.key_open:
                break
            yield from self._read_argument(reader, is_first=num_arguments == 0)
            num_arguments += 1
        if num_arguments:
            reader.arguments("}")

    def _read_name(self, reader: CallReader) -> Steps[None]:
        cursor = reader.cursor
        if self.name_open and (yield from cursor.match(markers_of(self.name_open))) is None:
            raise NotACall
        name, end = yield from cursor.take_until(self.name_ends, self.not_in_name)
        if end.startswith("<"):
            cursor.position -= len(end)
        reader.start(name.strip())

    def _read_argument(self, reader: CallReader, is_first: bool) -> Steps[None]:
        cursor = reader.cursor
        key, _ = yield from cursor.take_until((self.key_end,), ())
        key = key.strip()
        if self.value_open:
            yield from reader.skip_spaces()
            if (yield from cursor.match(markers_of(self.value_open))) is None:
                raise NotACall
        reader.arguments(f"{'{' if is_first else ', '}{dump_json(key)}: ")
        if self.strips_newlines and (yield from cursor.peek()) == "\n":
            cursor.position += 1
        schema = _argument_schema(reader, key)
        ends = markers_of(self.value_close)
        if self.strips_newlines:
            ends = markers_of("\n" + self.value_close, self.value_close)
        if _allowed_types(schema) == {"string"}:
            reader.arguments('"')
            end = yield from cursor.copy_until(
                ends, lambda piece: reader.arguments(dump_json(piece)[1:-1]), drops_partial=True
            )
            if end is not None:
                reader.arguments('"')
        else:
            pieces: list[str] = []
            end = yield from cursor.copy_until(ends, pieces.append)
            if end is not None:
                reader.arguments(convert_value("".join(pieces), schema))
        if end is None:
            raise EndOfOutput

    def write_call(self, name: str, arguments: Format) -> Format:
        return sequence(constant(self.write_head(name)), arguments)

    def write_head(self, name: str) -> str:
        """Up to the end of the name."""
        end = self.name_ends[0]
        return self.name_open + name + ("" if end.startswith("<") else end)

    def write_arguments(self, tool: WrittenTool) -> Format:
        line, parts = regex(r"\n?"), []
        for one in tool.properties:
            open = constant(self.key_open + one.name + self.key_end)
            value = sequence(open, *self._write_value(one), line)
            parts.append(value if one.is_required else optional(value))
        return sequence(line, *parts, constant(self.call_close))

    def _write_value(self, argument: Argument) -> Iterator[Format]:
        if self.value_open:
            yield from (regex(r"\n?"), constant(self.value_open))
        schema, close = argument.schema, self.value_close
        if _allowed_types(schema) != {"string"} and {*schema} - ANNOTATIONS:
            line = regex(r"\n?") if self.strips_newlines else constant("")
            yield from (line, json_value(schema), line, constant(close))
            return
        rules = {*schema} - ANNOTATIONS - {"type", "enum", "const"}
        if rules:
            raise ArgumentError(
                f"this model's tool calls can't enforce {min(rules)!r} of the argument "
                f"{argument.name!r}",
                next="remove it, use tool_choice required, or set strict to false",
            )
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            choices = [constant(one) for one in values if isinstance(one, str) and close not in one]
            yield from (either(*choices), constant(close))
        else:
            yield any_text_until(close)


def _argument_schema(reader: CallReader, key: str) -> object:
    """The schema of an argument of the current call; None if nothing is known."""
    schema = reader.tools.get(reader.emitter.call_name, {})
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _allowed_types(schema: object) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            types = [_allowed_types(option) for option in options]
            return set().union(*types) if all(types) else set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {name for value in values for name in JSON_TYPES.get(type(value), ())[:1]}
    return set()


def convert_value(text: str, schema: object) -> str:
    """The JSON text of an argument that was written as plain text.

    Text that is a JSON value of an allowed type stays as it is. All other text is a string.
    """
    allowed = _allowed_types(schema)
    stripped = text.strip()
    candidate = PYTHON_WORDS.get(stripped, stripped)
    try:
        value = load_json(candidate)
    except NotACall:
        return dump_json(text)
    fits = not allowed or not allowed.isdisjoint(JSON_TYPES[type(value)])
    return candidate if fits else dump_json(text)


def dump_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
