"""Writes a checkpoint folder of safetensors shards, one tensor at a time.

In: the name, dtype and shape of every tensor, then their values in any order. Out: a folder with
`model.safetensors`, or numbered shards and their index. It holds no tensor longer than it takes to
write it: headers come first, and each tensor is written at its offset.

The folder appears whole or not at all. It is written under a temporary name beside its place,
flushed to disk and renamed; an error or ctrl-C removes it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, CapacityError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_ALIGNMENT = 8
ALIASES_KEY = "fulgurite_aliases"  # metadata of a file: JSON, further names of its tensors
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape))


class ShardWriter:
    """Writes tensors into the shards of a folder, in any order.

    `aliases` are further names of these tensors; readers other than ours don't know them.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        max_shard_bytes: int,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.specs = dict(specs)
        self.aliases = dict(aliases or {})
        self.missing = set(specs)
        self.locations: dict[str, tuple[BinaryIO, int]] = {}
        self.files: list[BinaryIO] = []
        shards = split_into_shards(self.specs, max_shard_bytes)
        for number, names in enumerate(shards, 1):
            file_name = shard_file_name(number, len(shards))
            self._open_shard(folder / file_name, {name: self.specs[name] for name in names})
        if len(shards) > 1:
            self._write_index(folder / INDEX_FILE, shards)

    def _open_shard(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        """Write a shard's header. Tensors with the widest dtype come first: all are aligned."""
        metadata = {"format": "pt"}
        aliases = {alias: name for alias, name in self.aliases.items() if name in specs}
        if aliases:
            metadata[ALIASES_KEY] = json.dumps(aliases, separators=(",", ":"))
        header: dict[str, object] = {"__metadata__": metadata}
        offsets: dict[str, int] = {}
        end = 0
        for name, spec in sorted(
            specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])
        ):
            offsets[name], end = end, end + spec.nbytes
            header[name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offsets[name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        file = path.open("wb")
        self.files.append(file)
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + end)
        for name, offset in offsets.items():
            self.locations[name] = (file, start + offset)

    def _write_index(self, path: Path, shards: list[list[str]]) -> None:
        weight_map = {
            name: shard_file_name(number, len(shards))
            for number, names in enumerate(shards, 1)
            for name in names
        }
        total = sum(spec.nbytes for spec in self.specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Its dtype and shape must be the announced ones."""
        assert name in self.missing, f"{name} is unknown or was written before"
        assert TensorSpec.of(tensor) == self.specs[name], (
            f"{name} is {TensorSpec.of(tensor)}, not {self.specs[name]}"
        )
        self.missing.remove(name)
        if not tensor.numel():
            return
        file, offset = self.locations[name]
        file.seek(offset)
        file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def close(self, is_durable: bool = True) -> None:
        """Close all shards, flushed to disk if they are to last.

        Every announced tensor must have been written.
        """
        assert not self.missing, f"{len(self.missing)} tensors missing: {sorted(self.missing)[:3]}"
        for file in self.files:
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        self.abort()

    def abort(self) -> None:
        for file in self.files:
            file.close()


def split_into_shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `max_bytes` each; a larger tensor has its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    return shards


def shard_file_name(number: int, count: int) -> str:
    """`model.safetensors`, or `model-00001-of-00003.safetensors`."""
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def check_output_folder(folder: Path, needed_bytes: int) -> None:
    """Raise if the folder exists and is not empty, or if the disk has too little space."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        kind = "not empty" if folder.is_dir() else "a file"
        raise ArgumentError(
            f"the output {folder} is {kind}",
            next="pass a folder that does not exist; nothing is overwritten",
        )
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if needed_bytes > free:
        raise CapacityError(
            f"the checkpoint takes {needed_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free",
            where=str(parent),
            next="free space, or pass --output on another disk",
        )


@contextmanager
def open_output_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end of the block; an error removes it."""
    target = folder.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's folders are private
        temporary.rename(target)  # replaces an empty folder
    except BaseException:  # ctrl-C, too
        shutil.rmtree(temporary, ignore_errors=True)
        raise
