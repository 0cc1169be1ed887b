"""Where text comes from: names of the config in, documents out.

    patterns ─▶ find_sources ─▶ [Source] ─▶ read_documents ─▶ Document, Document, ...
                                             └▶ BadSamples: what was skipped, as file:line

A document is one file of text, one row of JSONL or parquet, or one part of a long text file
(`_read_text`). Files are read in the order of their names, so the order of documents depends on nothing
else. What can't be read is skipped, counted and named; above a limit the run stops.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.train.data.demo import demo_documents
from fulgurite.train.data.records import (
    BadSamples,
    Record,
    is_json_list,
    open_file,
    read_json,
    read_json_lines,
    read_lines,
    read_rows,
)
from fulgurite.train.data.token_format import is_token_file

DEMO = "demo"
TEXT, JSONL, JSON, PARQUET, TOKENS = "text", "jsonl", "json", "parquet", "tokens"
RECORD_KINDS = (JSONL, JSON, PARQUET)
SUFFIX_KINDS = {
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".json": JSON,
    ".parquet": PARQUET,
    ".bin": TOKENS,
}
# What a folder is searched for. A file that is named itself may have any suffix.
# fmt: off
TEXT_SUFFIXES = frozenset([
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".py", ".pyi", ".c", ".h", ".cc",
    ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".js", ".ts", ".jsx", ".tsx", ".css",
    ".sh", ".sql", ".rb", ".pl", ".lua", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".csv", ".tsv",
    ".xml",
])
# fmt: on
PART_BYTES = 64 << 10  # a longer text file becomes several documents, split at a blank line
SEPARATOR = "<|endoftext|>"  # a line of it ends a document of a text file


@dataclass(frozen=True)
class Source:
    """A file to read, or the demo text (`path` None)."""

    kind: str
    path: Path | None = None

    @property
    def name(self) -> str:
        return DEMO if self.path is None else str(self.path)


@dataclass(frozen=True)
class Document:
    """A text and where it came from, as `file:line`."""

    text: str
    where: str


def no_text_error(
    patterns: Sequence[str], skipped: Sequence[str], advice: str | None = None
) -> ArgumentError:
    """The error for files without a text; `skipped` are the first samples that can't be read."""
    repair = advice or "repair these samples, or name other files"
    return ArgumentError(
        f"there is no text in {', '.join(patterns)}",
        where="\n".join(skipped) or None,
        next=repair if skipped else "name files with text",
    )


# ---- finding files -------------------------------------------------------------------------------


def find_sources(patterns: Sequence[str], records_only: bool = False) -> list[Source]:
    """The files of all patterns, each once, in the order of patterns and of names.

    `records_only`: of folders, only JSONL and parquet files.
    """
    if not patterns:
        raise ArgumentError("there are no files to read", next=f"name files, folders or {DEMO!r}")
    found: dict[str, Source] = {}
    for pattern in patterns:
        for source in _expand(pattern, records_only):
            key = source.name if source.path is None else os.path.realpath(source.path)
            found.setdefault(key, source)
    return list(found.values())


def _expand(pattern: str, records_only: bool) -> list[Source]:
    if pattern == DEMO:
        return [Source(TEXT)]
    path = Path(pattern).expanduser()
    if path.is_dir():
        sources = _search_folder(path, records_only)
        next_step = (
            "put text, .jsonl, .parquet or token files into it, or name its files by a pattern"
        )
    else:
        names = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        folders = [Path(name) for name in names if Path(name).is_dir()]
        sources = [Source(_kind_of(_check_suffix(file)), file) for file in files]
        for folder in folders if not files else ():
            sources += _search_folder(folder, records_only)
        next_step = (
            f"check the path; folders, patterns such as 'text/**/*.md' and {DEMO!r} work too"
        )
    if not sources:
        raise ArgumentError(f"no files to read at {pattern!r}", next=next_step)
    return sources


def _search_folder(folder: Path, records_only: bool) -> list[Source]:
    """Files with known suffixes, in sub-folders too; hidden ones and foreign `.bin` files not."""
    sources = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        kind = _kind_of(path)
        is_text = _suffix_of(path) in TEXT_SUFFIXES or (kind == TOKENS and is_token_file(path))
        if kind in (JSONL, PARQUET) or (is_text and not records_only):
            sources.append(Source(kind, path))
    return sources


def _suffix_of(path: Path) -> str:
    """The suffix below `.gz`."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _kind_of(path: Path) -> str:
    return SUFFIX_KINDS.get(_suffix_of(path), TEXT)


def _check_suffix(path: Path) -> Path:
    """Raise for a packed file that is read by memory map or by columns."""
    if path.name.lower().endswith((".bin.gz", ".parquet.gz")):
        raise ArgumentError(f"{path} is packed; only text is unpacked", next=f"gunzip {path}")
    return path


def hash_sources(sources: Sequence[Source]) -> str:
    """SHA-256 of the content of all sources, in order. Names don't count, only kinds."""
    total = hashlib.sha256()
    for source in sources:
        if source.path is None:
            content = hashlib.sha256()
            for title, text in demo_documents():
                content.update(f"{title}\0{text}\0".encode())
            digest = content.digest()
        else:
            digest = hash_file(source.path)
        total.update(source.kind.encode() + digest)
    return total.hexdigest()


def hash_file(path: Path) -> bytes:
    """SHA-256 of a file as it is stored."""
    sha = hashlib.sha256()
    with open_file(path, unpack=False) as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.digest()


# ---- reading -------------------------------------------------------------------------------------


def read_documents(
    sources: Sequence[Source], text_field: str, bad: BadSamples
) -> Iterator[Document]:
    """All documents that are not empty."""
    for source in sources:
        if source.path is None:
            documents: Iterator[Document] = (
                Document(text, name) for name, text in demo_documents()
            )
        elif source.kind == JSONL:
            documents = _read_fields(read_json_lines(source.path, bad), text_field, bad)
        elif source.kind == JSON and is_json_list(source.path):
            documents = _read_fields(read_json(source.path, bad), text_field, bad)
        elif source.kind == PARQUET:
            documents = _read_fields(read_rows(source.path, bad, text_field), text_field, bad)
        else:
            if source.kind == JSON:
                LOG.warning("%s is no list of objects, and read as one text", source.path)
            documents = _read_text(source.path, bad)
        yield from (document for document in documents if document.text)


def _read_text(path: Path, bad: BadSamples) -> Iterator[Document]:
    """Documents end at a separator line; after 64 KiB, at a blank line; after 128 KiB, at any line."""
    part: list[bytes] = []
    size, first = 0, 1
    for number, line in read_lines(path, bad):
        is_end = line.strip() == SEPARATOR.encode()
        if not is_end:
            part.append(line)
            size += len(line)
        is_full = size >= PART_BYTES and (not line.strip() or size >= 2 * PART_BYTES)
        if is_end or is_full:
            yield from _decode_part(part, f"{path}:{first}", bad)
            part, size, first = [], 0, number + 1
    yield from _decode_part(part, f"{path}:{first}", bad)


def _decode_part(part: list[bytes], where: str, bad: BadSamples) -> Iterator[Document]:
    try:
        yield Document(b"".join(part).decode("utf-8"), where)
    except UnicodeDecodeError as error:
        path, _, first = where.rpartition(":")
        line = int(first) + error.object.count(b"\n", 0, error.start)
        bad.skip(f"{path}:{line}", f"not UTF-8 ({error.reason})")


def suggest_field(row: Mapping[str, Any]) -> str | None:
    """What to set for a record without the text field: a task that reads it, or the one text."""
    if "chosen" in row and "rejected" in row:
        return "set tune.task=dpo to train on pairs"
    if "messages" in row or ("prompt" in row and "completion" in row):
        return "set tune.task=chat to train on conversations"
    texts = list(_text_fields(row))
    return f"set data.text_field={' or '.join(texts[:4])}" if texts else None


def _text_fields(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The names of all texts of a record, also of those inside its objects."""
    for name, value in row.items():
        if isinstance(value, str):
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping):
            yield from _text_fields(value, f"{prefix}{name}.")


def _read_fields(records: Iterator[Record], text_field: str, bad: BadSamples) -> Iterator[Document]:
    """The text of each record."""
    for record in records:
        try:
            text = find_field(record.fields, text_field)
        except KeyError:
            fields = ", ".join(list(record.fields)[:8]) or "none"
            bad.advice = suggest_field(record.fields) or bad.advice
            bad.skip(record.where, f"no field {text_field!r} (data.text_field); fields: {fields}")
        else:
            yield from _check_text(text, record.where, bad)


def find_field(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or of a field of its objects: `doc.text`; KeyError if there is none."""
    if name in fields:
        return fields[name]
    first, dot, rest = name.partition(".")
    inner = fields[first]
    if not dot or not isinstance(inner, Mapping):
        raise KeyError(name)
    return find_field(inner, rest)


def _check_text(text: object, where: str, bad: BadSamples) -> Iterator[Document]:
    """A document, if the value is text that UTF-8 can hold."""
    if not isinstance(text, str):
        bad.skip(where, f"the text is {type(text).__name__}, not a string")
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        bad.skip(where, "the text has half a surrogate pair")
        return
    yield Document(text, where)
