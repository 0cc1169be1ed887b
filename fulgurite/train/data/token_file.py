"""Token files: documents tokenized once, then read by memory map.

    documents ─▶ write_token_file ─▶ one file (token_format.py) ─▶ TokenFile: tokens, offsets, hashes
    sources   ─▶ tokenize_sources ─▶ the same file from the cache, by the content of text and tokenizer

A file appears under its name when it is whole: it is written under another name, flushed to disk and
renamed. Processes that need the same file wait for the one that writes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fulgurite.cache import digest
from fulgurite.config import settings
from fulgurite.errors import ArgumentError, CacheError
from fulgurite.logs import LOG
from fulgurite.train.data.encoding import TextEncoder
from fulgurite.train.data.records import BadSamples, describe_skipped
from fulgurite.train.data.sources import (
    Document,
    Source,
    hash_sources,
    read_documents,
)
from fulgurite.train.data.token_format import HEAD_BYTES, TokenLayout, pack_header, read_layout

FORMAT = "1"  # of cached files: another way to tokenize is another number
CHUNK_TOKENS = 16 << 20  # read at once when a whole file is checked
PARTIAL = ".partial"
NAMED_BYTES = HEAD_BYTES // 2  # of the header: the first bad samples
VERIFIED_BYTES = 1 << 30  # cached files up to this size are compared with their hash when opened


@dataclass(frozen=True)
class TokenFile:
    """Tokens of documents, mapped into memory.

    Attributes:
        path: the file.
        tokens: all tokens, uint16 or uint32, read-only.
        offsets: where each document begins, int64; one more entry for the end.
        hashes: 64 bits of each document's text, which choose the held-out ones.
        header: what the file says about itself.
    """

    path: Path
    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    header: dict[str, Any]

    @cached_property
    def sha256(self) -> str:
        """Of the tokens; computed if the file does not say."""
        stored = self.header.get("sha256")
        return stored if isinstance(stored, str) else _hash_tokens(self.tokens)


# ---- reading -------------------------------------------------------------------------------------


def open_token_file(path: Path, vocab_size: int, eos_id: int | None) -> TokenFile:
    """Map a token file; raise if it is damaged or has tokens that the vocabulary lacks.

    A file without an index has a document up to each `eos_id`.
    """
    layout = read_layout(path)
    tokens = _map(path, layout.dtype, layout.start, layout.num_tokens)
    highest = layout.header.get("max_token")
    highest = highest if isinstance(highest, int) else _max_token(tokens)
    if highest >= vocab_size:
        raise ArgumentError(
            f"the token file {path} has token {highest}, but the vocabulary has {vocab_size} tokens",
            next="use the tokenizer that wrote the file (data.tokenizer)",
        )
    if layout.num_documents >= 0:
        offsets, hashes = _map_index(path, layout)
    else:
        offsets = _find_documents(tokens, eos_id)
        hashes = _hash_documents(tokens, offsets)
    return TokenFile(path, tokens, offsets, hashes, layout.header)


def _map(path: Path, dtype: Any, start: int, count: int) -> NDArray[Any]:
    if count == 0:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(count,))


def _map_index(path: Path, layout: TokenLayout) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    offsets = _map(path, np.int64, layout.offsets_start, layout.num_documents + 1)
    hashes = _map(path, np.uint64, layout.hashes_start, layout.num_documents)
    is_rising = bool((np.diff(offsets) >= 0).all())
    if not is_rising or offsets[0] != 0 or offsets[-1] != layout.num_tokens:
        raise ArgumentError(
            f"the document index of the token file {path} is damaged", next="write it again"
        )
    return offsets, hashes


def _find_documents(tokens: NDArray[Any], eos_id: int | None) -> NDArray[np.int64]:
    ends = [] if eos_id is None else [np.flatnonzero(tokens == eos_id) + 1]
    edges = np.concatenate([[0], *ends, [len(tokens)]]).astype(np.int64)
    return np.unique(edges) if len(tokens) else np.zeros(1, np.int64)


def _hash_documents(tokens: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    pairs = pairwise(offsets.tolist())
    values = [_hash64(np.ascontiguousarray(tokens[start:end]).tobytes()) for start, end in pairs]
    return np.array(values, dtype=np.uint64)


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _chunks(tokens: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield tokens[start : start + CHUNK_TOKENS]


def _max_token(tokens: NDArray[Any]) -> int:
    return max((int(chunk.max()) for chunk in _chunks(tokens)), default=0)


def _hash_tokens(tokens: NDArray[Any]) -> str:
    sha = hashlib.sha256()
    for chunk in _chunks(tokens):
        sha.update(np.ascontiguousarray(chunk).data)
    return sha.hexdigest()


# ---- writing -------------------------------------------------------------------------------------


def write_token_file(
    path: Path, documents: Iterable[Document], encoder: TextEncoder, facts: dict[str, Any]
) -> None:
    """Tokenize documents into a file. `facts` go into its header when all documents are read."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open(partial, "wb") as file:
            _write(file, documents, encoder, facts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise CacheError(
            f"can't write the token file {path}: {error.strerror or error}",
            next="free disk space, or set FULGURITE_CACHE_DIR to a folder on another disk",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _write(
    file: BinaryIO, documents: Iterable[Document], encoder: TextEncoder, facts: dict[str, Any]
) -> None:
    dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    sha, offsets, hashes, highest = hashlib.sha256(), [0], [], 0
    file.write(b"\0" * HEAD_BYTES)
    for text, ids in encoder.encode_documents(document.text for document in documents):
        tokens = np.array([*ids, encoder.eos_id], dtype=dtype)
        file.write(tokens.data)
        sha.update(tokens.data)
        highest = max(highest, int(tokens.max()))
        offsets.append(offsets[-1] + len(tokens))
        hashes.append(_hash64(text.encode()))
    file.write(b"\0" * (-file.tell() % 8))
    file.write(np.array(offsets, dtype=np.int64).data)
    file.write(np.array(hashes, dtype=np.uint64).tobytes())
    header = {
        "dtype": dtype.name,
        "tokens": offsets[-1],
        "documents": len(hashes),
        "max_token": highest,
        "vocab_size": encoder.vocab_size,
        "sha256": sha.hexdigest(),
    }
    file.seek(0)
    file.write(pack_header({**header, **facts}))


# ---- the cache -----------------------------------------------------------------------------------


def tokenize_sources(
    sources: Sequence[Source], encoder: TextEncoder, text_field: str, max_bad_samples: int
) -> TokenFile:
    """The token file of all sources together, from the cache if it is there."""
    content = hash_sources(sources)
    key = digest("tokens", FORMAT, content, encoder.digest, text_field)
    folder = _cache_folder()
    path = folder / f"{key}.bin"
    with _lock(folder / f"{key}.lock") as is_held:
        if not _is_intact(path):
            stale = folder.glob(f".{path.name}.*{PARTIAL}") if is_held else ()
            for left in stale:  # by a process that was killed
                left.unlink(missing_ok=True)
            bad = BadSamples(max_bad_samples)
            facts: dict[str, Any] = {"sources": content, "tokenizer": encoder.digest}
            documents = _with_facts(read_documents(sources, text_field, bad), bad, facts)
            write_token_file(path, documents, encoder, facts)
    file = open_token_file(path, encoder.vocab_size, encoder.eos_id)
    _report_bad_samples(file.header, max_bad_samples)
    return file


def _with_facts(
    documents: Iterable[Document], bad: BadSamples, facts: dict[str, Any]
) -> Iterator[Document]:
    """The documents; after the last one, the facts about skipped samples are known."""
    yield from documents
    facts["bad_samples"] = bad.count
    facts["bad_advice"] = bad.advice and bad.advice[:300]
    facts["bad_named"] = []
    for name in bad.named:  # the header has a fixed size
        if len(json.dumps([*facts["bad_named"], name[:300]])) <= NAMED_BYTES:
            facts["bad_named"].append(name[:300])


def _report_bad_samples(header: dict[str, Any], limit: int) -> None:
    """Say again what an earlier run has skipped; its limit may have been higher."""
    count = int(header.get("bad_samples", 0))
    if not count:
        return
    named = [str(name) for name in header.get("bad_named", ())]
    if count > limit:
        raise ArgumentError(
            f"{count} samples can't be read, more than data.max_bad_samples={limit}",
            where="\n".join(named),
            next="repair or remove them, or raise data.max_bad_samples",
        )
    LOG.warning("%s", describe_skipped(count, named))


def _is_intact(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        file = open_token_file(path, 1 << 32, None)
    except ArgumentError as error:
        LOG.warning("a cached token file is damaged and written again: %s", error)
        return False
    if path.stat().st_size <= VERIFIED_BYTES and file.header.get("sha256") != _hash_tokens(
        file.tokens
    ):
        LOG.warning("the cached token file %s is damaged and written again", path)
        return False
    return True


def _cache_folder() -> Path:
    """The folder of cached token files; a temporary one if it can't be written."""
    folder = settings().cache_dir / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        LOG.warning("token files can't be cached in %s (%s)", folder, error.strerror)
        fallback = Path(tempfile.gettempdir()) / f"fulgurite-tokens-{os.getuid()}"
        fallback.mkdir(exist_ok=True, mode=0o700)
        return fallback


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold a file's lock: one process writes, the others wait. It ends with the process.

    False: the file system has no locks. Then the last writer's whole file stays.
    """
    with open(path, "wb") as file:
        is_held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            is_held = False
            LOG.warning("%s can't be locked; processes may tokenize the same text twice", path)
        try:
            yield is_held
        finally:
            if is_held:
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child would keep it
