"""Quantized tensors in safetensors files, in a layout of our own.

In: tensors by name, quantized and plain mixed (a `state_dict`). Out: one file, and the same tensors
back, bit for bit.

A plain tensor is stored under its name. A quantized one is stored as `name.packed` and one
`name.<scale>` for each scale beside the data; its format, dtype and shape stand in the file's
metadata under `fulgurite.quant`, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.quant.format import resolve
from fulgurite.quant.optional import require
from fulgurite.quant.tensor import QuantTensor

METADATA_KEY = "fulgurite.quant"
VERSION = 1


def save_quantized(
    tensors: Mapping[str, Tensor],
    path: str | PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the tensors; `metadata` is kept beside ours in the file's header."""
    stored: dict[str, Tensor] = {}
    entries: dict[str, dict[str, object]] = {}
    for name, tensor in tensors.items():
        parts = {name: tensor}
        if isinstance(tensor, QuantTensor):
            parts = {f"{name}.{part}": value for part, value in tensor.scales.items()}
            parts[f"{name}.packed"] = tensor.packed
            entries[name] = {
                "format": tensor.format.name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
            }
        taken = sorted(set(parts) & set(stored))
        if taken:
            raise ArgumentError(
                f"two tensors would be stored as {taken[0]!r}", next="rename one of them"
            )
        stored |= {key: value.detach().contiguous() for key, value in parts.items()}
    header = {METADATA_KEY: json.dumps({"version": VERSION, "tensors": entries})}
    torch_files = require("safetensors.torch", "writing a .safetensors file", "safetensors")
    torch_files.save_file(stored, path, metadata={**(metadata or {}), **header})


def load_quantized(
    path: str | PathLike[str],
    names: Collection[str] | None = None,
    device: torch.device | str = "cpu",
    check: bool = True,
) -> dict[str, Tensor]:
    """The tensors `save_quantized` wrote, or those of `names`; plain files load as they are."""
    with open_file(path, device) as file:
        keys = set(file.keys())
        entries = _entries(file.metadata() or {}, path)
        inside = {key for name in entries for key in _keys(name, entries[name])}
        damaged = sorted(inside - keys)
        if damaged:
            raise WeightsError(
                f"{damaged[0]!r} is missing from the file",
                where=str(path),
                next="the file is incomplete: write or download it again",
            )
        everything = {*entries, *(keys - inside)}
        missing = sorted(set(names or ()) - everything)
        if missing:
            raise WeightsError(
                f"the file has no tensor {missing[0]!r}",
                where=str(path),
                next=f"it holds {', '.join(sorted(everything)[:5])} … ({len(everything)})",
            )
        loaded: dict[str, Tensor] = {}
        for name in sorted(everything) if names is None else names:
            if name not in entries:
                loaded[name] = file.get_tensor(name)
                continue
            parts = {
                key.removeprefix(f"{name}."): file.get_tensor(key)
                for key in _keys(name, entries[name])
            }
            packed = _assemble(parts, entries[name])
            loaded[name] = packed.check(f"{name} in {path}") if check else packed
    return loaded


def open_file(path: str | PathLike[str], device: torch.device | str = "cpu") -> Any:
    """A safetensors file to read from."""
    safetensors = require("safetensors", "reading a .safetensors file", "safetensors")
    try:
        return safetensors.safe_open(path, framework="pt", device=str(device))
    except (OSError, safetensors.SafetensorError) as problem:
        raise WeightsError(
            f"no safetensors file can be read here: {problem}",
            where=str(path),
            next="give the path of a file that fulgurite.quantize.save wrote",
        ) from problem


def _entries(metadata: Mapping[str, str], path: str | PathLike[str]) -> dict[str, dict[str, Any]]:
    if METADATA_KEY not in metadata:
        return {}
    described = json.loads(metadata[METADATA_KEY])
    if described["version"] != VERSION:
        raise WeightsError(
            f"the file's quantized layout has version {described['version']}, this is {VERSION}",
            where=str(path),
            next="read it with the version of fulgurite that wrote it",
        )
    entries: dict[str, dict[str, Any]] = described["tensors"]
    return entries


def _keys(name: str, entry: Mapping[str, Any]) -> list[str]:
    format = resolve(entry["format"])
    return [f"{name}.packed", *(f"{name}.{scale.name}" for scale in format.stored_scales)]


def _assemble(parts: dict[str, Tensor], entry: Mapping[str, Any]) -> QuantTensor:
    packed = parts.pop("packed")
    return QuantTensor(entry["format"], packed, parts, getattr(torch, entry["dtype"]))
