"""Files of records: a path in, JSON objects or rows out, each with its place; what can't be read is counted.

    JSONL        one object a line          text also `.gz`
    JSON         one list of objects
    parquet      one object a row

`BadSamples` counts and names what is skipped, as `file:line`; above a limit the run stops.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.quant.optional_package import import_optional

NUM_NAMED = 10  # bad samples that are named in messages


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
        LOG.info("skipped a sample: %s", message)
        if self.count > self.limit:
            raise ArgumentError(
                f"{self.count} samples can't be read, more than data.max_bad_samples={self.limit}",
                where="\n".join(self.named),
                next=self.advice or "repair or remove them, or raise data.max_bad_samples",
            )

    def report(self) -> None:
        """Warn of what was skipped, when all samples are read."""
        if self.count:
            LOG.warning("%s", describe_skipped(self.count, self.named))


def describe_skipped(count: int, named: Sequence[str]) -> str:
    """How many samples are skipped, and the first of them."""
    what = "1 sample is" if count == 1 else f"{count} samples are"
    return f"{what} skipped, for example {'; '.join(named[:3])}"


@dataclass(frozen=True)
class Record:
    """One object of a file, where it came from, and its text; None: a row of a table."""

    fields: Mapping[str, Any]
    where: str
    text: bytes | None = None

    @property
    def digest(self) -> bytes:
        """A hash of the content."""
        text = self.text
        if text is None:
            text = json.dumps(self.fields, sort_keys=True, default=str).encode()
        return hashlib.sha256(text).digest()


def open_file(path: Path, unpack: bool = True) -> IO[bytes]:
    try:
        if unpack and path.name.lower().endswith(".gz"):
            return gzip.open(path, "rb")  # type: ignore[return-value]
        return open(path, "rb")
    except OSError as error:
        raise ArgumentError(
            f"can't read {path}: {error.strerror}", next="check the path and its permissions"
        ) from error


def read_lines(path: Path, bad: BadSamples) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1. A damaged archive ends where it is damaged."""
    number = 0
    with open_file(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        except (OSError, EOFError, zlib.error) as error:
            bad.skip(f"{path}:{number + 1}", f"the rest of the file can't be read ({error})")


def read_json_lines(path: Path, bad: BadSamples) -> Iterator[Record]:
    """The objects of a JSONL file."""
    for number, line in read_lines(path, bad):
        where, text = f"{path}:{number}", line.rstrip(b"\r\n")
        if not text.strip():
            continue
        try:
            row = json.loads(text.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            bad.skip(where, f"not JSON in UTF-8 ({error})")
            continue
        if isinstance(row, dict):
            yield Record(row, where, text)
        else:
            bad.skip(where, f"not a JSON object but {type(row).__name__}")


def is_json_list(path: Path) -> bool:
    """Whether a JSON file is one list."""
    with open_file(path) as file:
        try:
            start = file.read(256)
        except (OSError, EOFError, zlib.error):  # who reads it counts it as damaged
            return False
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def read_json(path: Path, bad: BadSamples) -> Iterator[Record]:
    """The objects of a JSON file: of its list, or one a line."""
    if not is_json_list(path):
        yield from read_json_lines(path, bad)
        return
    try:
        rows = json.loads(b"".join(line for _, line in read_lines(path, bad)))
    except (ValueError, RecursionError) as error:
        bad.skip(str(path), f"not JSON in UTF-8 ({error})")
        return
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            yield Record(row, f"{path}:{number}")
        else:
            bad.skip(f"{path}:{number}", f"not a JSON object but {type(row).__name__}")


def read_rows(path: Path, bad: BadSamples, field: str | None = None) -> Iterator[Record]:
    """The rows of a parquet file; of the column with one field only, if `field` is given."""
    parquet: Any = import_optional("pyarrow.parquet", f"reading {path}", "pyarrow")
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        bad.skip(str(path), f"not a parquet file ({error})")
        return
    columns = None if field is None else [_find_column(path, file.schema_arrow.names, field)]
    row = 0
    try:
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for fields in batch.to_pylist():
                row += 1
                yield Record(fields, f"{path}:{row}")
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):  # too many bad samples
            raise
        bad.skip(f"{path}:{row + 1}", f"the rest of the file can't be read ({error})")


def _find_column(path: Path, names: list[str], field: str) -> str:
    """The column that a field is in: `doc` for `doc.text`."""
    column = field if field in names else field.partition(".")[0]
    if column not in names:
        raise ArgumentError(
            f"{path} has no column {field!r}; columns: {', '.join(names)}",
            next="set data.text_field to the column with the text",
        )
    return column
