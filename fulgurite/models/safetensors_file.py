"""Checkpoints in safetensors: a folder or file in, memory-mapped tensors out, one at a time.

Nothing in these files is code: a header in JSON and raw numbers. Names of shards come from the
index and must be plain file names in the same folder. Two packed formats are presented as the
weights they stand for: FP8 in blocks with `weight_scale_inv` beside (DeepSeek-V3) and MXFP4 as
`_blocks` and `_scales` (gpt-oss).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.models.stored import Box, Shape, StoredTensor, dense
from fulgurite.quant import read_weight
from fulgurite.quant.pointer import BEGINNING, refuse_pointer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FP8_BLOCK = 128
MXFP4_BLOCK = 32


class SafetensorsFiles:
    """The tensors of one checkpoint. Shards are opened one after the other, never all at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        for file in find_files(path):
            with opened(file) as handle:
                for name in list(handle.keys()):
                    if name in self.files:
                        raise WeightsError(
                            f"the tensor {name} is in two files",
                            where=f"{self.files[name]}, {file}",
                        )
                    self.files[name] = file
                    self._shapes[name] = tuple(handle.get_slice(name).get_shape())

    def shapes(self) -> dict[str, Shape]:
        """The name and shape of every weight, packed ones under the name of what they hold."""
        result: dict[str, Shape] = {}
        for name, shape in self._shapes.items():
            if self._is_mxfp4(name):
                experts, rows, groups, half = shape
                result[name.removesuffix("_blocks")] = (experts, groups * half * 2, rows)
            elif not self._is_scale(name):
                result[name] = shape
        return result

    def read(self) -> Iterator[StoredTensor]:
        """Every weight, in the order of the files: views of the mapped file."""
        for file in dict.fromkeys(self.files.values()):
            with opened(file) as handle:
                for name in list(handle.keys()):
                    if not self._is_scale(name):
                        yield self._stored(name, handle.get_tensor(name))

    def _is_scale(self, name: str) -> bool:
        packed = name.removesuffix("_scales") + "_blocks"
        scaled = name.removesuffix("_scale_inv")
        return (name.endswith("_scales") and self._is_mxfp4(packed)) or (
            name.endswith("_scale_inv") and scaled in self._shapes
        )

    def _is_mxfp4(self, name: str) -> bool:
        if not name.endswith("_blocks") or self._scales_of(name) not in self._shapes:
            return False
        return len(self._shapes.get(name, ())) == 4

    def _scales_of(self, name: str) -> str:
        return name.removesuffix("_blocks") + "_scales"

    def _stored(self, name: str, tensor: Tensor) -> StoredTensor:
        if self._is_mxfp4(name):
            return stored_mxfp4(name, tensor, self._one(self._scales_of(name)))
        if name + "_scale_inv" in self._shapes:
            return stored_fp8(name, tensor, self._one(name + "_scale_inv"))
        return dense(name, tensor)

    def _one(self, name: str) -> Tensor:
        with opened(self.files[name]) as handle:
            tensor: Tensor = handle.get_tensor(name)
            return tensor


def find_files(path: Path) -> list[Path]:
    """The safetensors files of a folder (or the one file); all missing shards in one error."""
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        names = _shard_names(index)
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise WeightsError(
                f"{len(missing)} of {len(names)} shards are missing",
                where=str(path),
                missing="\n".join(missing),
                next=f"download them into this folder: {INDEX} says that weights are in them",
            )
        return [path / name for name in names]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    refuse_pickle([file for file in sorted(path.iterdir()) if file.suffix in PICKLED], path)
    raise WeightsError(
        "there are no weights here",
        where=str(path),
        next=f"a checkpoint folder holds config.json and {SINGLE}, or {INDEX} and its shards",
    )


def refuse_pickle(files: list[Path], where: Path) -> None:
    """Pickle files run code when they are read, so they are never read."""
    if files:
        names = ", ".join(file.name for file in files)
        raise WeightsError(
            f"{names}: pickle files can run code and are not read",
            where=str(where),
            next="convert them where you trust them: safetensors.torch.save_file("
            "torch.load(file, weights_only=True), 'model.safetensors')",
        )


def _shard_names(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"the index can't be read: {error}", where=str(index)) from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(
                f"the index names {name!r}, which is no safetensors file of its own folder",
                where=str(index),
            )
    return names


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, with damage reported as such."""
    try:
        import safetensors
    except ImportError as error:
        raise WeightsError(
            "safetensors files are read by the package of that name", next="pip install safetensors"
        ) from error
    with file.open("rb") as beginning:
        refuse_pointer(beginning.read(len(BEGINNING)), str(file))
    try:
        with safetensors.safe_open(str(file), framework="pt") as handle:
            yield handle
    except safetensors.SafetensorError as error:
        raise WeightsError(
            f"the file is damaged or cut short: {error}",
            where=f"{file} ({file.stat().st_size} bytes)",
            next="download it again",
        ) from error


def stored_fp8(name: str, weight: Tensor, scale: Tensor) -> StoredTensor:
    """float8 [O, I] with one scale a block of 128 x 128."""
    tensors = {name: weight, name + "_scale_inv": scale}
    base = name.removesuffix(".weight")
    found = read_weight(tensors, base, torch.float32, check=False)
    data, where = found.weight, f"{base} ({found.layout})"

    def part(box: Box) -> Tensor:
        (rows, inside_rows), (columns, inside) = (
            _blocks_around(one, size, FP8_BLOCK)
            for one, size in zip(box, weight.shape, strict=True)
        )
        return data[rows, columns].check(where).dequantize()[inside_rows, inside]

    return StoredTensor(name, tuple(weight.shape), data, "FP8", part)


def stored_mxfp4(name: str, blocks: Tensor, scales: Tensor) -> StoredTensor:
    """Experts [E, O, groups, 16] with one power of two a group, given as [E, I, O]."""
    base = name.removesuffix("_blocks")
    tensors = {name: blocks, base + "_scales": scales}
    found = read_weight(tensors, base, torch.float32, check=False)
    data, where = found.weight, f"{base} ({found.layout})"

    def part(box: Box) -> Tensor:
        experts, columns, rows = box
        columns, inside = _blocks_around(columns, data.shape[2], MXFP4_BLOCK)
        chosen = data.map(lambda part: part[experts, rows])[:, :, columns]
        return chosen.check(where).dequantize()[:, :, inside].transpose(-1, -2)

    experts, size, groups, half = blocks.shape
    return StoredTensor(base, (experts, groups * half * 2, size), data, "MXFP4", part)


def _blocks_around(chosen: slice, size: int, block: int) -> tuple[slice, slice]:
    """The blocks that a range lies in, and the range inside them."""
    first, last = chosen.start // block * block, min(-(-chosen.stop // block) * block, size)
    return slice(first, last), slice(chosen.start - first, chosen.stop - first)
