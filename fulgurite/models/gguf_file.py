"""GGUF files: a path in; metadata, tokenizer data and memory-mapped tensors out.

    "GGUF", version, tensor count, key count
    key, type, value ...
    name, dimensions, type, offset ...
    padding, data

All numbers are little-endian. Dimensions are stored innermost first. Nothing in the file is code; a
length that points past the end is reported as a truncated file before anything is read there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.models.config import Fields
from fulgurite.models.stored import Shape, StoredTensor, dense
from fulgurite.quant import FORMATS, Packed, decode, unpack
from fulgurite.quant.gguf_file import GGUF_TYPES

VERSIONS = (2, 3)
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
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# Packed tensor types: code -> name, numbers a block, bytes a block.
PACKED = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    39: ("MXFP4", 32, 17),
}
# Tensors that hold rotary factors: they become part of the configuration.
ROPE_TENSORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file and what it is; `shape` is outermost first."""

    name: str
    shape: Shape
    code: int
    start: int
    size: int


class GGUFFile:
    """One GGUF file, its header read and its tensors mapped."""

    computed = tuple(rf"{name}\.weight" for name in ROPE_TENSORS)

    def __init__(self, path: Path) -> None:
        self.path = path
        header = _Header(path)
        self.metadata = header.metadata
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise WeightsError(
                "the model is split over several GGUF files, which is not supported",
                where=str(path),
                next="merge them with llama.cpp's gguf-split",
            )
        self.tensors = {info.name: info for info in header.tensors}
        self._mapped = header.mapped
        self.architecture = str(self.metadata.get("general.architecture", ""))

    @property
    def has_experts(self) -> bool:
        return bool(self.metadata.get(f"{self.architecture}.expert_count", 0))

    @property
    def fields(self) -> Fields:
        """The architecture's metadata without its prefix, and what follows from the tensors."""
        prefix = f"{self.architecture}."
        values: dict[str, object] = {"tied": "output.weight" not in self.tensors}
        if "token_embd.weight" in self.tensors:
            values["vocab_size"] = self.tensors["token_embd.weight"].shape[0]
        for name in ROPE_TENSORS:
            if f"{name}.weight" in self.tensors:
                values[name] = self.stored(f"{name}.weight").all().tolist()
        for key, value in self.metadata.items():
            if key.startswith(prefix) and key != f"{prefix}vocab_size":
                values[key.removeprefix(prefix)] = value
        return Fields(values, str(self.path))

    def token_fields(self) -> dict[str, object]:
        """The special tokens as config.json fields."""
        names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id"}
        found = {ours: self.metadata.get(f"tokenizer.ggml.{key}") for key, ours in names.items()}
        return {name: value for name, value in found.items() if value is not None}

    def shapes(self) -> dict[str, Shape]:
        return {name: info.shape for name, info in self.tensors.items()}

    def read(self) -> Iterator[StoredTensor]:
        """Every tensor, in the order of the file."""
        for info in sorted(self.tensors.values(), key=lambda info: info.start):
            yield self.stored(info.name)

    def stored(self, name: str) -> StoredTensor:
        """One tensor: a view of the mapped file, unpacked when its rows are asked for."""
        info = self.tensors[name]
        data = self._mapped[info.start : info.start + info.size]
        if info.code in DENSE:
            return dense(name, data.view(DENSE[info.code]).view(info.shape))
        type_name, block, size = PACKED[info.code]
        row_bytes = info.shape[-1] // block * size
        data = data.view(*info.shape[:-1], row_bytes)

        def rows(start: int, stop: int) -> Tensor:
            return dequantize(data[start:stop], type_name)

        return StoredTensor(name, info.shape, data, type_name, rows)


def dequantize(data: Tensor, type_name: str) -> Tensor:
    """Packed rows, uint8 [.., bytes], as float32: by our own formats, else by the gguf package."""
    if type_name in GGUF_TYPES:
        format = FORMATS[GGUF_TYPES[type_name]]
        return decode(unpack(Packed(data, {}), format), format)
    try:
        import gguf
    except ImportError as error:
        raise WeightsError(
            f"{type_name} tensors are unpacked by the gguf package", next="pip install gguf"
        ) from error
    kind = gguf.GGMLQuantizationType[type_name]
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), kind))


class _Header:
    """Reads everything before the data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        if self.size < 24:
            raise self.truncated(24)
        # Mapped copy-on-write: torch wants writable memory, the file stays as it is.
        self.mapped = torch.from_numpy(numpy.memmap(path, dtype=numpy.uint8, mode="c"))
        self.bytes = memoryview(self.mapped.numpy())
        self.at = 4
        if bytes(self.bytes[:4]) != b"GGUF":
            raise WeightsError("this is no GGUF file", where=str(path))
        version, tensor_count, key_count = (self.scalar(code) for code in "IQQ")
        if version not in VERSIONS:
            raise WeightsError(f"GGUF version {version} is not supported", where=str(path))
        self.metadata: dict[str, object] = {}
        for _ in range(int(key_count)):
            key = self.string()
            self.metadata[key] = self.value(int(self.scalar("I")))
        self.tensors = self._tensor_infos(int(tensor_count))

    def truncated(self, needed: int) -> WeightsError:
        return WeightsError(
            f"the file is cut short: it has {self.size} bytes and needs at least {needed}",
            where=str(self.path),
            next="download it again",
        )

    def take(self, count: int) -> memoryview:
        end = self.at + count
        if end > self.size:
            raise self.truncated(end)
        piece = self.bytes[self.at : end]
        self.at = end
        return piece

    def scalar(self, code: str) -> int | float | bool:
        number: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return number

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Vocabularies have a hundred thousand of them, so this is one tight loop."""
        length_at, found, at, data = struct.Struct("<Q").unpack_from, [], self.at, self.bytes
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
            raise WeightsError(f"the file is damaged: {error}", where=str(self.path)) from error

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(int(self.scalar("I")), int(self.scalar("Q")))
        return self.scalar(self._code(kind))

    def _array(self, kind: int, count: int) -> list[object]:
        if kind == STRING:
            return list(self.strings(count))
        if kind == ARRAY:
            return [self.value(kind) for _ in range(count)]
        code = self._code(kind)
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))

    def _code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise WeightsError(f"unknown GGUF value type {kind}", where=str(self.path))
        return SCALARS[kind]

    def _tensor_infos(self, count: int) -> list[TensorInfo]:
        found = []
        for _ in range(count):
            name = self.string()
            dims = [int(self.scalar("Q")) for _ in range(int(self.scalar("I")))]
            found.append(
                (name, tuple(reversed(dims)), int(self.scalar("I")), int(self.scalar("Q")))
            )
        alignment = self.metadata.get("general.alignment", 32)
        assert isinstance(alignment, int), f"general.alignment is {alignment!r}"
        base = -(-self.at // alignment) * alignment
        infos = []
        for name, shape, code, offset in found:
            info = TensorInfo(name, shape, code, base + offset, self._bytes_of(name, shape, code))
            if info.start + info.size > self.size:
                raise self.truncated(info.start + info.size)
            infos.append(info)
        return infos

    def _bytes_of(self, name: str, shape: Shape, code: int) -> int:
        count = 1
        for size in shape:
            count *= size
        if code in DENSE:
            return count * DENSE[code].itemsize
        if code not in PACKED:
            raise WeightsError(f"{name} has the unknown GGUF type {code}", where=str(self.path))
        _, block, size = PACKED[code]
        if shape[-1] % block:
            raise WeightsError(
                f"{name} has rows of {shape[-1]}, no multiple of its blocks of {block}",
                where=str(self.path),
            )
        return count // block * size
