"""Streaming detokenization: token ids in, final text out.

A token may end inside a character. An incomplete character waits for the next tokens. A token may
also end inside a stop string, so text that could become one waits, too. Emitted text never changes,
and the whole text depends on the tokens alone, not on how many were pushed at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from fulgurite.models.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING_TOKENS = 32  # a character has at most four bytes, so at most four tokens
TOKENS_TOGETHER = 24  # decoded at once, fewer than may be pending
MAX_INCOMPLETE_BYTES = 3  # of a character
CONTEXT_TOKENS = 5  # earlier tokens that may change how a token looks


class Detokenizer:
    """The text of one reply. `stopped_by` is the stop string that ended it, if one did.

    The text of the first `min_tokens` tokens is not searched for stop strings.
    `skip_special_tokens`: special tokens have no text. `prompt_ids`: of a prompt that the reply goes on
    from, in the same text. Without it, SentencePiece drops a space at the beginning.

    Only a window at the end of `visible_ids` is decoded again. It starts between two characters and,
    because a decoder may drop the space in front of a text, has text before the pending tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.min_tokens = min_tokens
        self.stop_strings = tuple(stop_strings)
        self.stopped_by: str | None = None
        self.text = ""  # all emitted text
        self.pending_text = ""  # decoded, but perhaps the beginning of a stop string
        self.token_ids: list[int] = []
        self.visible_ids: list[int] = []  # without the special tokens that have no text
        self.window_start = 0
        self.pending_start = 0  # after the last token that ended with a character
        self.prompt_ids = self._choose_context(prompt_ids)
        self.window_text = self._decode_from(0)  # the window's text that is final

    def _choose_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, from the start of a character; none if it ends inside one."""
        most = CONTEXT_TOKENS + MAX_INCOMPLETE_BYTES
        backwards = (token for token in reversed(prompt_ids) if token not in self.hidden_ids)
        visible = list(islice(backwards, most))[::-1]
        for size in range(CONTEXT_TOKENS, most + 1):
            if REPLACEMENT_CHARACTER not in self._decode(visible[-size:]):
                return visible[-size:]
        return []

    def _decode_from(self, start: int) -> str:
        """The text of the tokens from `start` on; from 0 on, after the prompt's."""
        tokens = self.visible_ids[start:]
        return self._decode(tokens if start else [*self.prompt_ids, *tokens])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _decode_window(self) -> str:
        """The window's text, of which `window_text` is the beginning."""
        text = self._decode_from(self.window_start)
        if text.startswith(self.window_text):
            return text
        # With byte fallback, an invalid byte changes all bytes of its run, emitted ones included.
        return self.window_text + self._decode(self.visible_ids[self.pending_start :])

    def push(self, token: int) -> str:
        """Add a token and return the text that became final."""
        self.token_ids.append(token)
        if token in self.hidden_ids:
            return ""
        self.visible_ids.append(token)
        return self._emit(self._advance(self._decode_window()))

    def push_all(self, tokens: Sequence[int]) -> str:
        """Add tokens up to the one that completes a stop string; return the text that became final.

        `token_ids` has those that were added.
        """
        text = ""
        for start in range(0, len(tokens), TOKENS_TOGETHER):
            part = tokens[start : start + TOKENS_TOGETHER]
            count = 0
            if not self.stop_strings and len(part) > 1:
                count, new = self._push_together(part)
                text += new
            for token in part[count:]:
                text += self.push(token)
                if self.stopped_by is not None:
                    return text
        return text

    def _push_together(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Add the first tokens, up to one that ends a character, as one; their number and new text.

        What is final depends on each token's end, unless no character is incomplete in between. If a
        decoder joins bytes, text that ends with a character is the beginning of any longer text.
        """
        num_visible = len(self.visible_ids)
        num_pending = num_visible - self.pending_start + len(tokens)
        joins_bytes = self.tokenizer.joins_bytes and num_pending <= MAX_PENDING_TOKENS
        least = max(len(tokens) - MAX_INCOMPLETE_BYTES, 2) if joins_bytes else len(tokens)
        for count in range(len(tokens), least - 1, -1):
            part = tokens[:count]
            self.visible_ids += (token for token in part if token not in self.hidden_ids)
            text = self._decode_from(self.window_start)
            incomplete = text[-1:] if joins_bytes else text
            if REPLACEMENT_CHARACTER not in incomplete and text.startswith(self.window_text):
                self.token_ids += part
                return count, self._emit(self._advance(text))
            del self.visible_ids[num_visible:]
        return 0, ""

    def _advance(self, text: str) -> str:
        """The part of the window's text that is new and final. Moves the window."""
        end = len(self.visible_ids)
        size = len(text.rstrip(REPLACEMENT_CHARACTER))
        if size == len(text):
            new = text[len(self.window_text) :]
            self._move_window(text)
        elif end - self.pending_start > MAX_PENDING_TOKENS:
            # No end of a character comes: all but the last bytes are final.
            self.window_start = self.pending_start = max(end - MAX_INCOMPLETE_BYTES, 1)
            last = self._decode_from(self.window_start)
            held = min(len(text) - size, len(last), MAX_INCOMPLETE_BYTES)
            if last.endswith(REPLACEMENT_CHARACTER):
                held = min(held, len(last) - len(last.rstrip(REPLACEMENT_CHARACTER)))
            new = text[len(self.window_text) : len(text) - held]
            self.window_text = last[: len(last) - held]
        else:
            new = text[len(self.window_text) : size]
            self.window_text += new
        return new

    def _move_window(self, text: str) -> None:
        """All tokens have final text: keep the last few as the window."""
        end = len(self.visible_ids)
        for start in (max(self.pending_start, end - CONTEXT_TOKENS), self.pending_start):
            last = self._decode_from(start)
            if last and (start == self.pending_start or REPLACEMENT_CHARACTER not in last):
                self.window_start, text = start, last
                break
        self.pending_start, self.window_text = end, text

    def finish(self) -> str:
        """The remaining text when no more tokens come, incomplete characters included."""
        if self.stopped_by is not None:
            return ""
        text = self._decode_window()
        new = self._emit(text[len(self.window_text) :])
        self.pending_start, self.window_text = len(self.visible_ids), text
        rest, self.pending_text = self.pending_text, ""
        self.text += rest
        return new + rest

    def _emit(self, new: str) -> str:
        """Cut the text at the first stop string; hold back what may be the beginning of one."""
        if len(self.token_ids) <= self.min_tokens:
            self.text += new
            return new
        text = self.pending_text + new
        found = [(text.find(stop), stop) for stop in self.stop_strings if stop in text]
        if found:
            position, self.stopped_by = min(found, key=lambda pair: (pair[0], len(pair[1])))
            emitted, self.pending_text = text[:position], ""
        else:
            held = max((_stop_prefix_length(text, stop) for stop in self.stop_strings), default=0)
            end = len(text) - held
            emitted, self.pending_text = text[:end], text[end:]
        self.text += emitted
        return emitted


def _stop_prefix_length(text: str, stop: str) -> int:
    """The number of characters at the end of the text that are the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
