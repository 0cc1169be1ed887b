"""Collects what a parser found as events: text, reasoning, calls in, a list of events out.

White space next to a call is layout, not an answer: it is dropped. White space at the end of a text
therefore waits until more text or the end comes.
"""

from __future__ import annotations

import secrets
import string

from fulgurite.serve.http.events import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id() -> str:
    """`call_` and 24 url-safe characters."""
    return f"call_{secrets.token_urlsafe(18)}"


def new_short_call_id() -> str:
    """Nine letters and digits: Mistral's chat templates accept no other ids."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


class Emitter:
    """The events of one reply. `take_events` hands over those that were added since the last time."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_in_call = False
        self.call_name = ""  # of the last call
        self.has_arguments = False  # the current call has emitted some
        self.at_line_start = True  # only spaces since the last line break of the text
        self._events: list[ParserEvent] = []
        self._kind: type[ParserEvent] | None = None  # of the delta that is being collected
        self._pieces: list[str] = []
        self._spaces: list[str] = []  # white space that waits
        self._spaces_kind: type[ParserEvent] = TextDelta
        self._drops_spaces = False  # after a call, and at the beginning of the reasoning

    def take_events(self) -> list[ParserEvent]:
        self._close_delta()
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """A part of the answer."""
        _, newline, line = text.rpartition("\n")
        self.at_line_start = (self.at_line_start or bool(newline)) and not line.strip()
        self._add(TextDelta, self._hold_spaces(text, TextDelta))

    def raw_text(self, text: str) -> None:
        """A part of the answer whose white space stays as it is."""
        self._add(TextDelta, text)

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta, self._hold_spaces(text, ReasoningDelta))

    def _hold_spaces(self, text: str, kind: type[ParserEvent]) -> str:
        """The text that may be emitted now; white space at its end waits."""
        self._spaces_kind = kind
        if self._drops_spaces:
            text = text.lstrip()
        kept = text.rstrip()
        spaces = text[len(kept) :]
        if kept:
            kept = "".join((*self._spaces, kept))
            self._spaces.clear()
            self._drops_spaces = False
        if spaces:
            self._spaces.append(spaces)
        return kept

    def drop_spaces(self) -> None:
        """Drop the white space before and after this point."""
        self._spaces.clear()
        self._drops_spaces = True

    def start_call(self, name: str, id: str) -> None:
        self.drop_spaces()
        self._close_delta()
        self._events.append(ToolCallStart(index=self.num_calls, id=id, name=name))
        self.num_calls += 1
        self.call_name = name
        self.is_in_call, self.has_arguments = True, False

    def arguments(self, text: str) -> None:
        """A piece of the JSON text of the current call's arguments."""
        assert self.is_in_call, "arguments come after the start of a call"
        self.has_arguments = self.has_arguments or bool(text)
        self._add(ToolCallArguments, text)

    def arguments_text(self, text: str) -> None:
        """`arguments`, without the white space around them."""
        self.arguments(self._hold_spaces(text, ToolCallArguments))

    def end_call(self) -> None:
        """The call is complete. A call without arguments has the arguments `{}`."""
        if not self.has_arguments:
            self.arguments("{}")
        self.is_in_call = False
        self.at_line_start = True

    def finish(self) -> None:
        """The output ended: the white space that still waits belongs to the text."""
        if self._spaces_kind is TextDelta:
            self._add(TextDelta, "".join(self._spaces))
        self._spaces.clear()

    def _add(self, kind: type[ParserEvent], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._close_delta()
            self._kind = kind
        self._pieces.append(text)

    def _close_delta(self) -> None:
        """Turn the collected pieces into one event."""
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._kind is ToolCallArguments:
            self._events.append(ToolCallArguments(index=self.num_calls - 1, text=text))
        elif self._kind is TextDelta:
            self._events.append(TextDelta(text))
        elif self._kind is ReasoningDelta:
            self._events.append(ReasoningDelta(text))
        self._kind = None
