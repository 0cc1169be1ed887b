"""Calls written as Python: get_weather(city="Paris", days=[1, 2]). Arguments become JSON.

Python literals are translated while they arrive: quotes and escapes of strings, True, False, None,
tuples, commas before a closing bracket. A word that is no literal becomes a string.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fulgurite.serve.http.parsers.cursor import EndOfOutput, Steps, markers_of
from fulgurite.serve.http.parsers.syntax.calls import NOT_IN_NAMES, CallReader
from fulgurite.serve.http.parsers.syntax.tagged_calls import PYTHON_WORDS, dump_json
from fulgurite.serve.http.parsers.syntax.written import (
    Format,
    WrittenTool,
    constant,
    either,
    escape_name,
    json_value,
    regex,
    sequence,
)

TAIL = re.compile(r"[\s\])]*")
WORD_CHARS = re.compile(r"[^\s,:()\[\]{}\"'=]*")
IDENTIFIER = re.compile(r"[^\W\d]\w*")
JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
JSON_WORDS = {**PYTHON_WORDS, "true": "true", "false": "false", "null": "null"}
CLOSERS = {"(": "]", "[": "]", "{": "}"}
SIMPLE_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class PythonicCalls:
    """A call is `name(key=value, …)`. Positional values take the keys of the tool's schema in order."""

    repeats: bool = True
    tail: re.Pattern[str] = TAIL
    markers: tuple[str, ...] = ()

    def read_call(self, reader: CallReader) -> Steps[None]:
        cursor = reader.cursor
        name, _ = yield from cursor.take_until(("(",), (*NOT_IN_NAMES, "[", "]", ")", "<", ","))
        reader.start(name)
        num_arguments = 0
        while True:
            char = yield from reader.skip_spaces()
            if char == ",":
                cursor.position += 1
                continue
            if char in ")]}<":
                break
            yield from self._read_argument(reader, num_arguments)
            num_arguments += 1
        if char == ")":
            cursor.position += 1
        if num_arguments:
            reader.arguments("}")

    def _read_argument(self, reader: CallReader, index: int) -> Steps[None]:
        cursor = reader.cursor
        word = yield from cursor.take_while(WORD_CHARS)
        char = yield from reader.skip_spaces()
        if char == "=":
            cursor.position += 1
            key, word = word, ""
            yield from reader.skip_spaces()
        else:
            key = _positional_key(reader, index)
        reader.arguments(f"{', ' if index else '{'}{dump_json(key)}: ")
        yield from _LiteralReader(reader).read(word)

    def write_call(self, name: str, arguments: Format) -> Format:
        return sequence(constant(f"{name}("), arguments)

    def write_arguments(self, tool: WrittenTool) -> Format:
        elements = []
        for one in tool.properties:
            value = sequence(constant(f"{one.name}="), _write_literal(one.schema))
            elements.append({"content": value, "required": one.is_required})
        arguments = {"type": "list", "elements": elements, "separator": ", "}
        return sequence(arguments, constant(")"))

    def bare_pattern(self, name: str) -> str:
        """Where a call without a marker begins, up to its bracket."""
        return rf"\[\s*{escape_name(name)}\("


def _write_literal(schema: Mapping[str, object]) -> Format:
    """JSON, which is read as Python; words of Python as well where that is the whole value."""
    words = {"boolean": "True|False", "null": "None"}.get(str(schema.get("type")))
    value = json_value(schema)
    return value if words is None else either(value, regex(words))


def _positional_key(reader: CallReader, index: int) -> str:
    properties = reader.tools.get(reader.emitter.call_name, {}).get("properties")
    keys = list(properties) if isinstance(properties, Mapping) else []
    return str(keys[index]) if index < len(keys) else f"arg{index}"


class _LiteralReader:
    """Translates one literal, up to the comma or bracket that follows it."""

    def __init__(self, reader: CallReader) -> None:
        self.reader = reader
        self.closers: list[str] = []
        self.has_comma = False  # a comma that waits for the next element
        self.is_empty = True

    def emit(self, text: str) -> None:
        self.reader.arguments(", " + text if self.has_comma else text)
        self.has_comma = self.is_empty = False

    def read(self, word: str) -> Steps[None]:
        cursor = self.reader.cursor
        if word:
            self.emit(convert_word(word))
        while True:
            char = yield from self.reader.skip_spaces()
            if char in ",)]}" and not self.closers:
                break
            if char in "\"'":
                yield from self._read_string(char)
            elif char in "([{,:=)]}":
                cursor.position += 1
                self._translate(char)
            else:
                self.emit(convert_word((yield from cursor.take_while(WORD_CHARS))))
        if self.is_empty:
            self.emit("null")

    def _translate(self, char: str) -> None:
        if char in CLOSERS:
            self.emit("[" if char == "(" else char)
            self.closers.append(CLOSERS[char])
        elif char == ",":
            self.has_comma = True
        elif char in ":=":
            self.emit(": " if char == ":" else "=")
        else:
            self.has_comma = False
            self.emit(self.closers.pop())

    def _read_string(self, quote: str) -> Steps[None]:
        cursor = self.reader.cursor
        end = quote * 3
        if (yield from cursor.match(markers_of(end))) is None:
            cursor.position += 1
            end = quote
        self.emit('"')
        while True:
            marker = yield from cursor.copy_until(
                markers_of(end, "\\"),
                lambda piece: self.emit(dump_json(piece)[1:-1]),
                drops_partial=True,
            )
            if marker is None:
                raise EndOfOutput
            if marker == end:
                break
            self.emit((yield from self._read_escape()))
        self.emit('"')

    def _read_escape(self) -> Steps[str]:
        """The JSON text of an escape, after its backslash."""
        cursor = self.reader.cursor
        char = yield from cursor.take_chars(1)
        if char in SIMPLE_ESCAPES:
            return dump_json(SIMPLE_ESCAPES[char])[1:-1]
        digits = ""
        while len(digits) < NUM_HEX_DIGITS.get(char, 0):
            digit = yield from cursor.peek()
            if digit not in "0123456789abcdefABCDEF":
                break
            digits += digit
            cursor.position += 1
        if not digits or len(digits) < NUM_HEX_DIGITS[char] or int(digits, 16) > 0x10FFFF:
            return dump_json("\\" + char + digits)[1:-1]
        if len(digits) <= 4:
            return f"\\u{digits:0>4}"
        return dump_json(chr(int(digits, 16)))[1:-1]


def convert_word(word: str) -> str:
    """The JSON text of a Python word: a number, a constant, or else a string."""
    if word in JSON_WORDS:
        return JSON_WORDS[word]
    if JSON_NUMBER.fullmatch(word):
        return word
    number = _parse_number(word)
    return dump_json(word) if number is None else repr(number)


def _parse_number(word: str) -> int | float | None:
    """A number as Python writes it: 1_000, 0x10, .5. None: no number that JSON has."""
    try:
        return int(word, 0)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
