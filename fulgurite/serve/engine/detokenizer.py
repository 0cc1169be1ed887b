"""Streaming detokenization: token ids in one by one, final text out.

A token may end inside a character. Text that ends in the replacement character waits for the next
token. A token may also end inside a stop string, so text that could become one waits, too. Emitted
text never changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.models.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING_TOKENS = 32  # a character has at most four bytes, so at most four tokens
CONTEXT_TOKENS = 5  # earlier tokens that may change how a token looks


class Detokenizer:
    """The text of one reply. `stopped_by` is the stop string that ended it, if one did.

    The text of the first `min_tokens` tokens is not searched for stop strings.
    `skip_special_tokens`: special tokens have no text. `prompt_ids`: of a prompt that the reply goes on
    from, in the same text. Without it, SentencePiece drops a space at the beginning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self.skip_special_tokens = skip_special_tokens
        self.min_tokens = min_tokens
        self.tokenizer = tokenizer
        self.stop_strings = tuple(stop_strings)
        self.stopped_by: str | None = None
        self.text = ""  # all emitted text
        self.pending_text = ""  # decoded, but perhaps the beginning of a stop string
        self.token_ids: list[int] = []
        # Decoding starts some tokens back, because earlier tokens may change how a token looks.
        self.decode_start = 0
        self.num_emitted_tokens = 0
        self.prompt_ids = self._choose_context(prompt_ids)
        self.num_emitted_chars = len(self._decode_from(0))  # of the text from `decode_start` on

    def _choose_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of a prompt; none if it ends inside a character."""
        ids = list(prompt_ids[-CONTEXT_TOKENS:])
        return [] if self._decode(ids).endswith(REPLACEMENT_CHARACTER) else ids

    def _decode_from(self, start: int) -> str:
        """The text of the tokens from `start` on; from 0 on, after the prompt's."""
        tokens = self.token_ids[start:]
        return self._decode(tokens if start else [*self.prompt_ids, *tokens])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, self.skip_special_tokens)

    def push(self, token: int) -> str:
        """Add a token and return the text that became final."""
        return self._push((token,))

    def push_all(self, tokens: Sequence[int]) -> str:
        """Add tokens up to the one that completes a stop string; return the text that became final.

        `token_ids` has those that were added.
        """
        if not self.stop_strings:
            return self._push(tokens) if tokens else ""
        text = ""
        for token in tokens:
            text += self._push((token,))
            if self.stopped_by is not None:
                break
        return text

    def _push(self, tokens: Sequence[int]) -> str:
        self.token_ids += tokens
        text = self._decode_from(self.decode_start)
        if not text.endswith(REPLACEMENT_CHARACTER):
            new = text[self.num_emitted_chars :]
            end = len(self.token_ids)
            self.decode_start = max(self.num_emitted_tokens, end - CONTEXT_TOKENS)
            self.num_emitted_tokens = end
            self.num_emitted_chars = len(self._decode_from(self.decode_start))
        elif len(self.token_ids) - self.num_emitted_tokens > MAX_PENDING_TOKENS:
            # These bytes are no text; only the last three may still become a character.
            end = len(self.token_ids) - 3
            new = self._decode(self.token_ids[self.num_emitted_tokens : end])
            self.decode_start, self.num_emitted_tokens, self.num_emitted_chars = end, end, 0
        else:
            return ""
        return self._emit(new)

    def finish(self) -> str:
        """The remaining text when no more tokens come, incomplete characters included."""
        if self.stopped_by is not None:
            return ""
        new = ""
        if self.num_emitted_tokens < len(self.token_ids):
            text = self._decode_from(self.decode_start)
            new = self._emit(text[self.num_emitted_chars :])
        rest, self.pending_text = self.pending_text, ""
        self.decode_start = self.num_emitted_tokens = len(self.token_ids)
        self.num_emitted_chars = 0
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
