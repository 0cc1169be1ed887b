"""Reasoning before the answer: <think>…</think> and its relatives; a cursor in, reasoning out.

Reasoning stands at the beginning of a reply only. Later markers are text. Many chat templates end the
prompt with the opening marker: then the reply starts inside the reasoning (see `starts_in_reasoning`).
If the closing marker never comes, everything is reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.serve.http.parsers.cursor import (
    MAX_HELD_CHARS,
    Cursor,
    EndOfOutput,
    NotACall,
    Steps,
    markers_of,
)
from fulgurite.serve.http.parsers.emitter import Emitter
from fulgurite.serve.http.parsers.harmony import HARMONY_MARKERS
from fulgurite.serve.http.parsers.syntax.json_text import SPACES


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning.

    prompt_ends   a prompt that ends so has opened the reasoning; default: `opens`
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    prompt_ends: tuple[str, ...] = ()

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """Texts that must survive detokenization, also where they are special tokens."""
        return HARMONY_MARKERS if self.name == "harmony" else (*self.opens, *self.closes)


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    format.name: format
    for format in (
        ReasoningFormat("think", ("<think>",), ("</think>",)),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),
        ReasoningFormat("seed", ("<seed:think>",), ("</seed:think>",)),
        ReasoningFormat("cohere", ("<|START_THINKING|>",), ("<|END_THINKING|>",)),
        ReasoningFormat(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
        ReasoningFormat("harmony", (), (), prompt_ends=("<|channel|>analysis<|message|>",)),
    )
}


def starts_in_reasoning(prompt: str, format: ReasoningFormat | None) -> bool:
    """Whether a reply to this rendered prompt starts inside the reasoning."""
    if format is None:
        return False
    return prompt.rstrip().endswith(format.prompt_ends or format.opens)


def read_reasoning(
    cursor: Cursor,
    emitter: Emitter,
    format: ReasoningFormat,
    is_open: bool,
    parse_reasoning: bool,
    call_markers: tuple[str, ...],
) -> Steps[None]:
    """Read the reasoning at the beginning of a reply, if there is any.

    `call_markers` are special tokens that open a call: they end the reasoning, too. With
    `parse_reasoning=False` the reasoning and its markers are text.
    """
    spaces, marker = yield from _read_opening(cursor, format)
    if marker is None and not is_open:
        emitter.text(spaces)
        return
    emit = emitter.reasoning if parse_reasoning else emitter.raw_text
    if parse_reasoning:
        emitter.drop_spaces()
    else:
        emit(spaces + (marker or ""))
    end = yield from cursor.copy_until(markers_of(*format.closes, *call_markers), emit)
    if end in call_markers:
        cursor.position -= len(end)
    elif end is not None and not parse_reasoning:
        emit(end)
    if parse_reasoning:
        emitter.drop_spaces()


def _read_opening(cursor: Cursor, format: ReasoningFormat) -> Steps[tuple[str, str | None]]:
    """White space and the opening marker after it, if that is there. Else the cursor stays."""
    cursor.mark = cursor.position
    try:
        spaces = yield from cursor.take_while(SPACES)
        if cursor.held_chars > MAX_HELD_CHARS:
            raise NotACall
        marker = yield from cursor.match(markers_of(*format.opens))
    except (EndOfOutput, NotACall):
        spaces, marker = "", None
        cursor.position = cursor.mark
    cursor.mark = None
    return spaces, marker
