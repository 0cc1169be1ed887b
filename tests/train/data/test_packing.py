"""Packing loses and invents no token; labels, positions and documents are those of the stream."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fulgurite.errors import ArgumentError
from fulgurite.train.batch import IGNORED
from fulgurite.train.data.packing import PackedDataset, Piece
from fulgurite.train.data.token_file import TokenFile

PAD = 9999


def pack(documents: list[list[int]], length: int, mask: bool = True) -> PackedDataset:
    """A dataset of these documents, alternately from two files."""
    pieces = []
    for part in (documents[: len(documents) // 2], documents[len(documents) // 2 :]):
        lengths = np.array([len(one) for one in part], np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.array([token for one in part for token in one], np.uint16)
        file = TokenFile(Path("x"), tokens, offsets, np.zeros(len(part), np.uint64), {})
        pieces.append(Piece(file, offsets[:-1], lengths))
    return PackedDataset(pieces, length, mask, PAD, {})


def random_documents(seed: int, longest: int = 30) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    lengths = generator.choice([1, 2, 3, longest], size=generator.integers(2, 40))
    values = iter(range(1, 10_000))
    return [[next(values) for _ in range(n)] for n in lengths]  # every token is different


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 64, 5000])
@pytest.mark.parametrize("mask", [True, False])
def test_every_token_is_an_input_once(seed: int, length: int, mask: bool):
    documents = random_documents(seed)
    stream = [token for one in documents for token in one]
    data = pack(documents, length, mask)
    samples = [data.sample(n) for n in range(len(data))]
    inputs = np.concatenate([s.tokens[s.positions >= 0] for s in samples])
    assert inputs.tolist() == stream[:-1]
    assert data.num_tokens == len(stream)
    for sample in samples:
        assert {len(x) for x in (sample.tokens, sample.labels, sample.positions)} == {length}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 64])
def test_labels_are_the_next_token_of_the_same_document(seed: int, length: int):
    documents = random_documents(seed)
    successor = {a: b for one in documents for a, b in pairwise(one)}
    data = pack(documents, length)
    seen = []
    for n in range(len(data)):
        sample = data.sample(n)
        for token, label, position in zip(sample.tokens, sample.labels, sample.positions):
            expected = successor.get(token, IGNORED) if position >= 0 else IGNORED
            assert label == expected
            seen += [label] if label != IGNORED else []
    assert sorted(seen) == sorted(successor.values())  # each but a document's first, once


@pytest.mark.parametrize("length", [1, 3, 16])
def test_without_a_mask_labels_cross_documents(length: int):
    documents = random_documents(3)
    stream = [token for one in documents for token in one]
    data = pack(documents, length, mask=False)
    samples = [data.sample(n) for n in range(len(data))]
    labels = np.concatenate([s.labels[s.positions >= 0] for s in samples])
    assert labels.tolist() == stream[1:]


def test_positions_and_documents_of_a_sample():
    data = pack([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]], 6)
    first, second = data.sample(0), data.sample(1)
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.labels.tolist() == [2, 3, IGNORED, IGNORED, 6, IGNORED]
    assert first.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert first.documents is not None and first.documents.tolist() == [0, 0, 0, 1, 2, 2]
    assert second.tokens.tolist() == [7, 8, 9, PAD, PAD, PAD]
    assert second.labels.tolist() == [8, 9, 10, IGNORED, IGNORED, IGNORED]
    assert second.positions.tolist() == [0, 1, 2, -1, -1, -1]
    assert second.documents is not None and second.documents.tolist() == [0, 0, 0, -1, -1, -1]


def test_a_document_over_many_samples_starts_at_position_0_in_each():
    data = pack([list(range(100)), [5]], 16)
    for n in range(6):
        sample = data.sample(n)
        assert sample.tokens.tolist() == list(range(16 * n, 16 * n + 16))
        assert sample.positions.tolist() == list(range(16))
        assert sample.documents is not None and not sample.documents.any()


def test_rows_of_one_document_need_no_documents():
    assert pack([[1, 2], [3, 4, 5]], 4, mask=False).sample(0).documents is None
    padded = pack([[1, 2], [3, 4, 5, 6]], 4, mask=False)
    kinds = {padded.sample(n).documents is None for n in range(2)}
    assert kinds == {False}  # the same for all rows: a batch has documents or has none


@pytest.mark.parametrize("documents", [[], [[1]]])
def test_too_little_text(documents: list[list[int]]):
    with pytest.raises(ArgumentError, match="a sample needs two"):
        pack(documents, 4)


@pytest.mark.parametrize("number", [-1, 2])
def test_a_sample_that_is_not_there(number: int):
    with pytest.raises(ArgumentError, match="the dataset has 2"):
        pack([[1, 2, 3], [4, 5]], 2).sample(number)


def test_bytes_per_token_counts_labels_only():
    data = pack([[1, 2, 3], [2, 3]], 4)
    data.byte_lengths = np.array([0, 100, 2, 4])
    assert data.mean_bytes_per_token() == pytest.approx((2 + 4 + 4) / 3)
