"""Harmony, the format of gpt-oss: messages with a channel in, reasoning, text and calls out.

    <|channel|>analysis<|message|>…<|end|>                            reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>          text
    <|start|>assistant<|channel|>commentary to=functions.get_weather
        <|constrain|>json<|message|>{"city": "Paris"}<|call|>         a call

A message on the commentary channel without a recipient is text. Markers are special tokens, so they
end a message wherever they stand. A header that the output ends in holds nothing.
"""

from __future__ import annotations

import re

from fulgurite.serve.http.parsers.cursor import Cursor, Emit, Steps, markers_of
from fulgurite.serve.http.parsers.emitter import Emitter, new_call_id
from fulgurite.serve.http.parsers.syntax.calls import NAME

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
HARMONY_MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
MAX_HEADER_CHARS = 1024
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def parse_harmony(
    cursor: Cursor, emitter: Emitter, starts_in_reasoning: bool, parse_reasoning: bool
) -> Steps[None]:
    """Parse a whole reply. With `parse_reasoning=False` the reasoning is text, too."""
    emit: Emit = emitter.reasoning if starts_in_reasoning and parse_reasoning else emitter.text
    body_ends = markers_of(START, CHANNEL, *ENDS)
    while True:
        marker = yield from cursor.copy_until(body_ends, emit, emitter.is_in_call)
        if marker is None:
            return
        if emitter.is_in_call:
            emitter.end_call()
        if marker in ENDS:
            emitter.drop_spaces()
            emit = emitter.text
            continue
        header = yield from _read_header(cursor, marker)
        if header is None:
            return
        emit = _open_message(emitter, header, parse_reasoning)


def _read_header(cursor: Cursor, marker: str) -> Steps[str | None]:
    """The header of a message, from its first marker on. None: the output ended in it."""
    pieces = [marker]
    num_chars = 0

    def emit(piece: str) -> None:
        nonlocal num_chars
        if num_chars < MAX_HEADER_CHARS:
            pieces.append(piece[: MAX_HEADER_CHARS - num_chars])
        num_chars += len(piece)

    end = yield from cursor.copy_until(markers_of(MESSAGE), emit)
    return None if end is None else "".join(pieces)


def _open_message(emitter: Emitter, header: str, parse_reasoning: bool) -> Emit:
    """Where the text of the message goes."""
    emitter.drop_spaces()
    recipient = RECIPIENT.search(header)
    if recipient is not None:
        name = recipient.group(1).removeprefix("functions.")
        if NAME.fullmatch(name) and name != "assistant":
            emitter.start_call(name, new_call_id())
            return emitter.arguments_text
    channel = CHANNEL_NAME.search(header)
    is_reasoning = channel is not None and channel.group(1) == "analysis"
    return emitter.reasoning if is_reasoning and parse_reasoning else emitter.text
