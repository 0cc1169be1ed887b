"""The header of a GGUF file: bytes in; metadata and the list of tensors out.

    "GGUF", version, tensor count, key count
    key, type, value ...
    name, dimensions, type, offset ...
    padding, data

All numbers are little-endian. Dimensions are stored innermost first. The file contains no code, and
its contents are not trusted. A length that points past the end raises a truncation error before
anything is read there; contradictions raise `WeightsError`.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fulgurite.errors import WeightsError
from fulgurite.quant.files.lfs_pointer import POINTER_PREFIX, reject_lfs_pointer

SUPPORTED_VERSIONS = (2, 3)
FIXED_HEADER_BYTES = 24  # magic, version, tensor count, key count
MAX_DIMENSIONS = 4  # the limit of ggml
MAX_ARRAY_DEPTH = 8  # known files have no nested arrays; the format allows them
STRING, ARRAY = 8, 9
# Metadata value types: type code -> struct format.
SCALAR_FORMATS = {
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
    """A tensor type: `block_bytes` bytes store a block of `block_size` elements."""

    name: str
    block_size: int
    block_bytes: int


# Tensor types by type code.
TENSOR_TYPES: dict[int, GGUFType] = {
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
    """A tensor of the file: type, shape (outermost first), file offset and size."""

    name: str
    shape: tuple[int, ...]
    type: GGUFType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The metadata and tensors of a file."""

    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]


def read_gguf_metadata(path: Path) -> dict[str, object]:
    """The metadata of a file, without its tensors."""
    with path.open("rb") as file:
        is_empty = not os.fstat(file.fileno()).st_size  # such a file can't be mapped
        data = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return read_gguf_header(memoryview(data), str(path)).metadata


def read_gguf_header(data: memoryview, where: str) -> GGUFHeader:
    """Parse the header of a file's bytes; `where` names the file in errors."""
    reject_lfs_pointer(bytes(data[: len(POINTER_PREFIX)]), where)
    cursor = _ByteReader(data, where)
    version, tensor_count, key_count = _read_counts(cursor)
    if version not in SUPPORTED_VERSIONS:
        raise WeightsError(f"GGUF version {version} is not supported", where=where)
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.read_string()
        if key in metadata:
            raise cursor.damaged_error(f"key {key!r} occurs twice")
        metadata[key] = cursor.read_value(cursor.read_integer("I"))
    entries = [_read_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = _read_alignment(metadata, cursor)
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            raise cursor.damaged_error(f"tensor {entry.name!r} occurs twice")
        tensors[entry.name] = _locate_tensor(entry, base, alignment, cursor)
    return GGUFHeader(metadata, tensors)


def _read_counts(cursor: _ByteReader) -> tuple[int, int, int]:
    """Read the version, the number of tensors and the number of keys."""
    if cursor.size < FIXED_HEADER_BYTES:
        raise cursor.truncated_error(FIXED_HEADER_BYTES)
    if bytes(cursor.read_bytes(4)) != b"GGUF":
        raise WeightsError(
            "this is not a GGUF file: it does not start with GGUF",
            where=cursor.where,
            next="download it again; an error page may have been saved in its place",
        )
    version = cursor.read_integer("I")
    if version and version % 2**16 == 0:
        raise WeightsError(
            "big-endian GGUF files are not supported",
            where=cursor.where,
            next="use a little-endian file; nearly all published files are",
        )
    return version, cursor.read_integer("Q"), cursor.read_integer("Q")


class _TensorEntry(NamedTuple):
    """A tensor as listed in the header; `offset` is relative to the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_code: int
    offset: int


def _read_tensor_entry(cursor: _ByteReader) -> _TensorEntry:
    name, count = cursor.read_string(), cursor.read_integer("I")
    if count > MAX_DIMENSIONS:
        raise cursor.damaged_error(
            f"{name} has {count} dimensions; the maximum is {MAX_DIMENSIONS}"
        )
    shape = tuple(reversed([cursor.read_integer("Q") for _ in range(count)]))
    return _TensorEntry(name, shape, cursor.read_integer("I"), cursor.read_integer("Q"))


def _read_alignment(metadata: dict[str, object], cursor: _ByteReader) -> int:
    alignment = metadata.get("general.alignment", 32)
    # At least 8, by the GGUF specification: so elements of any dtype are aligned.
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.damaged_error(
            f"general.alignment={alignment!r} must be a power of two of at least 8"
        )
    return alignment


def _locate_tensor(
    entry: _TensorEntry, base: int, alignment: int, cursor: _ByteReader
) -> TensorInfo:
    """Validate a tensor's entry and compute its location in the file."""
    name, shape = entry.name, entry.shape
    if entry.type_code not in TENSOR_TYPES:
        raise WeightsError(f"{name} has unknown GGUF type {entry.type_code}", where=cursor.where)
    type = TENSOR_TYPES[entry.type_code]
    columns = shape[-1] if shape else 1
    if columns % type.block_size:
        raise cursor.damaged_error(
            f"{name} has rows of {columns}, not a multiple of the block size {type.block_size}"
        )
    if math.prod(max(size, 1) for size in shape) >= 2**63:
        raise cursor.damaged_error(f"{name} has the invalid shape {list(shape)}")
    if entry.offset % alignment:
        raise cursor.damaged_error(
            f"{name} is misaligned: offset {entry.offset} is not a multiple of {alignment}"
        )
    start, size = base + entry.offset, math.prod(shape) // type.block_size * type.block_bytes
    if start + size > cursor.size:
        raise cursor.truncated_error(start + size)
    return TensorInfo(name, shape, type, start, size)


class _ByteReader:
    """Reads values in sequence, never past the end."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.data = data
        self.size = len(data)
        self.where = where
        self.position = 0

    def truncated_error(self, needed: int) -> WeightsError:
        return WeightsError(
            f"the file is truncated: it has {self.size} bytes and needs at least {needed}",
            where=self.where,
            next="download it again",
        )

    def damaged_error(self, what: str) -> WeightsError:
        return WeightsError(
            f"the file is damaged: {what}", where=self.where, next="download it again"
        )

    def read_bytes(self, count: int) -> memoryview:
        end = self.position + count
        if end > self.size:
            raise self.truncated_error(end)
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def read_scalar(self, code: str) -> int | float | bool:
        format = struct.Struct("<" + code)
        number: int | float | bool = format.unpack(self.read_bytes(format.size))[0]
        return number

    def read_integer(self, code: str) -> int:
        return int(self.read_scalar(code))

    def read_string(self) -> str:
        return self.read_strings(1)[0]

    def read_strings(self, count: int) -> list[str]:
        """One tight loop, because vocabularies have a hundred thousand strings."""
        length_at, found, at, data = struct.Struct("<Q").unpack_from, [], self.position, self.data
        for _ in range(count):
            start = at + 8
            if start > self.size:
                raise self.truncated_error(start)
            at = start + length_at(data, at)[0]
            if at > self.size:
                raise self.truncated_error(at)
            found.append(bytes(data[start:at]))
        self.position = at
        try:
            return [text.decode("utf-8") for text in found]
        except UnicodeDecodeError as error:
            raise self.damaged_error(str(error)) from error

    def read_value(self, kind: int) -> object:
        if kind == STRING:
            return self.read_string()
        if kind == ARRAY:
            return self._read_array(1)
        return self.read_scalar(self._scalar_format(kind))

    def _read_array(self, depth: int) -> list[object]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.damaged_error(f"arrays are nested more than {MAX_ARRAY_DEPTH} deep")
        kind, count = self.read_integer("I"), self.read_integer("Q")
        if kind == STRING:
            return list(self.read_strings(count))
        if kind == ARRAY:
            return [self._read_array(depth + 1) for _ in range(count)]
        code = self._scalar_format(kind)
        piece = self.read_bytes(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", piece))

    def _scalar_format(self, kind: int) -> str:
        if kind not in SCALAR_FORMATS:
            raise WeightsError(f"unknown GGUF value type {kind}", where=self.where)
        return SCALAR_FORMATS[kind]
