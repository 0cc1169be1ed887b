"""GGUF checkpoints: a path in; config fields, tensors and tokenizer metadata out.

`fulgurite.quant.files.gguf` reads the container. This module interprets it as a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields
from fulgurite.models.loading.checkpoint_tensor import (
    CheckpointTensor,
    Shape,
    Slices,
    TensorEntry,
)
from fulgurite.quant import QuantTensor, resolve_format
from fulgurite.quant.files.gguf import (
    DTYPE_OF_GGUF_TYPE,
    FORMAT_OF_GGUF_TYPE,
    GGUFReader,
    dequantize_gguf,
)

# Tensors of RoPE factors. They become part of the configuration.
ROPE_FACTOR_TENSORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")
GATING_FUNCTIONS = {1: "softmax", 2: "sigmoid"}


@dataclass(frozen=True)
class GGUFRows(CheckpointTensor):
    """Bytes of a block type without a packed format: whole rows are dequantized when read."""

    logical_shape: Shape = ()
    type_name: str = ""

    @property
    def shape(self) -> Shape:
        return self.logical_shape

    def read(self, slices: Slices) -> Tensor:
        *rows, columns = slices  # columns may start or end inside a block
        return dequantize_gguf(self.data[tuple(rows)], self.type_name)[..., columns]


class GGUFCheckpoint:
    """The model in one GGUF file."""

    ignored = tuple(rf"{name}\.weight" for name in ROPE_FACTOR_TENSORS)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = GGUFReader(path)
        self.metadata = self.reader.metadata
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise WeightsError(
                "models split over several GGUF files are not supported",
                where=str(path),
                next="merge them with llama.cpp's gguf-split",
            )
        self.architecture = str(self.metadata.get("general.architecture", ""))

    @property
    def has_experts(self) -> bool:
        return bool(self.metadata.get(f"{self.architecture}.expert_count", 0))

    @property
    def gating_function(self) -> str:
        """The router's scoring function. Older files do not store it; they use softmax."""
        code = self.metadata.get(f"{self.architecture}.expert_gating_func", 1)
        return GATING_FUNCTIONS.get(code, f"number {code}") if isinstance(code, int) else str(code)

    @property
    def fields(self) -> ConfigFields:
        """The architecture's metadata without its prefix, plus fields derived from the tensors."""
        prefix, shapes = f"{self.architecture}.", self.shapes()
        values: dict[str, object] = {
            "tie_word_embeddings": "output.weight" not in shapes,
            "has_qkv_bias": "blk.0.attn_q.bias" in shapes,
            "has_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        }
        if "token_embd.weight" in shapes:
            values["vocab_size"] = shapes["token_embd.weight"][0]
        for name in ROPE_FACTOR_TENSORS:
            if f"{name}.weight" in shapes:
                values[name] = self.get_tensor(f"{name}.weight").read_all().tolist()
        for key, value in self.metadata.items():
            if key.startswith(prefix) and key != f"{prefix}vocab_size":
                values[key.removeprefix(prefix)] = value
        return ConfigFields(values, str(self.path))

    def read_token_fields(self) -> dict[str, object]:
        """The special tokens as config.json fields."""
        names = ("bos_token_id", "eos_token_id")
        values = {name: self.metadata.get(f"tokenizer.ggml.{name}") for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def shapes(self) -> dict[str, Shape]:
        return {name: info.shape for name, info in self.reader.tensors.items()}

    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor, in file order."""
        return self._entries

    @cached_property
    def _entries(self) -> dict[str, TensorEntry]:
        infos = sorted(self.reader.tensors.values(), key=lambda info: info.offset)
        return {info.name: self._describe(info.name) for info in infos}

    def _describe(self, name: str) -> TensorEntry:
        info, load = self.reader.tensors[name], partial(self.get_tensor, name)
        dtype = DTYPE_OF_GGUF_TYPE.get(info.type.name)
        if dtype is not None:
            return TensorEntry(name, info.shape, load, dtype=dtype)
        if info.type.name not in FORMAT_OF_GGUF_TYPE:
            reason = f"there is no packed format for GGUF type {info.type.name}"
            return TensorEntry(name, info.shape, load, layout="gguf", reason=reason)
        format = resolve_format(FORMAT_OF_GGUF_TYPE[info.type.name])
        return TensorEntry(name, info.shape, load, format=format, layout="gguf")

    def get_tensor(self, name: str) -> CheckpointTensor:
        """One tensor: a view of the mapped file, dequantized when it is read."""
        info, data = self.reader.tensors[name], self.reader.read_data(name)
        if info.type.name in DTYPE_OF_GGUF_TYPE:
            return CheckpointTensor(name, data)
        if info.type.name not in FORMAT_OF_GGUF_TYPE:
            return GGUFRows(name, data, None, info.shape, info.type.name)
        format = FORMAT_OF_GGUF_TYPE[info.type.name]
        return CheckpointTensor(name, QuantTensor(format, data, {}, torch.float32))

    def close(self) -> None:
        """Nothing to close: the file is mapped as long as its tensors live."""
