"""`open_dataset`: splits don't overlap and lose nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fulgurite.errors import ArgumentError
from fulgurite.train.data import open_dataset
from fulgurite.train.data.encoding import TextEncoder
from fulgurite.train.data.packing import PackedDataset
from tests.train.data.samples import data_config, random_texts, small_tokenizer


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(dataset: PackedDataset) -> list[str]:
    """The documents of a dataset, from its samples."""
    tokens = np.concatenate([dataset.sample(n).tokens for n in range(len(dataset))])
    used = [*tokens[: dataset.num_tokens - 1].tolist(), 0]
    text = small_tokenizer().decode(used, skip_special_tokens=False)
    return text.split("<|endoftext|>")[:-1]


def open_both(config) -> tuple[list[str], list[str]]:
    tokenizer = small_tokenizer()
    train, validation = (open_dataset(config, tokenizer, s) for s in ("train", "validation"))
    return texts_of(train), texts_of(validation)


def test_each_document_is_in_one_split(tmp_path: Path):
    texts = random_texts(300)
    train, validation = open_both(data_config(write_rows(tmp_path / "a.jsonl", texts), holdout=10))
    assert 15 <= len(validation) <= 50 and not set(train) & set(validation)
    assert sorted(train + validation) == sorted(texts)


def test_copies_of_a_document_stay_together(tmp_path: Path):
    texts = random_texts(40) * 3
    train, validation = open_both(data_config(write_rows(tmp_path / "a.jsonl", texts), holdout=5))
    assert validation and not set(train) & set(validation)
    assert len(train) + len(validation) == 120


def test_the_split_depends_on_documents_not_on_files(tmp_path: Path):
    texts = random_texts(100)
    one = open_both(data_config(write_rows(tmp_path / "a.jsonl", texts), holdout=10))
    write_rows(tmp_path / "b.jsonl", texts[:50])
    write_rows(tmp_path / "c.jsonl", texts[50:])
    config = data_config(tmp_path / "b.jsonl", tmp_path / "c.jsonl", holdout=10)
    assert open_both(config) == one


@pytest.mark.parametrize("count", [2, 3])
def test_few_documents_leave_one_for_validation(tmp_path: Path, count: int):
    path = write_rows(tmp_path / "a.jsonl", random_texts(count))
    train, validation = open_both(data_config(path, holdout=1000))
    assert len(train) == count - 1 and len(validation) == 1


def test_a_single_document_is_cut(tmp_path: Path):
    text = " ".join(random_texts(50))
    train, validation = open_both(data_config(write_rows(tmp_path / "a.jsonl", [text])))
    assert "".join(train + validation).replace("<|endoftext|>", "")[-30:] == text[-30:]
    tokenizer = small_tokenizer()
    config = data_config(tmp_path / "a.jsonl")
    total = sum(open_dataset(config, tokenizer, s).num_tokens for s in ("train", "validation"))
    assert total == len(TextEncoder(tokenizer).encode(text)) + 1


def test_validation_files_of_their_own(tmp_path: Path):
    train_texts, other = random_texts(30), random_texts(5, seed=1)
    write_rows(tmp_path / "a.jsonl", train_texts)
    write_rows(tmp_path / "b.jsonl", other)
    config = data_config(tmp_path / "a.jsonl", validation=(str(tmp_path / "b.jsonl"),))
    assert open_both(config) == (train_texts, other)


def test_text_and_token_files_together(tmp_path: Path):
    np.array([5, 6, 0, 7, 8, 0], np.uint16).tofile(tmp_path / "t.bin")
    write_rows(tmp_path / "a.jsonl", ["alpha beta"])
    config = data_config(
        tmp_path / "a.jsonl", tmp_path / "t.bin", validation=(str(tmp_path / "a.jsonl"),)
    )
    train = open_dataset(config, small_tokenizer(), "train")
    assert train.num_documents == 3
    assert set(train.hashes()) == {"sources", "tokenizer", "tokens", str(tmp_path / "t.bin")}


def test_hashes_follow_the_content(tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", random_texts(10))
    before = open_dataset(data_config(path), small_tokenizer(), "train").hashes()
    assert before == open_dataset(data_config(path), small_tokenizer(), "train").hashes()
    write_rows(path, random_texts(11))
    after = open_dataset(data_config(path), small_tokenizer(), "train").hashes()
    assert before["tokens"] != after["tokens"] and before["sources"] != after["sources"]
    assert before["tokenizer"] == after["tokenizer"]


def test_bytes_per_token_are_those_of_the_text(tmp_path: Path):
    texts = random_texts(20)
    path = write_rows(tmp_path / "a.jsonl", texts)
    config = data_config(path, document_mask=False, validation=(str(path),))
    data = open_dataset(config, small_tokenizer(), "train")
    first = small_tokenizer().decode(data.sample(0).tokens[:1].tolist())
    num_bytes = sum(len(text.encode()) for text in texts) - len(first.encode())
    assert data.mean_bytes_per_token(10**6) == pytest.approx(num_bytes / (data.num_tokens - 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(sequence_length=None), "sequence_length is None"),
        (dict(sequence_length=0), "at least 1"),
        (dict(holdout=1), "at least 2"),
    ],
)
def test_settings_that_are_not_possible(tmp_path: Path, fields, message: str):
    path = write_rows(tmp_path / "a.jsonl", random_texts(10))
    with pytest.raises(ArgumentError, match=message):
        open_dataset(data_config(path, **fields), small_tokenizer(), "train")


def test_an_unknown_split(tmp_path: Path):
    with pytest.raises(ArgumentError, match="no split 'test'"):
        open_dataset(data_config("demo"), small_tokenizer(), "test")


@pytest.mark.parametrize("content", ["", '{"text": ""}\n', "\n\n"])
def test_files_without_text(tmp_path: Path, content: str):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ArgumentError, match="no text in"):
        open_dataset(data_config(path), small_tokenizer(), "train")


def test_one_word_is_too_little(tmp_path: Path):
    with pytest.raises(ArgumentError, match="too few to train on"):
        open_dataset(
            data_config(write_rows(tmp_path / "a.jsonl", ["x"])), small_tokenizer(), "train"
        )


def test_a_tokenizer_without_eos(tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", random_texts(3))
    tokenizer = small_tokenizer()
    bare = type(tokenizer)(tokenizer.backend, None, (), None, {})
    with pytest.raises(ArgumentError, match="no eos token"):
        open_dataset(data_config(path), bare, "train")
