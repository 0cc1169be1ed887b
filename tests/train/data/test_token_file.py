"""Token files: whole or not there, checked when opened, written once by many processes."""

from __future__ import annotations

import multiprocessing
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulgurite.errors import ArgumentError, CacheError
from fulgurite.train.data import encoding, token_file
from fulgurite.train.data.encoding import TextEncoder
from fulgurite.train.data.sources import Document, find_sources
from fulgurite.train.data.token_file import open_token_file, tokenize_sources, write_token_file
from fulgurite.train.data.token_format import HEAD_BYTES, is_token_file
from tests.train.data.samples import random_texts, small_tokenizer


@pytest.fixture
def encoder() -> TextEncoder:
    return TextEncoder(small_tokenizer())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FULGURITE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def write(path: Path, texts: list[str], encoder: TextEncoder) -> Path:
    write_token_file(path, (Document(text, "x") for text in texts), encoder, {})
    return path


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_documents_come_back(tmp_path: Path, encoder: TextEncoder, count: int):
    texts = random_texts(count)
    file = open_token_file(write(tmp_path / "a.bin", texts, encoder), encoder.vocab_size, 0)
    assert len(file.hashes) == len(file.offsets) - 1 == count
    for text, start, end in zip(texts, file.offsets, file.offsets[1:]):
        ids = file.tokens[start:end].tolist()
        assert ids == [*encoder.encode(text), encoder.eos_id]
        assert encoder.tokenizer.decode(ids) == text
    assert len(file.sha256) == 64 and is_token_file(file.path)


def test_large_vocabularies_have_32_bits(tmp_path: Path, encoder: TextEncoder, monkeypatch):
    monkeypatch.setattr(TextEncoder, "vocab_size", 70_000)
    file = open_token_file(write(tmp_path / "a.bin", ["alpha"], encoder), 70_000, 0)
    assert file.tokens.dtype == np.uint32 and file.tokens.tolist() == [*encoder.encode("alpha"), 0]


# ---- damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [-1, -8, -5000, 1])
def test_a_wrong_size(tmp_path: Path, encoder: TextEncoder, change: int):
    path = write(tmp_path / "a.bin", random_texts(9), encoder)
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x" * change)
    with pytest.raises(ArgumentError, match=r"bytes, but its layout needs"):
        open_token_file(path, encoder.vocab_size, 0)


def test_a_damaged_header_and_index(tmp_path: Path, encoder: TextEncoder):
    path = write(tmp_path / "a.bin", random_texts(9), encoder)
    content = bytearray(path.read_bytes())
    broken = content.copy()
    broken[20:40] = b"?" * 20
    path.write_bytes(broken)
    with pytest.raises(ArgumentError, match="header of the token file"):
        open_token_file(path, encoder.vocab_size, 0)
    content[-8 * 15 : -8 * 14] = struct.pack("<q", -5)
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="document index"):
        open_token_file(path, encoder.vocab_size, 0)


def test_a_vocabulary_that_is_too_small(tmp_path: Path, encoder: TextEncoder):
    path = write(tmp_path / "a.bin", ["alpha"], encoder)
    highest = max(encoder.encode("alpha"))
    open_token_file(path, highest + 1, 0)
    with pytest.raises(ArgumentError, match=f"has token {highest}, but the vocabulary"):
        open_token_file(path, highest, 0)
    raw = tmp_path / "raw.bin"
    np.array([5, 700, 2], np.uint16).tofile(raw)
    with pytest.raises(ArgumentError, match="has token 700"):
        open_token_file(raw, 700, 0)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ArgumentError, match="No such file"):
        open_token_file(tmp_path / "a.bin", 10, 0)


# ---- other programs' files -----------------------------------------------------------------------


def test_raw_files_end_documents_at_eos(tmp_path: Path):
    path = tmp_path / "raw.bin"
    np.array([4, 5, 0, 0, 6, 7], np.uint16).tofile(path)
    file = open_token_file(path, 10, 0)
    assert file.tokens.tolist() == [4, 5, 0, 0, 6, 7] and file.offsets.tolist() == [0, 3, 4, 6]
    assert open_token_file(path, 10, None).offsets.tolist() == [0, 6]
    assert len(set(file.hashes.tolist())) == 3


def test_raw_files_of_odd_sizes(tmp_path: Path):
    path = tmp_path / "raw.bin"
    path.write_bytes(b"abc")
    with pytest.raises(ArgumentError, match="has 3 bytes"):
        open_token_file(path, 1 << 16, 0)
    path.write_bytes(b"")
    assert open_token_file(path, 10, 0).offsets.tolist() == [0]


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, np.uint16), (20240801, np.uint32)])
def test_llmc_files(tmp_path: Path, magic: int, dtype: type):
    path = tmp_path / "a.bin"
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, 4
    path.write_bytes(header.tobytes() + np.array([0, 7, 0, 8], dtype).tobytes())
    file = open_token_file(path, 10, 0)
    assert file.tokens.tolist() == [0, 7, 0, 8] and file.offsets.tolist() == [0, 1, 3, 4]
    with open(path, "ab") as more:
        more.write(b"\0\0")
    with pytest.raises(ArgumentError, match="layout needs"):
        open_token_file(path, 10, 0)


# ---- the cache -----------------------------------------------------------------------------------


def make_text(tmp_path: Path, count: int = 200) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(random_texts(count)))
    return path


def tokenize(path: Path, encoder: TextEncoder, limit: int = 100) -> token_file.TokenFile:
    return tokenize_sources(find_sources([str(path)]), encoder, "text", limit)


def test_a_text_is_tokenized_once(tmp_path, cache, encoder, monkeypatch):
    path = make_text(tmp_path)
    first = tokenize(path, encoder)
    monkeypatch.setattr(token_file, "write_token_file", None)  # must not be called
    assert tokenize(path, encoder).path == first.path
    path.touch()
    assert tokenize(path, encoder).sha256 == first.sha256


def test_another_text_or_tokenizer_is_another_file(tmp_path, cache, encoder):
    path = make_text(tmp_path)
    first = tokenize(path, encoder).path
    path.write_text("changed")
    second = tokenize(path, encoder).path
    assert first != second
    other = TextEncoder(small_tokenizer())
    other.digest = "another"
    assert tokenize(path, other).path not in (first, second)


@pytest.mark.parametrize("place", [10, HEAD_BYTES + 5, -3])
def test_a_damaged_cached_file_is_written_again(tmp_path, cache, encoder, place):
    path = make_text(tmp_path)
    file = tokenize(path, encoder)
    before = file.path.read_bytes()
    damaged = bytearray(before)
    damaged[place] ^= 0xFF
    if place == -3:
        damaged = damaged[:-3]
    file.path.write_bytes(damaged)
    assert tokenize(path, encoder).path.read_bytes() == before


def test_skipped_samples_are_told_again(tmp_path, cache, encoder, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "alpha"}\nbad\n')
    tokenize(path, encoder)
    caplog.clear()
    tokenize(path, encoder)
    assert f"1 sample is skipped, for example {path}:2" in caplog.text
    with pytest.raises(ArgumentError, match="data.max_bad_samples=0"):
        tokenize(path, encoder, limit=0)


def test_long_names_of_bad_samples_fit_into_the_header(tmp_path, cache, encoder):
    folder = tmp_path / ("😀" * 60) / ("文" * 80)
    folder.mkdir(parents=True)
    path = folder / "a.jsonl"
    path.write_text('{"text": "good"}\n' + "bad\n" * 20)
    header = tokenize(path, encoder).header
    assert header["bad_samples"] == 20 and 1 <= len(header["bad_named"]) < 10


def test_an_error_leaves_no_file(tmp_path, cache, encoder):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "alpha"}\nbad\n')
    with pytest.raises(ArgumentError):
        tokenize(path, encoder, limit=0)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_a_full_disk_is_said(tmp_path, cache, encoder, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match=r"No space left[\s\S]*FULGURITE_CACHE_DIR"):
        tokenize(make_text(tmp_path), encoder)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written(tmp_path, encoder, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FULGURITE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert len(tokenize(make_text(tmp_path), encoder).hashes) == 200


def _tokenize(path: str) -> str:
    return tokenize(Path(path), TextEncoder(small_tokenizer())).sha256


def test_many_processes_tokenize_once(tmp_path, cache):
    path = str(make_text(tmp_path))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.map(_tokenize, [path] * 4, chunksize=1)
    assert len(set(found)) == 1
    assert sorted(file.suffix for file in cache.iterdir()) == [".bin", ".lock"]


def _tokenize_half(path: str, reached: Any) -> None:
    """Tokenize, and wait for the end in the middle."""
    real = token_file.read_documents

    def slowly(*arguments: Any) -> Iterator[Document]:
        for number, document in enumerate(real(*arguments)):
            yield document
            if number == 50:
                reached.set()
                time.sleep(600)

    token_file.read_documents = slowly
    encoding.BATCH_CHARS = 100
    _tokenize(path)


def test_a_killed_process_leaves_no_half_file(tmp_path, cache, encoder):
    path = make_text(tmp_path)
    context = multiprocessing.get_context("fork")
    reached = context.Event()
    process = context.Process(target=_tokenize_half, args=(str(path), reached))
    process.start()
    assert reached.wait(60)
    assert list(cache.glob(".*.partial")) and not list(cache.glob("*.bin"))
    process.kill()
    process.join()
    assert not list(cache.glob("*.bin"))
    assert len(tokenize(path, encoder).hashes) == 200
    assert sorted(file.suffix for file in cache.iterdir()) == [".bin", ".lock"]
