"""Words that a reply must not have: words in, masks of tokens out.

Words are compared with the text of the reply, byte by byte, so that no split into tokens goes around
them. A token is banned if the reply would have a word with it:

    a token that contains a word                                       always
    a token that begins with `word[k:]`, if the reply ends with `word[:k]`      now

Special tokens have no text: they are never banned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fulgurite.errors import FulguriteError
from fulgurite.serve.structured.constraint import MASK_BITS, GrammarConstraint

if TYPE_CHECKING:
    from torch import Tensor


class TokenBytes:
    """The bytes of all tokens of a vocabulary. Special tokens have none."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`tokenizer`: llguidance's."""
        self.bytes: list[bytes] = [
            b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
            for token in range(min(vocab_size, tokenizer.vocab_size))
        ]
        self.all_allowed = pack_first(vocab_size)
        self.order = sorted(range(len(self.bytes)), key=self.bytes.__getitem__)
        self.sorted_bytes = [self.bytes[token] for token in self.order]

    def find_containing(self, text: bytes) -> list[int]:
        return [token for token, data in enumerate(self.bytes) if text in data]

    def find_beginning(self, text: bytes) -> list[int]:
        start = end = bisect_left(self.sorted_bytes, text)
        while end < len(self.sorted_bytes) and self.sorted_bytes[end].startswith(text):
            end += 1
        return self.order[start:end]


def pack_first(count: int) -> np.ndarray:
    """Packed words of a mask that allows the first `count` tokens."""
    bits = np.zeros(-(-count // MASK_BITS) * MASK_BITS, dtype=np.uint8)
    bits[:count] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def ban_tokens(mask: np.ndarray, tokens: np.ndarray) -> None:
    """Clear the bits of these tokens in the packed words of a mask."""
    bits = np.left_shift(np.uint32(1), (tokens % MASK_BITS).astype(np.uint32))
    np.bitwise_and.at(mask, tokens // MASK_BITS, ~bits)


class BadWords:
    """Compiled words, shared by requests: which tokens can't follow a text."""

    def __init__(self, words: Sequence[str], tokens: TokenBytes) -> None:
        self.words = [word.encode() for word in dict.fromkeys(words)]
        self.tokens = tokens
        self.max_tail = max(map(len, self.words)) - 1
        self.always = tokens.all_allowed.copy()  # the mask after a text that begins no word
        for word in self.words:
            ban_tokens(self.always, np.array(tokens.find_containing(word), dtype=np.int64))
        self.completing: dict[bytes, np.ndarray] = {}  # the rest of a word → tokens that begin so

    def find_rests(self, tail: bytes) -> Iterator[bytes]:
        """What would complete a word after a text that ends with `tail`."""
        for word in self.words:
            for length in range(1, min(len(word), len(tail) + 1)):
                if tail.endswith(word[:length]):
                    yield word[length:]

    def make_mask(self, tail: bytes) -> np.ndarray:
        """The mask of the next token."""
        mask = self.always.copy()
        for rest in self.find_rests(tail):
            found = self.completing.get(rest)
            if found is None:
                found = np.array(self.tokens.find_beginning(rest), dtype=np.int64)
                self.completing[rest] = found
            ban_tokens(mask, found)
        return mask

    def extend(self, tail: bytes, token: int) -> bytes:
        """The end of the text after a token: as much as a word can begin in."""
        data = self.tokens.bytes[token] if token < len(self.tokens.bytes) else b""
        text = tail + data
        return text[max(len(text) - self.max_tail, 0) :]

    def allows(self, tail: bytes, token: int) -> bool:
        data = self.tokens.bytes[token] if token < len(self.tokens.bytes) else b""
        return not data or not any(word in tail + data for word in self.words)


class BadWordsConstraint:
    """The words of one request, with its grammar if it has one. A `Grammar` (serve/engine/grammar.py).

    Without a grammar nothing is forced and nothing ends the reply.
    """

    def __init__(self, words: BadWords, grammar: GrammarConstraint | None) -> None:
        self.words, self.grammar = words, grammar
        self.tail = b""

    def allowed_tokens(self) -> Tensor:
        from torch import from_numpy  # a server checks words without torch

        mask = self.words.make_mask(self.tail).view(np.int32)
        if self.grammar is None:
            return from_numpy(mask)
        allowed = self.grammar.allowed_tokens()
        return allowed & from_numpy(mask[: len(allowed)])

    def accept_token(self, token: int) -> None:
        if not self.words.allows(self.tail, token):
            raise FulguriteError(f"token {token} completes one of bad_words")
        self.tail = self.words.extend(self.tail, token)
        if self.grammar is not None:
            self.grammar.accept_token(token)

    def start_mask(self) -> None:
        if self.grammar is not None:
            self.grammar.start_mask()

    def forced_tokens(self) -> list[int]:
        """Up to a token that would complete a word: no other can follow, so the request fails there."""
        forced: list[int] = []
        tail = self.tail
        for token in () if self.grammar is None else self.grammar.forced_tokens():
            if not self.words.allows(tail, token):
                break
            tail = self.words.extend(tail, token)
            forced.append(token)
        return forced

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self.grammar is None else self.grammar.eos_token_ids

    @property
    def is_accepting(self) -> bool:
        return self.grammar is not None and self.grammar.is_accepting

    @property
    def is_complete(self) -> bool:
        return self.grammar is not None and self.grammar.is_complete
