"""Packing: documents in, samples of exactly T tokens by number out.

The documents of a split are one stream, each with its eos token. Sample `n` has the stream's tokens
`n·T` to `n·T + T` as inputs, and each one's successor as its label. So every token is an input once, and
none is made up; the last sample is padded.

    stream      a b c eos | d eos | e f g h eos            T = 4
    sample 1    d eos e f        labels  eos -  f g        positions 0 1 0 1      documents 0 0 1 1

With a document mask the last token of a document has no label (`-` above): what follows belongs to
another document. Positions count from the document's first token in the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fulgurite.errors import ArgumentError
from fulgurite.train.batch import IGNORED
from fulgurite.train.data.token_file import TokenFile

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """A row of a batch; see `Batch`. `documents` None: the row is one document."""

    tokens: Ints
    labels: Ints
    positions: Ints
    documents: Ints | None


class Dataset(Protocol):
    """Samples by number, in the order of the files."""

    def __len__(self) -> int: ...

    def sample(self, number: int) -> Sample: ...

    @property
    def num_tokens(self) -> int: ...

    def hashes(self) -> dict[str, str]:
        """Names and SHA-256 of what the samples depend on, for receipts."""
        ...


@dataclass(frozen=True)
class Piece:
    """Documents of one token file: the start and the length of each."""

    file: TokenFile
    starts: Ints
    lengths: Ints


class PackedDataset:
    """Documents of token files, packed into samples of `sequence_length` tokens."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        sequence_length: int,
        document_mask: bool,
        pad_id: int,
        hashes: dict[str, str],
        byte_lengths: Ints | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self.document_mask = document_mask
        self.byte_lengths = byte_lengths
        self._pad_id = pad_id
        self._hashes = hashes
        self._pieces = pieces
        self._file_of = np.concatenate(
            [np.full(len(piece.starts), number) for number, piece in enumerate(pieces)]
        )
        self._starts = np.concatenate([piece.starts for piece in pieces])
        lengths = np.concatenate([piece.lengths for piece in pieces])
        self._edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if self.num_tokens < 2:
            raise ArgumentError(
                f"the text has {self.num_tokens} tokens; a sample needs two",
                next="add text to data.train or data.validation",
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, with their eos tokens."""
        return int(self._edges[-1])

    @property
    def num_documents(self) -> int:
        return len(self._starts)

    def __len__(self) -> int:
        return -(-(self.num_tokens - 1) // self.sequence_length)

    def hashes(self) -> dict[str, str]:
        return dict(self._hashes)

    def sample(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise ArgumentError(f"there is no sample {number}; the dataset has {len(self)}")
        T = self.sequence_length
        start = number * T
        window, owners = self._read(start, min(start + T + 1, self.num_tokens))
        tokens, labels = window[:-1], window[1:].copy()
        owners, next_owners = owners[:-1], owners[1:]
        if self.document_mask:
            labels[owners != next_owners] = IGNORED
            documents = owners - owners[0]
            positions = _count_from_starts(owners)
        else:
            documents, positions = np.zeros_like(tokens), np.arange(len(tokens))
        missing = T - len(tokens)
        has_documents = self.document_mask or (self.num_tokens - 1) % T != 0
        return Sample(
            _pad(tokens, missing, self._pad_id),
            _pad(labels, missing, IGNORED),
            _pad(positions, missing, -1),
            _pad(documents, missing, -1) if has_documents else None,
        )

    def _read(self, start: int, end: int) -> tuple[Ints, Ints]:
        """Tokens of a range of the stream, and the document of each."""
        first = int(np.searchsorted(self._edges, start, side="right")) - 1
        last = int(np.searchsorted(self._edges, end, side="left"))
        parts: list[NDArray[Any]] = []
        counts = []
        for document in range(first, last):
            edge = int(self._edges[document])
            begin = max(start, edge) - edge
            stop = min(end, int(self._edges[document + 1])) - edge
            tokens = self._pieces[self._file_of[document]].file.tokens
            offset = int(self._starts[document])
            parts.append(tokens[offset + begin : offset + stop])
            counts.append(stop - begin)
        owners = np.repeat(np.arange(first, last), counts)
        return np.concatenate(parts).astype(np.int64), owners

    def mean_bytes_per_token(self, samples: int = 64) -> float:
        """Bytes of text that a label stands for, over evenly spaced samples."""
        assert self.byte_lengths is not None, "made without byte_lengths"
        count = min(samples, len(self))
        chosen = [self.sample(place * len(self) // count).labels for place in range(count)]
        labels = np.concatenate([one[one != IGNORED] for one in chosen])
        return float(self.byte_lengths[labels].sum() / max(1, len(labels)))


def _count_from_starts(owners: Ints) -> Ints:
    """0, 1, 2, ... from each change of owner on."""
    places = np.arange(len(owners))
    is_start = np.concatenate([[True], owners[1:] != owners[:-1]])
    return places - np.maximum.accumulate(np.where(is_start, places, 0))


def _pad(values: Ints, missing: int, value: int) -> Ints:
    padding = np.full(missing, value, np.int64)
    return np.concatenate([values, padding]).astype(np.int64)
