"""`open_dataset`: a config and a tokenizer in, the samples of a split out.

data.train ──▶ text: one cached token file ─┐                        ┌─▶ train
               .bin: token files as they are ┴─▶ documents by hash ──┴─▶ validation (one in `holdout`)
data.validation, if given ───────────────────▶ all of its documents ──▶ validation
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.train.config import TrainConfig
from fulgurite.train.data.encoding import TextEncoder, token_byte_lengths
from fulgurite.train.data.packing import PackedDataset, Piece
from fulgurite.train.data.sources import TOKENS, find_sources, no_text_error
from fulgurite.train.data.token_file import TokenFile, open_token_file, tokenize_sources

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)


def open_dataset(config: TrainConfig, tokenizer: Tokenizer, split: str) -> PackedDataset:
    """The samples of `train` or `validation`."""
    data = config.data
    if split not in SPLITS:
        raise ArgumentError(f"there is no split {split!r}", next=f"use {' or '.join(SPLITS)}")
    if data.sequence_length is None or data.sequence_length < 1:
        raise ArgumentError(
            f"data.sequence_length is {data.sequence_length}", next="set it to at least 1"
        )
    own = split == VALIDATION and bool(data.validation)
    files = open_files(config, tokenizer, data.validation if own else data.train)
    if data.validation:
        pieces = [_whole(file) for file in files]
    else:
        pieces = select_split(files, data.holdout, split)
    return PackedDataset(
        pieces,
        data.sequence_length,
        data.document_mask,
        pad_id=TextEncoder(tokenizer).eos_id,
        hashes=_collect_hashes(files),
        byte_lengths=token_byte_lengths(tokenizer),
    )


def open_files(
    config: TrainConfig, tokenizer: Tokenizer, patterns: Sequence[str]
) -> list[TokenFile]:
    """The token files of all patterns; text is tokenized first."""
    encoder = TextEncoder(tokenizer)
    sources = find_sources(patterns)
    texts = [source for source in sources if source.kind != TOKENS]
    files = []
    if texts:
        files.append(
            tokenize_sources(texts, encoder, config.data.text_field, config.data.max_bad_samples)
        )
    for source in sources:
        if source.kind == TOKENS and source.path is not None:
            files.append(open_token_file(source.path, encoder.vocab_size, encoder.eos_id))
            _check_tokenizer(files[-1], encoder)
    if not any(len(file.tokens) for file in files):
        skipped = [name for file in files for name in file.header.get("bad_named", ())]
        advice = [file.header.get("bad_advice") for file in files]
        raise no_text_error(patterns, skipped, next(filter(None, advice), None))
    return files


def _check_tokenizer(file: TokenFile, encoder: TextEncoder) -> None:
    """Warn if a file says that another tokenizer wrote it."""
    if file.header.get("tokenizer", encoder.digest) != encoder.digest:
        LOG.warning("%s was written with another tokenizer than this run's", file.path)


def select_split(files: Sequence[TokenFile], holdout: int, split: str) -> list[Piece]:
    """The documents of a split, chosen by their hashes, so that equal documents stay together.

    If no document's hash is chosen, the one with the lowest is. A single document is cut in two.
    """
    if holdout < 2:
        raise ArgumentError(
            f"data.holdout={holdout} must be at least 2", next="or name files in data.validation"
        )
    masks = [np.asarray(file.hashes % np.uint64(holdout) == 0) for file in files]
    hashes = np.concatenate([np.asarray(file.hashes) for file in files])
    chosen = sum(int(mask.sum()) for mask in masks)
    if len(np.unique(hashes)) < 2:
        return _cut_document(files, holdout, split)
    if chosen in (0, len(hashes)):
        masks = [np.asarray(file.hashes == hashes.min()) for file in files]
    return [
        _select(file, mask if split == VALIDATION else ~mask)
        for file, mask in zip(files, masks, strict=True)
    ]


def _whole(file: TokenFile) -> Piece:
    return _select(file, np.ones(len(file.hashes), dtype=bool))


def _select(file: TokenFile, mask: NDArray[np.bool_]) -> Piece:
    starts = np.asarray(file.offsets[:-1])
    lengths = np.diff(file.offsets)
    is_kept = mask & (lengths > 0)
    return Piece(file, starts[is_kept], lengths[is_kept])


def _cut_document(files: Sequence[TokenFile], holdout: int, split: str) -> list[Piece]:
    """The first or the last part of the only document (or of copies of one)."""
    file = next(file for file in files if len(file.hashes))
    start, end = int(file.offsets[0]), int(file.offsets[1])
    held_out = max(2, (end - start) // holdout)
    cut = end - held_out
    if cut - start < 2:
        raise ArgumentError(
            f"the only document has {end - start} tokens: too few to train on and to validate",
            next="add text, or name files in data.validation",
        )
    first, last = (start, cut) if split == TRAIN else (cut, end)
    return [Piece(file, np.array([first]), np.array([last - first]))]


def _collect_hashes(files: Sequence[TokenFile]) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files:
        if "sources" in file.header:
            found["sources"] = file.header["sources"]
            found["tokenizer"] = file.header["tokenizer"]
            found["tokens"] = file.sha256
        else:
            found[str(file.path)] = file.sha256
    return found
