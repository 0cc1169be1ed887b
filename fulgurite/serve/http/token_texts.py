"""Tokens as text and bytes, for log-probabilities: token ids in, what each one stands for out.

A token may be a part of a character. Its text then has a replacement character, and its bytes are
exact: clients concatenate bytes. A token's text is that inside of a text: at the beginning of one,
SentencePiece drops a space.
"""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.models.tokenizer import Tokenizer

BEFORE = "a"  # a text before a token
REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def make_byte_alphabet() -> dict[str, int]:
    """Characters by which byte-level BPE vocabularies write bytes: printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = make_byte_alphabet()


class TokenTexts:
    """Texts and bytes of one tokenizer's tokens, remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.cache: dict[int, tuple[str, list[int]]] = {}
        self.before = tokenizer.encode(BEFORE, add_special_tokens=False)[-1:]
        self.num_before = len(self._decode(()))

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        found = self.cache.get(token)
        if found is None:
            found = self.cache[token] = self._read(token)
        return found

    def _decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode([*self.before, *tokens], skip_special_tokens)

    def name(self, token: int) -> str:
        """The text of a token, or its bytes in OpenAI's notation: names of tokens must differ."""
        text, data = self[token]
        if REPLACEMENT_CHARACTER not in text or bytes(data) == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token: int) -> bool:
        """Whether texts leave a token out."""
        return bool(self[token][0]) and len(self._decode((token,), True)) == self.num_before

    def _read(self, token: int) -> tuple[str, list[int]]:
        text = self._decode((token,))[self.num_before :]
        if REPLACEMENT_CHARACTER not in text:
            return text, list(text.encode())
        piece = self.tokenizer.backend.id_to_token(token) or ""
        if piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's bytes
            return text, [int(piece[3:-1], 16)]
        if piece and all(character in BYTE_ALPHABET for character in piece):
            return text, [BYTE_ALPHABET[character] for character in piece]
        return text, list(text.encode())
