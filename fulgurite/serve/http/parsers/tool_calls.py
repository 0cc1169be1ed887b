"""Finds tool calls in a reply: a cursor and a format in, text and calls out.

    text ─ marker ─▶ call, call, … ─ closing marker ─▶ text ─ …

Text is searched for the format's markers. After a marker, the syntaxes of the format try to read a
call. If none can, the marker is text.
"""

from __future__ import annotations

import re

from fulgurite.serve.http.parsers.cursor import (
    Cursor,
    EndOfOutput,
    NotACall,
    Steps,
    markers_of,
)
from fulgurite.serve.http.parsers.emitter import Emitter
from fulgurite.serve.http.parsers.syntax.calls import CallReader, CallSyntax, Schemas
from fulgurite.serve.http.parsers.syntax.json_text import SPACES
from fulgurite.serve.http.parsers.tool_formats import ToolFormat

SEPARATORS = re.compile(r"[\s,;]*")  # between two calls


def parse_tool_calls(
    cursor: Cursor, emitter: Emitter, format: ToolFormat, tools: Schemas
) -> Steps[None]:
    """Parse the rest of a reply."""
    markers = markers_of(*format.opens, *format.bare_opens, *format.ignored)
    while True:
        marker = yield from cursor.copy_until(markers, emitter.text)
        if marker is None:
            return
        if marker in format.ignored:
            emitter.drop_spaces()
        elif marker in format.bare_opens and format.at_line_start and not emitter.at_line_start:
            emitter.text(marker)
        else:
            yield from _read_calls(
                _build_reader(cursor, emitter, format, tools, marker), format, marker
            )


def _build_reader(
    cursor: Cursor, emitter: Emitter, format: ToolFormat, tools: Schemas, marker: str
) -> CallReader:
    stops = (*format.opens, *format.closes, *format.ignored)
    return CallReader(
        cursor=cursor,
        emitter=emitter,
        tools=tools,
        # A bracket begins a list, too, so a marker with one can't end a call.
        stops=markers_of(*(stop for stop in stops if stop[0] not in "[{")),
        needs_known_name=marker in format.bare_opens,
        make_id=format.make_id,
    )


def _read_calls(reader: CallReader, format: ToolFormat, marker: str) -> Steps[None]:
    """Read the calls after a marker, up to the closing marker or the first text that is no call."""
    cursor = reader.cursor
    if marker in format.bare_opens:
        cursor.position -= len(marker)
        marker_chars = 0
    else:
        marker_chars = len(marker)
    syntax = yield from _read_first_call(reader, format.syntaxes, marker_chars)
    if syntax is None:
        _give_up(reader, len(marker))
        return
    while syntax is not None:
        try:
            yield from cursor.take_while(syntax.tail)
            closed = yield from cursor.match(markers_of(*format.closes))
        except EndOfOutput:
            cursor.position = len(cursor.buffer)  # a part of the closing marker
            return
        if closed is not None or not syntax.repeats:
            return
        cursor.mark = cursor.position
        syntax = yield from _read_next_call(reader, syntax)
    _give_up(reader, 0)


def _read_first_call(
    reader: CallReader, syntaxes: tuple[CallSyntax, ...], marker_chars: int
) -> Steps[CallSyntax | None]:
    """The syntax that could read a call here, if one could. The mark is at the marker."""
    cursor = reader.cursor
    cursor.mark = cursor.position - marker_chars
    for syntax in syntaxes:
        cursor.position = cursor.mark + marker_chars
        if (yield from _try_call(reader, syntax, is_first=True)):
            return syntax
    return None


def _read_next_call(reader: CallReader, syntax: CallSyntax) -> Steps[CallSyntax | None]:
    return syntax if (yield from _try_call(reader, syntax, is_first=False)) else None


def _try_call(reader: CallReader, syntax: CallSyntax, is_first: bool) -> Steps[bool]:
    """Read one call. False: there is none."""
    try:
        if is_first:
            if (yield from reader.skip_spaces()) == "[":
                reader.cursor.position += 1
                yield from reader.cursor.take_while(SPACES)
        else:
            yield from reader.cursor.take_while(SEPARATORS)
        yield from syntax.read_call(reader)
    except NotACall:
        if not reader.has_started:
            return False
    except EndOfOutput:
        if not reader.has_started:
            return False
        reader.cursor.position = len(reader.cursor.buffer)
        reader.emitter.is_in_call = False
        return True
    reader.emitter.end_call()
    return True


def _give_up(reader: CallReader, marker_chars: int) -> None:
    """Go back to the mark: the marker is text, what follows it is searched again."""
    cursor, emitter = reader.cursor, reader.emitter
    assert cursor.mark is not None, "the mark stays until a call starts"
    cursor.position, cursor.mark = cursor.mark, None
    emitter.text(cursor.take(cursor.position + marker_chars))
