"""Safetensors checkpoints: a folder or file in, memory-mapped tensors out.

    headers of all shards ─ group by weight ─▶ TensorEntry a weight ─ load() ─▶ mapped data

These files contain no code: a JSON header and raw numbers. Shard names come from the index and must
be plain file names in the same folder. Each shard is opened once and stays open until `close`. A
quantized weight is several tensors (data, scales, zero points), possibly in different shards; it is
presented as one weight under its plain name, in any layout of `fulgurite.quant.files`.

The metadata of a file may name aliases (`ALIASES_KEY`): further names of a tensor that it stores.
Checkpoints of random weights use them, so that a layer is stored once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from fulgurite.errors import FormatError, WeightsError
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor, TensorEntry
from fulgurite.models.loading.hub import PICKLE_SUFFIXES
from fulgurite.models.loading.saved_tensors import describe_saved_tensors
from fulgurite.quant import (
    CheckpointWeight,
    StoredTensor,
    WeightDescription,
    describe_quantized_weight,
    find_kv_scales,
    find_quantized_weights,
    is_unused_attention_scale,
    read_quantized_weight,
)
from fulgurite.quant.files.lfs_pointer import POINTER_PREFIX, reject_lfs_pointer
from fulgurite.quant.files.safetensors_io import METADATA_KEY
from fulgurite.quant.files.safetensors_writer import ALIASES_KEY

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_NAME = re.compile(r"^model-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip


class SafetensorsCheckpoint:
    """The tensors of one checkpoint.

    `quantization` is the section of config.json that says how weights are stored. `file_opens`
    counts how often a shard was opened: once each, unless the checkpoint is used after `close`.
    """

    def __init__(self, path: Path, quantization: Mapping[str, object] | None = None) -> None:
        self.path = path
        self.quantization = quantization or None
        self.file_opens = 0
        self._handles: dict[Path, Any] = {}
        self.files: dict[str, Path] = {}
        self.aliases: dict[str, str] = {}  # further names of stored tensors
        self.stored: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        for file in find_shard_files(path):
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        handle = self._open(file)
        self.metadata |= handle.metadata() or {}
        for name in handle.offset_keys():
            if name in self.files:
                raise WeightsError(
                    f"tensor {name} is in two files", where=f"{self.files[name]}, {file}"
                )
            header = handle.get_slice(name)
            dtype = DTYPES.get(header.get_dtype())
            if dtype is None:
                raise WeightsError(
                    f"tensor {name} has the unsupported dtype {header.get_dtype()}",
                    where=str(file),
                    next=f"supported: {', '.join(DTYPES)}",
                )
            self.files[name] = file
            self.stored[name] = StoredTensor(tuple(header.get_shape()), dtype)
        for alias, name in read_aliases(handle.metadata(), file).items():
            if self.files.get(name) != file or alias in self.files:
                raise WeightsError(
                    f"the alias {alias} of {name} is not one more name of a tensor in this file",
                    where=str(file),
                    next="write the checkpoint again",
                )
            self.aliases[alias] = name
            self.files[alias], self.stored[alias] = file, self.stored[name]

    @cached_property
    def kv_scales(self) -> dict[str, tuple[str, str]]:
        """Attention module -> the tensors with the scales of its keys and values."""
        return dict(find_kv_scales(self.stored))

    @property
    def is_saved_model(self) -> bool:
        """Whether `fulgurite.quantize.save` wrote the file: names are those of parameters."""
        return METADATA_KEY in self.metadata

    @cached_property
    def _entries(self) -> dict[str, TensorEntry]:
        if self.is_saved_model:
            return describe_saved_tensors(self.stored, self.metadata, self.read_tensor, self.path)
        descriptions = {base: self._describe(base) for base in find_quantized_weights(self.stored)}
        owners = {
            name: (base, description)
            for base, description in descriptions.items()
            for name in description.tensors
        }
        scales = {name for pair in self.kv_scales.values() for name in pair}
        result: dict[str, TensorEntry] = {}
        for name, stored in self.stored.items():
            if name in owners:
                base, weight = owners[name]
                if weight.name not in result:
                    result[weight.name] = self._describe_weight(base, weight)
            elif name not in scales and not is_unused_attention_scale(name):
                load = partial(self._load_dense, name)
                result[name] = TensorEntry(name, stored.shape, load, dtype=stored.dtype)
        twice = sorted({weight.name for weight in descriptions.values()} - owners.keys())
        twice = [name for name in twice if name in self.stored]
        if twice:
            raise WeightsError(
                f"{twice[0]} is stored twice: dense and quantized",
                where=str(self.path),
                next="remove one of them from the file",
            )
        return result

    def entries(self) -> Mapping[str, TensorEntry]:
        """Every weight in file order; quantized weights under their plain name."""
        return self._entries

    def get_tensor(self, name: str) -> CheckpointTensor:
        """The mapped data of one weight."""
        return self._entries[name].load()

    def read_tensor(self, name: str) -> Tensor:
        """One tensor as stored, a view of the mapped file."""
        stored_name = self.aliases.get(name, name)
        tensor: Tensor = self._open(self.files[name]).get_tensor(stored_name)
        return tensor

    def close(self) -> None:
        """Close all files. Tensors that were read stay valid."""
        self._handles.clear()

    def _describe(self, base: str) -> WeightDescription:
        try:
            return describe_quantized_weight(self.stored, base, self.quantization, self.read_tensor)
        except FormatError as error:
            where = f"{error.details.get('where', base)} in {self.path}"
            raise WeightsError(error.what, **error.details | {"where": where}) from error

    def _describe_weight(self, base: str, weight: WeightDescription) -> TensorEntry:
        return TensorEntry(
            weight.name,
            tuple(weight.shape),
            partial(self._load_quantized, base, weight),
            format=weight.format,
            layout=weight.layout,
            has_input_scale=weight.input_scale,
            reason=weight.reason,
        )

    def _load_dense(self, name: str) -> CheckpointTensor:
        return CheckpointTensor(name, self.read_tensor(name))

    def _load_quantized(self, base: str, description: WeightDescription) -> CheckpointTensor:
        tensors = _WeightTensors(self, description.tensors)
        loaded: CheckpointWeight = read_quantized_weight(
            tensors, base, torch.float32, check=False, config=self.quantization
        )
        return CheckpointTensor(description.name, loaded.weight, loaded.input_scale)

    def _open(self, file: Path) -> Any:
        """The handle of a shard, which stays open."""
        if file not in self._handles:
            self._handles[file] = open_shard(file)
            self.file_opens += 1
        return self._handles[file]


class _WeightTensors(Mapping[str, Tensor]):
    """The tensors of one weight, read when they are asked for."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, names: tuple[str, ...]) -> None:
        self.checkpoint, self.names = checkpoint, names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.checkpoint.read_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names


def read_aliases(metadata: Mapping[str, str] | None, file: Path) -> dict[str, str]:
    """Name -> the stored tensor that it names as well, from the metadata of a file."""
    try:
        aliases = json.loads((metadata or {}).get(ALIASES_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"cannot parse {ALIASES_KEY}: {error}", where=str(file)) from error
    if not isinstance(aliases, dict) or not all(isinstance(v, str) for v in aliases.values()):
        raise WeightsError(f"{ALIASES_KEY} is no object of names", where=str(file))
    return aliases


def find_shard_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, or the single file. One error lists all missing shards."""
    if path.is_file():
        return [path]
    index, has_single = path / INDEX_FILE, (path / SINGLE_FILE).is_file()
    names = _read_shard_names(index) if index.is_file() else []
    if has_single and SINGLE_FILE not in names:  # as transformers: the index is of older files
        return [path / SINGLE_FILE]
    if names:
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise WeightsError(
                f"{len(missing)} of {len(names)} shards are missing",
                where=str(path),
                missing="\n".join(missing),
                next=f"download the files that {INDEX_FILE} lists into this folder",
            )
        return [path / name for name in names]
    shards = _find_unlisted_shards(path)
    if shards:
        return shards
    reject_pickle([file for file in sorted(path.iterdir()) if file.suffix in PICKLE_SUFFIXES], path)
    raise WeightsError(
        "this folder has no weights",
        where=str(path),
        next=f"a checkpoint folder contains config.json and {SINGLE_FILE}, "
        f"or {INDEX_FILE} and its shards",
    )


def _find_unlisted_shards(folder: Path) -> list[Path]:
    """The shards of a folder without an index, by their names; empty if it has none."""
    found = {match[0]: match for file in folder.iterdir() if (match := SHARD_NAME.match(file.name))}
    counts = {int(match["count"]) for match in found.values()}
    if len(counts) > 1:
        raise WeightsError(
            f"this folder has shards of {len(counts)} checkpoints and no {INDEX_FILE}",
            where=str(folder),
            next="remove the shards that don't belong to it",
        )
    numbers = {int(match["number"]) for match in found.values()}
    missing = sorted(set(range(1, max(counts, default=0) + 1)) - numbers)
    if missing:
        raise WeightsError(
            f"{len(missing)} of {max(counts)} shards are missing",
            where=str(folder),
            missing="\n".join(
                f"model-{number:05}-of-{max(counts):05}.safetensors" for number in missing
            ),
            next="download them into this folder",
        )
    return [folder / name for name in sorted(found)]


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


def open_shard(file: Path) -> Any:
    """Open a safetensors file and check its header; raises `WeightsError` if it is damaged."""
    try:
        return safetensors.safe_open(str(file), framework="pt")
    except safetensors.SafetensorError as error:
        with file.open("rb") as stream:
            reject_lfs_pointer(stream.read(len(POINTER_PREFIX)), str(file))
        raise WeightsError(
            f"the file is damaged or truncated: {error}",
            where=f"{file} ({file.stat().st_size} bytes)",
            next="download it again",
        ) from error
