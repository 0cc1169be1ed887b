"""What lies before the data of a GGUF file: bytes in; metadata and the list of tensors out.

    "GGUF", version, tensor count, key count
    key, type, value ...
    name, dimensions, type, offset ...
    padding, data

All numbers are little-endian. Dimensions are stored innermost first. Nothing in the file is code, and
nothing is believed: a length that points past the end is reported as a truncated file before
anything is read there, and what contradicts itself is a `WeightsError`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

from fulgurite.errors import WeightsError
from fulgurite.quant.pointer import BEGINNING, refuse_pointer

VERSIONS = (2, 3)
FIXED_BYTES = 24  # up to and with the key count
MOST_DIMENSIONS = 4  # ggml's own limit
DEEPEST_ARRAY = 8  # files there are hold plain arrays; arrays of arrays are allowed
STRING, ARRAY = 8, 9
# Value types: code -> struct format.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class GGUFType(NamedTuple):
    """How a tensor is stored: `size` bytes hold a block of `block` numbers."""

    name: str
    block: int
    size: int


# Tensor types by code.
TYPES: dict[int, GGUFType] = {
    0: GGUFType("F32", 1, 4),
    1: GGUFType("F16", 1, 2),
    2: GGUFType("Q4_0", 32, 18),
    3: GGUFType("Q4_1", 32, 20),
    6: GGUFType("Q5_0", 32, 22),
    7: GGUFType("Q5_1", 32, 24),
    8: GGUFType("Q8_0", 32, 34),
    9: GGUFType("Q8_1", 32, 40),
    10: GGUFType("Q2_K", 256, 84),
    11: GGUFType("Q3_K", 256, 110),
    12: GGUFType("Q4_K", 256, 144),
    13: GGUFType("Q5_K", 256, 176),
    14: GGUFType("Q6_K", 256, 210),
    15: GGUFType("Q8_K", 256, 292),
    16: GGUFType("IQ2_XXS", 256, 66),
    17: GGUFType("IQ2_XS", 256, 74),
    18: GGUFType("IQ3_XXS", 256, 98),
    19: GGUFType("IQ1_S", 256, 50),
    20: GGUFType("IQ4_NL", 32, 18),
    21: GGUFType("IQ3_S", 256, 110),
    22: GGUFType("IQ2_S", 256, 82),
    23: GGUFType("IQ4_XS", 256, 136),
    24: GGUFType("I8", 1, 1),
    25: GGUFType("I16", 1, 2),
    26: GGUFType("I32", 1, 4),
    27: GGUFType("I64", 1, 8),
    28: GGUFType("F64", 1, 8),
    29: GGUFType("IQ1_M", 256, 56),
    30: GGUFType("BF16", 1, 2),
    34: GGUFType("TQ1_0", 256, 54),
    35: GGUFType("TQ2_0", 256, 66),
    39: GGUFType("MXFP4", 32, 17),
    40: GGUFType("NVFP4", 64, 36),
    41: GGUFType("Q1_0", 128, 18),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file and what it is; `shape` is outermost first."""

    name: str
    shape: tuple[int, ...]
    type: GGUFType
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """All a file says before its data."""

    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]


def read_header(data: memoryview, where: str) -> Header:
    """The header of a whole file's bytes; `where` names the file in errors."""
    refuse_pointer(bytes(data[: len(BEGINNING)]), where)
    cursor = _Cursor(data, where)
    version, tensor_count, key_count = _read_counts(cursor)
    if version not in VERSIONS:
        raise WeightsError(f"GGUF version {version} is not supported", where=where)
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.damaged(f"the key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.integer("I"))
    entries = [_read_entry(cursor) for _ in range(tensor_count)]
    alignment = _alignment(metadata, cursor)
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            raise cursor.damaged(f"the tensor {entry.name!r} is there twice")
        tensors[entry.name] = _place(entry, base, alignment, cursor)
    return Header(metadata, tensors)


def _read_counts(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    if cursor.size < FIXED_BYTES:
        raise cursor.truncated(FIXED_BYTES)
    if bytes(cursor.take(4)) != b"GGUF":
        raise WeightsError(
            "this is no GGUF file: those begin with these four letters",
            where=cursor.where,
            next="download it again; a page that says why it can't be had may have been saved",
        )
    version = cursor.integer("I")
    if version and version % 2**16 == 0:
        raise WeightsError(
            "the file is big-endian, which is not supported",
            where=cursor.where,
            next="use the little-endian file; nearly all published ones are",
        )
    return version, cursor.integer("Q"), cursor.integer("Q")


class _Entry(NamedTuple):
    """A tensor as the header lists it; `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    code: int
    offset: int


def _read_entry(cursor: _Cursor) -> _Entry:
    name, count = cursor.string(), cursor.integer("I")
    if count > MOST_DIMENSIONS:
        raise cursor.damaged(f"{name} has {count} dimensions; there are at most {MOST_DIMENSIONS}")
    shape = tuple(reversed([cursor.integer("Q") for _ in range(count)]))
    return _Entry(name, shape, cursor.integer("I"), cursor.integer("Q"))


def _alignment(metadata: dict[str, object], cursor: _Cursor) -> int:
    alignment = metadata.get("general.alignment", 32)
    # From 8 up, by the format's text: a number of any dtype can then be read where it lies.
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment!r}, no power of two from 8 up")
    return alignment


def _place(entry: _Entry, base: int, alignment: int, cursor: _Cursor) -> TensorInfo:
    """Where the tensor lies, after all that could be wrong with its entry."""
    name, shape = entry.name, entry.shape
    if entry.code not in TYPES:
        raise WeightsError(f"{name} has the unknown GGUF type {entry.code}", where=cursor.where)
    type = TYPES[entry.code]
    columns = shape[-1] if shape else 1
    if columns % type.block:
        raise cursor.damaged(
            f"{name} has rows of {columns}, no multiple of its blocks of {type.block}"
        )
    if math.prod(max(size, 1) for size in shape) >= 2**63:
        raise cursor.damaged(f"{name} has the impossible shape {list(shape)}")
    if entry.offset % alignment:
        raise cursor.damaged(
            f"{name} is misaligned: it starts at {entry.offset}, no multiple of {alignment}"
        )
    start, size = base + entry.offset, math.prod(shape) // type.block * type.size
    if start + size > cursor.size:
        raise cursor.truncated(start + size)
    return TensorInfo(name, shape, type, start, size)


class _Cursor:
    """Reads values one after the other, never past the end."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.data = data
        self.size = len(data)
        self.where = where
        self.at = 0

    def truncated(self, needed: int) -> WeightsError:
        return WeightsError(
            f"the file is cut short: it has {self.size} bytes and needs at least {needed}",
            where=self.where,
            next="download it again",
        )

    def damaged(self, what: str) -> WeightsError:
        return WeightsError(
            f"the file is damaged: {what}", where=self.where, next="download it again"
        )

    def take(self, count: int) -> memoryview:
        end = self.at + count
        if end > self.size:
            raise self.truncated(end)
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def scalar(self, code: str) -> int | float | bool:
        format = struct.Struct("<" + code)
        number: int | float | bool = format.unpack(self.take(format.size))[0]
        return number

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Vocabularies have a hundred thousand of them, so this is one tight loop."""
        length_at, found, at, data = struct.Struct("<Q").unpack_from, [], self.at, self.data
        for _ in range(count):
            start = at + 8
            if start > self.size:
                raise self.truncated(start)
            at = start + length_at(data, at)[0]
            if at > self.size:
                raise self.truncated(at)
            found.append(bytes(data[start:at]))
        self.at = at
        try:
            return [text.decode("utf-8") for text in found]
        except UnicodeDecodeError as error:
            raise self.damaged(str(error)) from error

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(1)
        return self.scalar(self._code(kind))

    def _array(self, depth: int) -> list[object]:
        if depth > DEEPEST_ARRAY:
            raise self.damaged(f"arrays lie more than {DEEPEST_ARRAY} deep in each other")
        kind, count = self.integer("I"), self.integer("Q")
        if kind == STRING:
            return list(self.strings(count))
        if kind == ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        code = self._code(kind)
        piece = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", piece))

    def _code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise WeightsError(f"unknown GGUF value type {kind}", where=self.where)
        return SCALARS[kind]
