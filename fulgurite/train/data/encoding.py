"""`TextEncoder`: texts in, token ids out, in batches on all cores.

Text is data, so special tokens written in it (`<|im_end|>`) are encoded as ordinary characters. A text
longer than 1 MiB is encoded in pieces that end at a line break, which bounds memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from fulgurite.cache import digest
from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Tokenizer

PIECE_CHARS = 1 << 20
BATCH_CHARS = 4 << 20


class TextEncoder:
    """Encodes documents with a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos_id = find_eos_id(tokenizer)
        self._backend = Backend.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @cached_property
    def digest(self) -> str:
        """Of everything that token ids depend on."""
        return digest(self._backend.to_str(), str(self.eos_id))

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without special tokens."""
        return next(iter(self.encode_documents([text])))[1]

    def encode_documents(self, texts: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
        """Each text with its ids, in order."""
        batch: list[str] = []
        size = 0
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= BATCH_CHARS:
                yield from self._encode_batch(batch)
                batch, size = [], 0
        yield from self._encode_batch(batch)

    def _encode_batch(self, texts: list[str]) -> Iterator[tuple[str, list[int]]]:
        pieces = [list(_split(text)) for text in texts]
        flat = [piece for parts in pieces for piece in parts]
        encodings = iter(self._backend.encode_batch_fast(flat, add_special_tokens=False))
        for text, parts in zip(texts, pieces, strict=True):
            ids = [next(encodings).ids for _ in parts]
            yield text, ids[0] if len(ids) == 1 else [id for one in ids for id in one]


def _split(text: str) -> Iterator[str]:
    """Pieces of at most `PIECE_CHARS`, cut after a line break where there is one."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def find_eos_id(tokenizer: Tokenizer) -> int:
    """The token that ends a document."""
    name = tokenizer.special_tokens.get("eos_token")
    found = tokenizer.token_id(name) if name is not None else None
    if found is None and tokenizer.stop_ids:
        found = tokenizer.stop_ids[0]
    if found is None:
        raise ArgumentError(
            "the tokenizer has no eos token, so documents can't be separated",
            next="set eos_token in its tokenizer_config.json",
        )
    return found


def token_byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """How many bytes of text each token stands for; 0 for special tokens.

    Byte-level vocabularies write one character a byte. SentencePiece ones write `▁` for a space and
    `<0x0A>` for a byte.
    """
    vocab: dict[str, int] = tokenizer.backend.get_vocab(with_added_tokens=True)
    added = tokenizer.backend.get_added_tokens_decoder()
    is_byte_level = "ByteLevel" in str(tokenizer.backend.decoder)
    lengths = np.zeros(max(vocab.values(), default=0) + 1, np.int64)
    for token, id in vocab.items():
        if id in added:
            lengths[id] = 0 if added[id].special else len(added[id].content.encode())
        elif is_byte_level:
            lengths[id] = len(token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            lengths[id] = 1
        else:
            lengths[id] = len(token.replace("▁", " ").encode())
    return lengths
