"""Token ids in one by one, text out as soon as it is sure.

A token may end in the middle of a character, so text that ends in the replacement character waits
for the next token. A token may end in the middle of a stop string, so text that could become one
waits too. What was handed out is never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.models.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 32  # tokens that may wait; a character has four bytes at most


class Detokenizer:
    """The text of one reply. `stopped_by` is the stop string that ended it, if one did."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self.stopped_by: str | None = None
        self.text = ""  # all that is sure
        self.held = ""  # decoded, and the beginning of a stop string perhaps
        self.ids: list[int] = []
        self.context = 0  # the token to decode from: what stands before one may change its look
        self.settled = 0  # tokens whose text is out
        self.out = 0  # characters of the text from `context` on that are out

    def push(self, token: int) -> str:
        """The text that became sure with this token."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids[self.context :])
        if not text.endswith(UNFINISHED):
            new = text[self.out :]
            self.context, self.settled = self.settled, len(self.ids)
            self.out = len(self.tokenizer.decode(self.ids[self.context :]))
        elif len(self.ids) - self.settled > MAX_PENDING:
            # No text at all: only its last three bytes may still become a character.
            end = len(self.ids) - 3
            new = self.tokenizer.decode(self.ids[self.settled : end])
            self.context, self.settled, self.out = end, end, 0
        else:
            return ""
        return self._release(new)

    def finish(self) -> str:
        """The rest, when no more tokens come: held text, and half characters as they are."""
        if self.stopped_by is not None:
            return ""
        new = self._release(self.tokenizer.decode(self.ids[self.context :])[self.out :])
        rest, self.held = self.held, ""
        self.context = self.settled = len(self.ids)
        self.out = 0
        self.text += rest
        return new + rest

    def _release(self, new: str) -> str:
        """Cut at the first stop string; hold back what may be the beginning of one."""
        candidate = self.held + new
        found = [(candidate.find(stop), stop) for stop in self.stops if stop in candidate]
        if found:
            place, self.stopped_by = min(found, key=lambda pair: (pair[0], len(pair[1])))
            sure, self.held = candidate[:place], ""
        else:
            keep = max((_overlap(candidate, stop) for stop in self.stops), default=0)
            cut = len(candidate) - keep
            sure, self.held = candidate[:cut], candidate[cut:]
        self.text += sure
        return sure


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop string."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
