"""Rows of examples: token ids with labels in, samples of T tokens out.

An `Example` is a text of its own: a conversation, a prompt and its completion. `pack` puts several of
them into one row where they fit. A row's examples are documents: they don't see each other, and each
counts its positions from 0.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fulgurite.errors import ArgumentError
from fulgurite.train.batch import IGNORED
from fulgurite.train.data.packing import Ints, Sample


@dataclass(frozen=True)
class Example:
    """Inputs, and the label of each: the next token, or `IGNORED`. `document`: a number of its own."""

    tokens: Ints
    labels: Ints
    document: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_labels(self) -> int:
        return int((self.labels != IGNORED).sum())

    def truncated(self, length: int) -> Example:
        """The first `length` tokens."""
        return Example(self.tokens[:length], self.labels[:length], self.document)


def make_example(token_ids: Sequence[int], is_answer: Sequence[bool]) -> Example:
    """Tokens of a whole text, and for each whether it is learned. The last one is a label only."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    learned = np.asarray(is_answer, dtype=bool)
    assert tokens.shape == learned.shape and len(tokens), "one flag a token"
    return Example(tokens[:-1], np.where(learned[1:], tokens[1:], IGNORED))


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which examples share a row: best fit, the longest first. Rows are in order of their first
    example, and so are the examples of a row."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in order:
        at = bisect.bisect_left(free, (lengths[index], -1))
        if at == len(free):
            row, left = len(rows), capacity
            rows.append([])
        else:
            left, row = free.pop(at)
        rows[row].append(index)
        if left > lengths[index]:
            bisect.insort(free, (left - lengths[index], row))
    return sorted(sorted(row) for row in rows)


class RowDataset:
    """Samples of `sequence_length` tokens; row n holds the examples `rows[n]`."""

    def __init__(
        self,
        examples: Sequence[Example],
        rows: Sequence[Sequence[int]],
        sequence_length: int,
        pad_id: int,
        hashes: dict[str, str],
        byte_lengths: Ints | None = None,
    ) -> None:
        self.examples, self.rows = examples, rows
        self.sequence_length = sequence_length
        self.byte_lengths = byte_lengths
        self._pad_id, self._hashes = pad_id, hashes

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples, without padding."""
        return sum(len(example) for example in self.examples)

    @property
    def num_labels(self) -> int:
        return sum(example.num_labels for example in self.examples)

    def hashes(self) -> dict[str, str]:
        return dict(self._hashes)

    def sample(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise ArgumentError(f"there is no sample {number}; the dataset has {len(self)}")
        return make_row(
            [self.examples[index] for index in self.rows[number]],
            self.sequence_length,
            self._pad_id,
        )

    def mean_bytes_per_token(self, samples: int = 64) -> float | None:
        """Bytes of text that a label stands for, over evenly spaced samples; None: the loss is not
        that of text."""
        if self.byte_lengths is None:
            return None
        count = min(samples, len(self))
        chosen = [self.sample(place * len(self) // count).labels for place in range(count)]
        labels = np.concatenate([one[one != IGNORED] for one in chosen])
        return float(self.byte_lengths[labels].sum() / max(1, len(labels)))


def make_row(examples: Sequence[Example], length: int, pad_id: int) -> Sample:
    """Examples end to end, then padding."""
    sizes = [len(example) for example in examples]
    missing = length - sum(sizes)
    assert missing >= 0, f"examples of {sum(sizes)} tokens in a row of {length}"
    numbers = [i if e.document is None else e.document for i, e in enumerate(examples)]
    padding = np.ones(missing, dtype=np.int64)
    positions = [np.arange(size) for size in sizes]
    return Sample(
        np.concatenate([*(e.tokens for e in examples), padding * pad_id]),
        np.concatenate([*(e.labels for e in examples), padding * IGNORED]),
        np.concatenate([*positions, -padding]).astype(np.int64),
        np.concatenate([np.repeat(numbers, sizes), -padding]).astype(np.int64),
    )
