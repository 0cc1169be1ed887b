"""Chat data: JSONL of conversations in, packed samples with a loss on answers out.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"messages": [...], "tools": [...]}                  tools go to the chat template
    {"prompt": "2 + 2 =", "completion": " 4"}            plain text, without a template
    {"prompt": [messages], "completion": [messages]}     answers of the prompt are not learned

An assistant's message with `"weight": 0` is not learned. What can't be used is skipped and counted with
its line, up to `data.max_bad_samples`. An example longer than a row is cut at its end; if that leaves
nothing to learn, it is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.train.config import TrainConfig
from fulgurite.train.data.dataset import SPLITS, VALIDATION
from fulgurite.train.data.encoding import token_byte_lengths
from fulgurite.train.data.records import BadSamples, Record, read_json, read_json_lines, read_rows
from fulgurite.train.data.sources import JSONL, PARQUET, RECORD_KINDS, find_sources, hash_file
from fulgurite.train.tune.chat_tokens import EncodedText, encode_chat, encode_completion
from fulgurite.train.tune.rows import Example, RowDataset, make_example, pack

T = TypeVar("T")


def open_chat_dataset(config: TrainConfig, tokenizer: Tokenizer, split: str) -> RowDataset:
    """The samples of `train` or `validation`."""
    length = require_length(config)
    bad = BadSamples(config.data.max_bad_samples)
    records, hashes = read_split(config, split, bad)
    groups = convert_records(records, lambda fields: encode_record(tokenizer, fields), bad)
    examples: list[Example] = []
    num_cut = 0
    for record, texts in groups:
        for text in texts:
            whole = make_example(text.token_ids, text.is_answer)
            num_cut += len(whole) > length
            example = whole.truncated(length)
            if example.num_labels:
                examples.append(example)
            else:
                bad.skip(record.where, f"no answer within the first {length} tokens")
    bad.report()
    if num_cut:
        LOG.warning(
            "%d of %d examples have more than %d tokens and are cut at their ends",
            num_cut,
            len(examples),
            length,
        )
    if not examples:
        raise nothing_to_learn(
            config, split, bad, '{"messages": [...]} or {"prompt": ..., "completion": ...}'
        )
    rows = pack([len(example) for example in examples], length)
    pad_id = tokenizer.stop_ids[0] if tokenizer.stop_ids else 0
    return RowDataset(examples, rows, length, pad_id, hashes, token_byte_lengths(tokenizer))


def nothing_to_learn(config: TrainConfig, split: str, bad: BadSamples, form: str) -> ArgumentError:
    """The error for a split without an example; `form` is that of a line."""
    advice = f"lines are {form}"
    if split == VALIDATION and not config.data.validation and not bad.count:
        advice = (
            "add lines to data.train, of which one is held out, or name files in data.validation"
        )
    return ArgumentError(
        f"there is nothing to learn in the {split} data",
        where="\n".join(bad.named),
        next=bad.advice or advice,
    )


def require_length(config: TrainConfig) -> int:
    length = config.data.sequence_length
    if length is None or length < 2:
        raise ArgumentError(f"data.sequence_length is {length}", next="set it to at least 2")
    return length


def encode_record(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> list[EncodedText]:
    """The examples of one line."""
    values = {"tools": fields["tools"]} if fields.get("tools") else {}
    if "messages" in fields:
        return encode_chat(tokenizer, fields["messages"], **values)
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str) and prompt and completion:
        return [encode_completion(tokenizer, prompt, completion)]
    if isinstance(prompt, list) and isinstance(completion, list) and completion:
        return encode_chat(tokenizer, [*prompt, *completion], len(prompt), **values)
    is_pair = "chosen" in fields and "rejected" in fields
    raise ArgumentError(
        "neither `messages` nor `prompt` and `completion`",
        next="set tune.task=dpo to train on pairs" if is_pair else None,
    )


# ---- lines -----------------------------------------------------------------------------------------


def read_split(
    config: TrainConfig, split: str, bad: BadSamples
) -> tuple[list[Record], dict[str, str]]:
    """The lines of a split and the hashes of their files. Lines are held out by their own hash."""
    if split not in SPLITS:
        raise ArgumentError(f"there is no split {split!r}", next=f"use {' or '.join(SPLITS)}")
    data = config.data
    own = split == VALIDATION and bool(data.validation)
    records, hashes = read_records(data.validation if own else data.train, bad)
    if not data.validation:
        held_out = [hash_record(record) % data.holdout == 0 for record in records]
        if not any(held_out) or all(held_out):  # few lines: the lowest hash
            lowest = min(records, key=hash_record, default=None)
            held_out = [record is lowest and len(records) > 1 for record in records]
        wanted = split == VALIDATION
        records = [r for r, held in zip(records, held_out, strict=True) if held == wanted]
    return records, hashes


def hash_record(record: Record) -> int:
    return int.from_bytes(record.digest[:8], "big")


def read_records(patterns: Sequence[str], bad: BadSamples) -> tuple[list[Record], dict[str, str]]:
    """All objects of the files, and the SHA-256 of each file."""
    records: list[Record] = []
    hashes: dict[str, str] = {}
    for path, kind in find_record_files(patterns):
        hashes[str(path)] = hash_file(path).hex()
        if kind == PARQUET:
            records += read_rows(path, bad)
        else:
            records += read_json_lines(path, bad) if kind == JSONL else read_json(path, bad)
    return records, hashes


def find_record_files(patterns: Sequence[str]) -> list[tuple[Path, str]]:
    """The files of records and their kinds; of folders, only those. ArgumentError for another file."""
    found = []
    for source in find_sources(patterns, records_only=True):
        if source.path is None or source.kind not in RECORD_KINDS:
            raise ArgumentError(
                f"{source.name} has no records", next="name .jsonl or .parquet files in data.train"
            )
        found.append((source.path, source.kind))
    return found


def convert_records(
    records: Sequence[Record], convert: Callable[[Mapping[str, Any]], T], bad: BadSamples
) -> Iterator[tuple[Record, T]]:
    """`convert` of each record's fields; one that raises an ArgumentError is skipped."""
    for record in records:
        try:
            yield record, convert(record.fields)
        except ArgumentError as error:
            bad.advice = error.details.get("next") or bad.advice
            bad.skip(record.where, error.what)
