"""Calls whose arguments are JSON text, which is streamed as the model wrote it.

JsonCalls    {"name": "get_weather", "arguments": {"city": "Paris"}}
NamedCalls   get_weather[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fulgurite.serve.http.parsers.cursor import Emit, NotACall, Steps
from fulgurite.serve.http.parsers.syntax.calls import BRACKETS_TAIL, NOT_IN_NAMES, CallReader
from fulgurite.serve.http.parsers.syntax.json_text import (
    SPACES,
    copy_value,
    load_json,
    read_string,
    replace_surrogates,
)
from fulgurite.serve.http.parsers.syntax.written import (
    Format,
    WrittenTool,
    constant,
    escape_name,
    json_value,
    regex,
    sequence,
)


@dataclass(frozen=True)
class JsonCalls:
    """A call is one JSON object. Objects may stand in a list.

    needs_arguments   an object without arguments is no call; for formats without markers
    wrapper_keys      keys whose object holds the call: {"function": {"name": …}}
    id_keys           used if it comes before the name
    other_keys        keys that a call may have and that mean nothing here
    name_first        the name is the first member, as a grammar writes it
    """

    name_keys: tuple[str, ...] = ("name", "function", "tool_name")
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    id_keys: tuple[str, ...] = ("id", "tool_call_id")
    wrapper_keys: tuple[str, ...] = ("function",)
    other_keys: tuple[str, ...] = ("type", "index")
    needs_arguments: bool = False
    name_first: bool = False
    repeats: bool = True
    tail: re.Pattern[str] = BRACKETS_TAIL
    markers: tuple[str, ...] = ()

    def read_call(self, reader: CallReader) -> Steps[None]:
        if (yield from reader.cursor.peek()) != "{":
            raise NotACall
        yield from _ObjectReader(self, reader).read()

    def write_call(self, name: str, arguments: Format) -> Format:
        keys = regex('"name|"tool_call_id": "[0-9]{1,4}", "tool_name' if self.id_keys else '"name')
        return sequence(constant("{"), keys, constant(f'": "{name}"'), arguments)

    def write_arguments(self, tool: WrittenTool) -> Format:
        key = regex(', "(arguments|parameters)": ')
        return sequence(key, json_value(tool.schema), constant("}"))

    def bare_pattern(self, name: str) -> str:
        """Where a call without a marker begins, up to its name."""
        return rf'\{{\s*"({"|".join(self.name_keys)})"\s*:\s*"{escape_name(name)}"'


@dataclass
class _ObjectReader:
    """One object: its members in any order, arguments before the name are held back."""

    syntax: JsonCalls
    reader: CallReader
    depth: int = 0
    name: str | None = None
    id: str | None = None
    held: list[str] | None = None  # arguments that came before the name
    has_arguments: bool = False

    def read(self) -> Steps[None]:
        cursor = self.reader.cursor
        while True:
            char = yield from self.reader.skip_spaces()
            if char == '"':
                yield from self._read_member()
                continue
            if char not in "{},":
                raise NotACall
            if char == "{" and self.depth > 0:
                raise NotACall
            cursor.position += 1
            self.depth += {"{": 1, "}": -1, ",": 0}[char]
            if self.depth == 0:
                break
        if not self.reader.has_started:
            raise NotACall

    def _read_member(self) -> Steps[None]:
        syntax, reader = self.syntax, self.reader
        key = yield from read_string(reader.cursor)
        if (yield from reader.skip_spaces()) != ":":
            raise NotACall
        reader.cursor.position += 1
        char = yield from reader.skip_spaces()
        if key in syntax.wrapper_keys and char == "{":
            reader.cursor.position += 1
            self.depth += 1
        elif syntax.name_first and self.name is None and key not in syntax.name_keys:
            raise NotACall
        elif key in syntax.name_keys and self.name is None:
            self.name = yield from read_string(reader.cursor)
            self._start_if_known()
        elif key in syntax.argument_keys and not self.has_arguments:
            self.has_arguments = True
            yield from self._read_arguments(char)
        elif key in syntax.id_keys and char == '"':
            self.id = yield from read_string(reader.cursor)
        elif reader.has_started or key in (*syntax.id_keys, *syntax.other_keys):
            yield from copy_value(reader.cursor, _ignore, reader.stops, not reader.has_started)
        else:
            raise NotACall

    def _start_if_known(self) -> None:
        needs_more = self.syntax.needs_arguments and not self.has_arguments
        if self.name is None or needs_more or self.reader.has_started:
            return
        self.reader.start(self.name, self.id)
        for piece in self.held or ():
            self.reader.arguments(piece)

    def _read_arguments(self, first_char: str) -> Steps[None]:
        """Stream an object; decode what is written differently: a string of JSON, null."""
        self._start_if_known()
        cursor, stops = self.reader.cursor, self.reader.stops
        emit: Emit = self.reader.arguments
        if not self.reader.has_started:
            self.held = []
            emit = self.held.append
        is_strict = not self.reader.has_started
        if first_char in "{[":
            yield from copy_value(cursor, emit, stops, is_strict)
            return
        pieces: list[str] = []
        yield from copy_value(cursor, pieces.append, stops, is_strict)
        emit(_decode_arguments("".join(pieces)))


def _decode_arguments(text: str) -> str:
    """The JSON text of arguments that are no object."""
    try:
        value = load_json(text)
    except NotACall:
        return text
    if isinstance(value, str):
        return replace_surrogates(value)
    return "" if value is None else text


def _ignore(piece: str) -> None:
    """A value that means nothing here."""


@dataclass(frozen=True)
class NamedCalls:
    """A call is a header with the name, then a JSON object.

    header_end   what ends the header
    header       matches the header; groups `name` and perhaps `id`
    between      skipped between the header and the arguments
    written      a call: {name}, {number} and {arguments} stand for what their names say
    """

    header_end: str
    header: re.Pattern[str]
    written: str
    between: re.Pattern[str] = SPACES
    repeats: bool = False
    tail: re.Pattern[str] = SPACES
    markers: tuple[str, ...] = ()

    def read_call(self, reader: CallReader) -> Steps[None]:
        cursor = reader.cursor
        forbidden = tuple(char for char in NOT_IN_NAMES if char != self.header_end)
        text, _ = yield from cursor.take_until((self.header_end,), forbidden)
        found = self.header.fullmatch(text)
        if found is None:
            raise NotACall
        groups = found.groupdict()
        reader.start(groups["name"], groups.get("id"))
        yield from cursor.take_while(self.between)
        if (yield from cursor.peek()) == "{":
            yield from copy_value(cursor, reader.arguments, reader.stops)

    def write_arguments(self, tool: WrittenTool) -> Format:
        return json_value(tool.schema)

    def write_call(self, name: str, arguments: Format) -> Format:
        values = {
            "{name}": constant(name),
            "{number}": regex("[0-9]{1,4}"),
            "{arguments}": arguments,
        }
        parts = re.split(r"(\{name\}|\{number\}|\{arguments\})", self.written)
        return sequence(*(values.get(part) or constant(part) for part in parts if part))
