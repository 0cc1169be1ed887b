"""GGUF checkpoints: a path in; config fields, tensors and tokenizer metadata out.

`fulgurite.quant.files.gguf` reads the container. This module interprets it as a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor, Shape, Slices, from_dense
from fulgurite.quant.files.gguf import DTYPE_OF_GGUF_TYPE, GGUFReader, dequantize_gguf

# Tensors of RoPE factors. They become part of the configuration.
ROPE_FACTOR_TENSORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")
GATING_FUNCTIONS = {1: "softmax", 2: "sigmoid"}


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
        values: dict[str, object] = {"tie_word_embeddings": "output.weight" not in shapes}
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

    def iter_tensors(self) -> Iterator[CheckpointTensor]:
        """Every tensor, in file order."""
        for info in sorted(self.reader.tensors.values(), key=lambda info: info.offset):
            yield self.get_tensor(info.name)

    def get_tensor(self, name: str) -> CheckpointTensor:
        """One tensor: a view of the mapped file, dequantized when it is read."""
        info, data = self.reader.tensors[name], self.reader.read_data(name)
        type_name = info.type.name
        if type_name in DTYPE_OF_GGUF_TYPE:
            return from_dense(name, data)

        def read(slices: Slices) -> Tensor:
            *rows, columns = slices  # columns may start or end inside a block: read whole rows
            return dequantize_gguf(data[tuple(rows)], type_name)[..., columns]

        return CheckpointTensor(name, info.shape, data, type_name, read)
