"""The text of a reply as a parser reads it: pieces in as they arrive, markers and characters out.

Parsers are generators. A `yield` means "wait for more text", so that a parser reads like one for a
complete text. What a parser decides depends on the characters alone, never on how they were cut into
pieces: a text that may be the beginning of a marker waits.

A parser that tries to read a call sets `mark`. If the text turns out to be no call, the parser raises
`NotACall`, goes back to the mark, and the text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

# Text of a call whose name is not known yet is held back. A longer one is no call.
MAX_HELD_CHARS = 65_536
MAX_NAME_CHARS = 256  # of a name, a key or a header


class NotACall(Exception):
    """The text at the cursor does not continue a call."""


class EndOfOutput(Exception):
    """The output ended inside a call."""


class Markers:
    """Strings to look for. None of them is the beginning of another one."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = texts
        self.pattern = re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")
        first_chars = {text[0] for text in texts}
        self.first_char = re.compile("|".join(map(re.escape, first_chars)) if texts else "(?!)")
        self.longest = max(map(len, texts), default=0)

    def partial_length(self, text: str, start: int) -> int:
        """The length of the longest end of text[start:] that is the beginning of a marker."""
        begin = max(start, len(text) - self.longest + 1)
        for found in self.first_char.finditer(text, begin):
            rest = text[found.start() :]
            if any(marker.startswith(rest) for marker in self.texts):
                return len(rest)
        return 0


@cache
def markers_of(*texts: str) -> Markers:
    """The `Markers` of these texts. The formats have a small fixed number of them."""
    return Markers(texts)


class Cursor:
    """A position in the text of a reply. Text before `position` and `mark` is forgotten."""

    def __init__(self) -> None:
        self.buffer = ""
        self.position = 0
        self.mark: int | None = None
        self.ended = False

    def feed(self, text: str) -> None:
        start = self.position if self.mark is None else self.mark
        self.buffer = self.buffer[start:] + text
        self.position -= start
        if self.mark is not None:
            self.mark = 0

    @property
    def held_chars(self) -> int:
        return 0 if self.mark is None else self.position - self.mark

    def wait(self) -> Steps[None]:
        """Wait for more text; raise if none comes."""
        if self.ended:
            raise EndOfOutput
        if self.held_chars > MAX_HELD_CHARS:
            raise NotACall
        yield

    def take(self, end: int) -> str:
        """The text up to index `end` of the buffer; the cursor moves there."""
        text = self.buffer[self.position : end]
        self.position = end
        return text

    def peek(self) -> Steps[str]:
        """The next character."""
        while self.position >= len(self.buffer):
            yield from self.wait()
        return self.buffer[self.position]

    def take_chars(self, count: int) -> Steps[str]:
        """The next `count` characters."""
        while len(self.buffer) - self.position < count:
            yield from self.wait()
        return self.take(self.position + count)

    def take_while(self, chars: re.Pattern[str]) -> Steps[str]:
        """The longest text that matches `chars`, a pattern like `[ab]*`."""
        pieces = []
        while True:
            found = chars.match(self.buffer, self.position)
            assert found is not None, f"{chars.pattern!r} must match the empty text"
            pieces.append(self.take(found.end()))
            if self.position < len(self.buffer):
                return "".join(pieces)
            yield from self.wait()

    def match(self, markers: Markers) -> Steps[str | None]:
        """Move over the marker that starts here. None: none starts here."""
        while True:
            found = markers.pattern.match(self.buffer, self.position)
            if found is not None:
                self.position = found.end()
                return found.group()
            rest = self.buffer[self.position : self.position + markers.longest]
            if not any(marker.startswith(rest) for marker in markers.texts):
                return None
            yield from self.wait()

    def copy_until(
        self, markers: Markers, emit: Emit, drops_partial: bool = False
    ) -> Steps[str | None]:
        """Emit the text up to the first marker and move over the marker. None: the output ended.

        `drops_partial`: an output that ends inside a marker has not meant it as text.
        """
        while True:
            found = markers.pattern.search(self.buffer, self.position)
            if found is not None:
                if found.start() > self.position:
                    emit(self.take(found.start()))
                self.position = found.end()
                return found.group()
            end = len(self.buffer)
            if drops_partial or not self.ended:
                end -= markers.partial_length(self.buffer, self.position)
            if end > self.position:
                emit(self.take(end))
            if self.ended:
                return None
            yield

    def limit_chars(self, emit: Emit) -> Emit:
        """`emit` for a short text: raises where the text exceeds the limit."""
        num_chars = 0

        def emit_within_limit(piece: str) -> None:
            nonlocal num_chars
            num_chars += len(piece)
            if num_chars > MAX_NAME_CHARS:
                self.position -= num_chars - MAX_NAME_CHARS
                raise NotACall
            emit(piece)

        return emit_within_limit

    def take_until(
        self, ends: tuple[str, ...], forbidden: tuple[str, ...]
    ) -> Steps[tuple[str, str]]:
        """A short text and the one of `ends` after it. `forbidden` characters may not be in it."""
        pieces: list[str] = []
        emit = self.limit_chars(pieces.append)
        marker = yield from self.copy_until(markers_of(*ends, *forbidden), emit)
        if marker is None:
            raise EndOfOutput
        if marker in forbidden:
            raise NotACall
        return "".join(pieces), marker
