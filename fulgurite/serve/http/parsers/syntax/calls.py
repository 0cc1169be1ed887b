"""What the syntaxes of tool calls share: the reply and the tools in, calls out.

A syntax reads one call at the cursor. It may raise `NotACall` at any place. Before `start`, the text
was no call. After `start`, the call ends there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fulgurite.serve.http.parsers.cursor import MAX_HELD_CHARS, Cursor, Markers, NotACall, Steps
from fulgurite.serve.http.parsers.emitter import Emitter
from fulgurite.serve.http.parsers.syntax.json_text import SPACES
from fulgurite.serve.http.parsers.syntax.written import Format, WrittenTool

NAME = re.compile(r"[\w.\-/:$@]{1,256}")
NOT_IN_NAMES = tuple(" \t\r\n{}\"'`")  # ends a header early that is none

Schemas = Mapping[str, Mapping[str, object]]  # name of a tool → JSON Schema of its arguments


@dataclass
class CallReader:
    """Where calls are read from, and where they go.

    stops             markers that end a call wherever they stand, outside of strings
    needs_known_name  only a name of `tools` makes a call; for formats without markers
    make_id           the id of a call whose format carries none
    """

    cursor: Cursor
    emitter: Emitter
    tools: Schemas
    stops: Markers
    needs_known_name: bool
    make_id: Callable[[], str]

    def start(self, name: str, id: str | None = None) -> None:
        """The name is known: from here on, the text is a call."""
        is_unknown = self.needs_known_name and self.tools and name not in self.tools
        is_too_long = self.cursor.held_chars > MAX_HELD_CHARS
        if is_unknown or is_too_long or not NAME.fullmatch(name):
            raise NotACall
        self.cursor.mark = None
        self.emitter.start_call(name, id or self.make_id())

    @property
    def has_started(self) -> bool:
        return self.emitter.is_in_call

    def arguments(self, text: str) -> None:
        self.emitter.arguments(text)

    def skip_spaces(self) -> Steps[str]:
        """Skip white space. Returns the next character."""
        yield from self.cursor.take_while(SPACES)
        return (yield from self.cursor.peek())


class CallSyntax(Protocol):
    """How one call is written.

    repeats   whether another call may follow without a marker in between
    tail      characters that may follow a call and mean nothing
    """

    @property
    def repeats(self) -> bool: ...

    @property
    def tail(self) -> re.Pattern[str]: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings of the syntax that may be special tokens."""
        ...

    def read_call(self, reader: CallReader) -> Steps[None]: ...

    def write_arguments(self, tool: WrittenTool) -> Format:
        """The grammar of a call's arguments, and of what ends the call."""
        ...

    def write_call(self, name: str, arguments: Format) -> Format:
        """The grammar of a call; `read_call` reads what it allows."""
        ...


BRACKETS_TAIL = re.compile(r"[\s\]}]*")  # the end of a list, and a bracket too many
