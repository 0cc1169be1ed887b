"""JSON inside a reply: a cursor at the beginning of a value in, the value's text out, piece by piece.

The text of a value is copied as the model wrote it. Only its extent is found: brackets are counted,
strings are skipped. So a value that is not quite JSON is copied, too, and ends where its brackets do.
"""

from __future__ import annotations

import json
import re
from functools import cache

from fulgurite.serve.http.parsers.cursor import (
    Cursor,
    Emit,
    Markers,
    NotACall,
    Steps,
    markers_of,
)

SPACES = re.compile(r"\s*")
# Complete characters and escapes of a string. A backslash at the end of the text waits.
STRING_CHARS = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
SCALAR_CHARS = re.compile(r"[^\s,;\]}<\"]*")
NO_MARKERS = markers_of()
# What no JSON value has outside of strings.
JUNK = r"""[^\s\d"{}\[\],:.+\-truefalsnE]"""


@cache
def _structure(stops: Markers, is_strict: bool) -> re.Pattern[str]:
    """Where something happens outside of strings."""
    parts = ['["{}\\[\\]]', *map(re.escape, stops.texts), *([JUNK] if is_strict else [])]
    return re.compile("|".join(parts))


def copy_value(
    cursor: Cursor, emit: Emit, stops: Markers = NO_MARKERS, is_strict: bool = False
) -> Steps[None]:
    """Copy one JSON value.

    A stop marker outside of a string breaks an incomplete value off, with `NotACall`. `is_strict`: so
    does a character that no JSON has outside of strings.
    """
    first = yield from cursor.peek()
    if first in "{[":
        yield from _copy_brackets(cursor, emit, stops, is_strict)
    elif first == '"':
        emit(cursor.take(cursor.position + 1))
        yield from _copy_string_rest(cursor, emit)
    else:
        text = yield from cursor.take_while(SCALAR_CHARS)
        if not text:
            raise NotACall
        emit(text)


def _copy_brackets(cursor: Cursor, emit: Emit, stops: Markers, is_strict: bool) -> Steps[None]:
    """Copy an object or a list, up to the bracket that closes it."""
    pattern, depth = _structure(stops, is_strict), 0
    while True:
        found = pattern.search(cursor.buffer, cursor.position)
        if found is None:
            held = stops.partial_length(cursor.buffer, cursor.position)
            emit(cursor.take(len(cursor.buffer) - held))
            yield from cursor.wait()
            continue
        text = found.group()
        if text not in ('"', "{", "[", "}", "]"):
            emit(cursor.take(found.start()))
            raise NotACall
        emit(cursor.take(found.end()))
        if text == '"':
            yield from _copy_string_rest(cursor, emit)
        else:
            depth += 1 if text in "{[" else -1
            if depth == 0:
                return


def _copy_string_rest(cursor: Cursor, emit: Emit) -> Steps[None]:
    """Copy a string from after its first quote to its last quote."""
    while True:
        found = STRING_CHARS.match(cursor.buffer, cursor.position)
        assert found is not None, "the pattern matches the empty text"
        emit(cursor.take(found.end()))
        if cursor.buffer.startswith('"', cursor.position):
            emit(cursor.take(cursor.position + 1))
            return
        yield from cursor.wait()


def read_string(cursor: Cursor) -> Steps[str]:
    """A short string: a key or a name."""
    if (yield from cursor.peek()) != '"':
        raise NotACall
    pieces: list[str] = []
    yield from copy_value(cursor, cursor.limit_chars(pieces.append))
    value = load_json("".join(pieces))
    if not isinstance(value, str):
        raise NotACall
    return value


def load_json(text: str) -> object:
    """The value of a JSON text. Raises `NotACall` for what is no JSON."""
    try:
        value: object = json.loads(text, strict=False, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise NotACall from None
    return value


def _reject_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which no UTF-8 text can hold."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def replace_surrogates(text: str) -> str:
    """The text with replacement characters for lone surrogates."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
