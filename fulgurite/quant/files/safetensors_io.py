"""Saves and loads quantized tensors in safetensors files, in our own layout.

In: tensors by name, quantized and plain (a `state_dict`). Out: one file, and bit-identical tensors
back.

A plain tensor is stored under its name. A quantized tensor is stored as `name.packed` plus one
`name.<scale>` per separate scale. Its format, dtype and shape are JSON metadata of the file under
`fulgurite.quant`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.files import share
from fulgurite.quant.format import resolve_format
from fulgurite.quant.tensor import QuantTensor

METADATA_KEY = "fulgurite.quant"
VERSION = 1


def save_quantized(
    tensors: Mapping[str, Tensor],
    path: str | PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file; `metadata` is added to the file's header."""
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
        duplicates = sorted(set(parts) & set(stored))
        if duplicates:
            raise ArgumentError(
                f"two tensors would be stored as {duplicates[0]!r}", next="rename one of them"
            )
        stored |= {key: value.detach().contiguous() for key, value in parts.items()}
    header = {METADATA_KEY: json.dumps({"version": VERSION, "tensors": entries})}
    safetensors.torch.save_file(stored, path, metadata={**(metadata or {}), **header})
    share(path)


def load_quantized(
    path: str | PathLike[str],
    names: Collection[str] | None = None,
    device: torch.device | str = "cpu",
    check: bool = True,
) -> dict[str, Tensor]:
    """Load the tensors that `save_quantized` wrote, or those of `names`. Plain files load
    unchanged.
    """
    with open_safetensors(path, device) as file:
        keys = set(file.keys())
        entries = read_entries(file.metadata() or {}, path)
        quantized_keys = {key for name in entries for key in stored_keys(name, entries[name])}
        incomplete = sorted(quantized_keys - keys)
        if incomplete:
            raise WeightsError(
                f"{incomplete[0]!r} is missing from the file",
                where=str(path),
                next="the file is incomplete: write or download it again",
            )
        all_names = {*entries, *(keys - quantized_keys)}
        missing = sorted(set(names or ()) - all_names)
        if missing:
            raise WeightsError(
                f"the file has no tensor {missing[0]!r}",
                where=str(path),
                next=f"it contains {', '.join(sorted(all_names)[:5])} … ({len(all_names)})",
            )
        loaded: dict[str, Tensor] = {}
        for name in sorted(all_names) if names is None else names:
            if name not in entries:
                loaded[name] = file.get_tensor(name)
                continue
            parts = {
                key.removeprefix(f"{name}."): file.get_tensor(key)
                for key in stored_keys(name, entries[name])
            }
            packed = build_quant_tensor(parts, entries[name])
            loaded[name] = packed.check_scales(f"{name} in {path}") if check else packed
    return loaded


def open_safetensors(path: str | PathLike[str], device: torch.device | str = "cpu") -> Any:
    """Open a safetensors file for reading."""
    try:
        return safetensors.safe_open(path, framework="pt", device=str(device))
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(
            f"cannot read a safetensors file: {error}",
            where=str(path),
            next="pass the path of a file that fulgurite.quantize.save wrote",
        ) from error


def read_entries(
    metadata: Mapping[str, str], path: str | PathLike[str]
) -> dict[str, dict[str, Any]]:
    """Format, dtype and shape of each quantized tensor, from the metadata of the file."""
    if METADATA_KEY not in metadata:
        return {}
    described = json.loads(metadata[METADATA_KEY])
    if described["version"] != VERSION:
        raise WeightsError(
            f"the file has layout version {described['version']}; this version reads {VERSION}",
            where=str(path),
            next="read it with the version of fulgurite that wrote it",
        )
    entries: dict[str, dict[str, Any]] = described["tensors"]
    return entries


def stored_keys(name: str, entry: Mapping[str, Any]) -> list[str]:
    """The names under which a quantized tensor is stored."""
    format = resolve_format(entry["format"])
    return [f"{name}.packed", *(f"{name}.{scale.name}" for scale in format.separate_scales)]


def build_quant_tensor(parts: dict[str, Tensor], entry: Mapping[str, Any]) -> QuantTensor:
    """A quantized tensor from its stored parts, by the ends of their names."""
    packed = parts.pop("packed")
    return QuantTensor(entry["format"], packed, parts, getattr(torch, entry["dtype"]))
