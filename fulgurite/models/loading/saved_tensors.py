"""Files of `fulgurite.quantize.save`: headers in, one `TensorEntry` a parameter out.

A quantized parameter `name` is stored as `name.packed` and one tensor per scale; its format is in
the metadata of the file, with the activation format of each module and the names of tied tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor, TensorEntry
from fulgurite.quant import StoredTensor, resolve_format
from fulgurite.quant.files.safetensors_io import build_quant_tensor, read_entries, stored_keys
from fulgurite.quantize import ACTIVATIONS_KEY, TIED_TENSORS_KEY

ReadTensor = Callable[[str], Tensor]


def describe_saved_tensors(
    stored: Mapping[str, StoredTensor], metadata: Mapping[str, str], read: ReadTensor, path: Path
) -> dict[str, TensorEntry]:
    """Every parameter of the saved model, by name; `read` maps one stored tensor."""
    quantized = read_entries(metadata, path)
    activations = json.loads(metadata.get(ACTIVATIONS_KEY, "{}"))
    keys = {name: stored_keys(name, entry) for name, entry in quantized.items()}
    parts = {key for names in keys.values() for key in names}
    missing = sorted(parts - set(stored))
    if missing:
        raise WeightsError(
            f"{missing[0]!r} is missing from the file",
            where=str(path),
            next="the file is incomplete: write or download it again",
        )
    scales = {f"{_module_of(name)}.input_scale" for name in quantized}
    result: dict[str, TensorEntry] = {}
    for name, entry in quantized.items():
        scale = f"{_module_of(name)}.input_scale"
        scale_name = scale if scale in stored else None
        result[name] = TensorEntry(
            name,
            tuple(entry["shape"]),
            partial(_load_quantized, name, entry, keys[name], scale_name, read),
            format=resolve_format(entry["format"]),
            layout="fulgurite",
            has_input_scale=scale_name is not None,
            activations=activations.get(_module_of(name)),
        )
    for name, tensor in stored.items():
        if name not in parts and name not in scales:
            load = partial(_load_dense, name, read)
            result[name] = TensorEntry(name, tensor.shape, load, dtype=tensor.dtype)
    for name, owner in json.loads(metadata.get(TIED_TENSORS_KEY, "{}")).items():
        result[name] = result[owner]
    return result


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _load_dense(name: str, read: ReadTensor) -> CheckpointTensor:
    return CheckpointTensor(name, read(name))


def _load_quantized(
    name: str, entry: Mapping[str, Any], keys: list[str], scale_name: str | None, read: ReadTensor
) -> CheckpointTensor:
    parts = {key.removeprefix(f"{name}."): read(key) for key in keys}
    scale = None if scale_name is None else read(scale_name)
    return CheckpointTensor(name, build_quant_tensor(parts, entry), scale)
