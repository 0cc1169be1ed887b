"""Safetensors checkpoints: a folder or file in, memory-mapped tensors out.

These files contain no code: a JSON header and raw numbers. Shard names come from the index and must
be plain file names in the same folder. Two quantized layouts are presented as ordinary weights: FP8
blocks with `weight_scale_inv` (DeepSeek-V3), and MXFP4 `_blocks` with `_scales` (gpt-oss).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor, Shape, Slices, from_dense
from fulgurite.quant import read_quantized_weight
from fulgurite.quant.files.lfs_pointer import POINTER_PREFIX, reject_lfs_pointer

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FP8_BLOCK = 128
MXFP4_BLOCK = 32


class SafetensorsCheckpoint:
    """The tensors of one checkpoint. One shard file is open at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        for file in find_shard_files(path):
            with open_shard(file) as handle:
                for name in list(handle.keys()):
                    if name in self.files:
                        raise WeightsError(
                            f"tensor {name} is in two files",
                            where=f"{self.files[name]}, {file}",
                        )
                    self.files[name] = file
                    self._shapes[name] = tuple(handle.get_slice(name).get_shape())

    def shapes(self) -> dict[str, Shape]:
        """The name and logical shape of every weight; quantized weights under their plain name."""
        result: dict[str, Shape] = {}
        for name, shape in self._shapes.items():
            if self._is_mxfp4(name):
                experts, rows, groups, half = shape
                result[name.removesuffix("_blocks")] = (experts, groups * half * 2, rows)
            elif not self._is_scale(name):
                result[name] = shape
        return result

    def iter_tensors(self) -> Iterator[CheckpointTensor]:
        """Every weight, in file order, as a view of the mapped file."""
        for file in dict.fromkeys(self.files.values()):
            with open_shard(file) as handle:
                for name in list(handle.keys()):
                    if not self._is_scale(name):
                        yield self._wrap_tensor(name, handle.get_tensor(name))

    def _is_scale(self, name: str) -> bool:
        packed = name.removesuffix("_scales") + "_blocks"
        scaled = name.removesuffix("_scale_inv")
        return (name.endswith("_scales") and self._is_mxfp4(packed)) or (
            name.endswith("_scale_inv") and scaled in self._shapes
        )

    def _is_mxfp4(self, name: str) -> bool:
        if not name.endswith("_blocks") or self._scales_name(name) not in self._shapes:
            return False
        return len(self._shapes.get(name, ())) == 4

    def _scales_name(self, name: str) -> str:
        return name.removesuffix("_blocks") + "_scales"

    def _wrap_tensor(self, name: str, tensor: Tensor) -> CheckpointTensor:
        if self._is_mxfp4(name):
            return read_mxfp4(name, tensor, self._read_tensor(self._scales_name(name)))
        if name + "_scale_inv" in self._shapes:
            return read_fp8(name, tensor, self._read_tensor(name + "_scale_inv"))
        return from_dense(name, tensor)

    def _read_tensor(self, name: str) -> Tensor:
        with open_shard(self.files[name]) as handle:
            tensor: Tensor = handle.get_tensor(name)
            return tensor


def find_shard_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, or the single file. One error lists all missing shards."""
    if path.is_file():
        return [path]
    index = path / INDEX_FILE
    if index.is_file():
        names = _read_shard_names(index)
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise WeightsError(
                f"{len(missing)} of {len(names)} shards are missing",
                where=str(path),
                missing="\n".join(missing),
                next=f"download the files that {INDEX_FILE} lists into this folder",
            )
        return [path / name for name in names]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    reject_pickle([file for file in sorted(path.iterdir()) if file.suffix in PICKLE_SUFFIXES], path)
    raise WeightsError(
        "this folder has no weights",
        where=str(path),
        next=f"a checkpoint folder contains config.json and {SINGLE_FILE}, "
        f"or {INDEX_FILE} and its shards",
    )


def reject_pickle(files: list[Path], where: Path) -> None:
    """Raise for pickle files. They can run code when loaded, so they are never read."""
    if files:
        names = ", ".join(file.name for file in files)
        raise WeightsError(
            f"{names}: pickle files are not read, because loading them can run code",
            where=str(where),
            next="if you trust them, convert them: safetensors.torch.save_file("
            "torch.load(file, weights_only=True), 'model.safetensors')",
        )


def _read_shard_names(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"cannot parse the index: {error}", where=str(index)) from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(
                f"the index names {name!r}; it must be a .safetensors file in the same folder",
                where=str(index),
            )
    return names


@contextmanager
def open_shard(file: Path) -> Iterator[Any]:
    """Open a safetensors file; raises `WeightsError` if it is damaged."""
    with file.open("rb") as stream:
        reject_lfs_pointer(stream.read(len(POINTER_PREFIX)), str(file))
    try:
        with safetensors.safe_open(str(file), framework="pt") as handle:
            yield handle
    except safetensors.SafetensorError as error:
        raise WeightsError(
            f"the file is damaged or truncated: {error}",
            where=f"{file} ({file.stat().st_size} bytes)",
            next="download it again",
        ) from error


def read_fp8(name: str, weight: Tensor, scale: Tensor) -> CheckpointTensor:
    """An FP8 weight [O, I] with one scale per 128x128 block."""
    tensors = {name: weight, name + "_scale_inv": scale}
    base = name.removesuffix(".weight")
    loaded = read_quantized_weight(tensors, base, torch.float32, check=False)
    data, where = loaded.weight, f"{base} ({loaded.layout})"

    def read(slices: Slices) -> Tensor:
        (rows, inner_rows), (columns, inner_columns) = (
            _align_to_blocks(dim_slice, size, FP8_BLOCK)
            for dim_slice, size in zip(slices, weight.shape, strict=True)
        )
        blocks = data[rows, columns].check_scales(where)
        return blocks.dequantize()[inner_rows, inner_columns]

    return CheckpointTensor(name, tuple(weight.shape), data, "FP8", read)


def read_mxfp4(name: str, blocks: Tensor, scales: Tensor) -> CheckpointTensor:
    """MXFP4 experts: blocks [E, O, K / 32, 16] and e8m0 scales, presented as [E, I, O]."""
    base = name.removesuffix("_blocks")
    tensors = {name: blocks, base + "_scales": scales}
    loaded = read_quantized_weight(tensors, base, torch.float32, check=False)
    data, where = loaded.weight, f"{base} ({loaded.layout})"

    def read(slices: Slices) -> Tensor:
        experts, columns, rows = slices
        columns, inner_columns = _align_to_blocks(columns, data.shape[2], MXFP4_BLOCK)
        selected = data.map(lambda part: part[experts, rows])[:, :, columns]
        values = selected.check_scales(where).dequantize()
        return values[:, :, inner_columns].transpose(-1, -2)

    experts, size, groups, half = blocks.shape
    return CheckpointTensor(base, (experts, groups * half * 2, size), data, "MXFP4", read)


def _align_to_blocks(range_: slice, size: int, block: int) -> tuple[slice, slice]:
    """The smallest range of whole blocks that contains a range, and the range relative to it."""
    first, last = range_.start // block * block, min(-(-range_.stop // block) * block, size)
    return slice(first, last), slice(range_.start - first, range_.stop - first)
