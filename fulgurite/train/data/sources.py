"""Where text comes from: names of the config in, documents out.

    patterns ─▶ find_sources ─▶ [Source] ─▶ read_documents ─▶ Document, Document, ...
                                             └▶ BadSamples: what was skipped, as file:line

A document is one file of text, one row of JSONL or parquet, or one part of a long text file
(`_read_text`). Files are read in the order of their names, so the order of documents depends on nothing
else. What can't be read is skipped, counted and named; above a limit the run stops.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.quant.optional_package import import_optional
from fulgurite.train.data.demo import demo_documents
from fulgurite.train.data.token_format import is_token_file

DEMO = "demo"
TEXT, JSONL, PARQUET, TOKENS = "text", "jsonl", "parquet", "tokens"
SUFFIX_KINDS = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET, ".bin": TOKENS}
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
NUM_NAMED = 10  # bad samples that are named in messages


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


@dataclass
class BadSamples:
    """Samples that were skipped.

    Attributes:
        limit: how many may be skipped; one more raises.
        count: how many were.
        named: the first ones, as `file:line: why`.
        advice: what to do about them, if it is known.
    """

    limit: int
    count: int = 0
    named: list[str] = field(default_factory=list)
    advice: str | None = None

    def skip(self, where: str, why: str) -> None:
        """Count a sample; raise above the limit."""
        self.count += 1
        message = f"{where}: {why}"
        if len(self.named) < NUM_NAMED:
            self.named.append(message)
        LOG.warning("skipped a sample: %s", message)
        if self.count > self.limit:
            raise ArgumentError(
                f"{self.count} samples can't be read, more than data.max_bad_samples={self.limit}",
                where="\n".join(self.named),
                next=self.advice or "repair or remove them, or raise data.max_bad_samples",
            )


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


def find_sources(patterns: Sequence[str]) -> list[Source]:
    """The files of all patterns, each once, in the order of patterns and of names."""
    if not patterns:
        raise ArgumentError("there are no files to read", next=f"name files, folders or {DEMO!r}")
    found: dict[str, Source] = {}
    for pattern in patterns:
        for source in _expand(pattern):
            key = source.name if source.path is None else os.path.realpath(source.path)
            found.setdefault(key, source)
    return list(found.values())


def _expand(pattern: str) -> list[Source]:
    if pattern == DEMO:
        return [Source(TEXT)]
    path = Path(pattern).expanduser()
    if path.is_dir():
        sources = _search_folder(path)
        next_step = (
            "put text, .jsonl, .parquet or token files into it, or name its files by a pattern"
        )
    else:
        names = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        folders = [Path(name) for name in names if Path(name).is_dir()]
        sources = [Source(_kind_of(_check_suffix(file)), file) for file in files]
        sources += [] if files else [one for folder in folders for one in _search_folder(folder)]
        next_step = (
            f"check the path; folders, patterns such as 'text/**/*.md' and {DEMO!r} work too"
        )
    if not sources:
        raise ArgumentError(f"no files to read at {pattern!r}", next=next_step)
    return sources


def _search_folder(folder: Path) -> list[Source]:
    """Files with known suffixes, in sub-folders too; hidden ones and foreign `.bin` files not."""
    sources = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        kind = _kind_of(path)
        known = _suffix_of(path) in TEXT_SUFFIXES or kind in (JSONL, PARQUET)
        if known or (kind == TOKENS and is_token_file(path)):
            sources.append(Source(kind, path))
    return sources


def _suffix_of(path: Path) -> str:
    """The suffix below `.gz`."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _kind_of(path: Path) -> str:
    return SUFFIX_KINDS.get(_suffix_of(path), TEXT)


def _check_suffix(path: Path) -> Path:
    """Raise for a packed file that is read by memory map or by columns; warn of JSON."""
    if _suffix_of(path) == ".json":
        LOG.warning("%s is read as one text; records are read from .jsonl, one a line", path)
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
            digest = _hash_file(source.path)
        total.update(source.kind.encode() + digest)
    return total.hexdigest()


def _hash_file(path: Path) -> bytes:
    sha = hashlib.sha256()
    with _open_file(path, unpack=False) as file:
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
            documents = _read_jsonl(source.path, text_field, bad)
        elif source.kind == PARQUET:
            documents = _read_parquet(source.path, text_field, bad)
        else:
            documents = _read_text(source.path, bad)
        yield from (document for document in documents if document.text)


def _open_file(path: Path, unpack: bool = True) -> IO[bytes]:
    try:
        if unpack and path.name.lower().endswith(".gz"):
            return gzip.open(path, "rb")  # type: ignore[return-value]
        return open(path, "rb")
    except OSError as error:
        raise ArgumentError(
            f"can't read {path}: {error.strerror}", next="check the path and its permissions"
        ) from error


def _read_lines(path: Path, bad: BadSamples) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1. A damaged archive ends where it is damaged."""
    number = 0
    with _open_file(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        except (OSError, EOFError, zlib.error) as error:
            bad.skip(f"{path}:{number + 1}", f"the rest of the file can't be read ({error})")


def _read_text(path: Path, bad: BadSamples) -> Iterator[Document]:
    """Documents end at a separator line; after 64 KiB, at a blank line; after 128 KiB, at any line."""
    part: list[bytes] = []
    size, first = 0, 1
    for number, line in _read_lines(path, bad):
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


def _read_jsonl(path: Path, text_field: str, bad: BadSamples) -> Iterator[Document]:
    for number, line in _read_lines(path, bad):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            bad.skip(where, f"not JSON in UTF-8 ({error})")
            continue
        if not isinstance(row, dict):
            bad.skip(where, f"not a JSON object but {type(row).__name__}")
        elif text_field not in row:
            fields = ", ".join(list(row)[:8]) or "none"
            bad.advice = suggest_field(row) or bad.advice
            bad.skip(where, f"no field {text_field!r} (data.text_field); fields: {fields}")
        else:
            yield from _check_text(row[text_field], where, bad)


def suggest_field(row: Mapping[str, Any]) -> str | None:
    """What to set for a record without the text field: a task that reads it, or the one text."""
    if "chosen" in row and "rejected" in row:
        return "set tune.task=dpo to train on pairs"
    if "messages" in row or ("prompt" in row and "completion" in row):
        return "set tune.task=chat to train on conversations"
    texts = [name for name, value in row.items() if isinstance(value, str)]
    return f"set data.text_field={texts[0]}" if len(texts) == 1 else None


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


def _read_parquet(path: Path, text_field: str, bad: BadSamples) -> Iterator[Document]:
    parquet: Any = import_optional("pyarrow.parquet", f"reading {path}", "pyarrow")
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        bad.skip(str(path), f"not a parquet file ({error})")
        return
    if text_field not in file.schema_arrow.names:
        raise ArgumentError(
            f"{path} has no column {text_field!r}; columns: {', '.join(file.schema_arrow.names)}",
            next="set data.text_field to the column with the text",
        )
    row = 0
    try:
        for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield from _check_text(value, f"{path}:{row}", bad)
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):  # too many bad samples
            raise
        bad.skip(f"{path}:{row + 1}", f"the rest of the file can't be read ({error})")
