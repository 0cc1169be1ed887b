"""GGUF files as checkpoints: metadata as configuration fields, tensors as the loader takes them.

In: a path. Out: `Fields` for a family's `read_config`, `StoredTensor`s, and the metadata a tokenizer
is built from. `fulgurite.quant.gguf_file` reads the container; here is what it means for a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.models.config import Fields
from fulgurite.models.stored import Box, Shape, StoredTensor, dense
from fulgurite.quant.gguf_file import PLAIN_TYPES, GGUFContainer, dequantize

# Tensors that hold rotary factors: they become part of the configuration.
ROPE_TENSORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")
GATES = {1: "softmax", 2: "sigmoid"}


class GGUFFile:
    """The model in one GGUF file."""

    computed = tuple(rf"{name}\.weight" for name in ROPE_TENSORS)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.container = GGUFContainer(path)
        self.metadata = self.container.metadata
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise WeightsError(
                "the model is split over several GGUF files, which is not supported",
                where=str(path),
                next="merge them with llama.cpp's gguf-split",
            )
        self.architecture = str(self.metadata.get("general.architecture", ""))

    @property
    def has_experts(self) -> bool:
        return bool(self.metadata.get(f"{self.architecture}.expert_count", 0))

    @property
    def gate(self) -> str:
        """What makes scores of a router's logits; files from before this was written are softmax."""
        code = self.metadata.get(f"{self.architecture}.expert_gating_func", 1)
        return GATES.get(code, f"number {code}") if isinstance(code, int) else str(code)

    @property
    def fields(self) -> Fields:
        """The architecture's metadata without its prefix, and what follows from the tensors."""
        prefix, shapes = f"{self.architecture}.", self.shapes()
        values: dict[str, object] = {"tied": "output.weight" not in shapes}
        if "token_embd.weight" in shapes:
            values["vocab_size"] = shapes["token_embd.weight"][0]
        for name in ROPE_TENSORS:
            if f"{name}.weight" in shapes:
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
        return {name: info.shape for name, info in self.container.tensors.items()}

    def read(self) -> Iterator[StoredTensor]:
        """Every tensor, in the order of the file."""
        for info in sorted(self.container.tensors.values(), key=lambda info: info.start):
            yield self.stored(info.name)

    def stored(self, name: str) -> StoredTensor:
        """One tensor: a view of the mapped file, unpacked when its rows are asked for."""
        info, data = self.container.tensors[name], self.container.data(name)
        kind = info.type.name
        if kind in PLAIN_TYPES:
            return dense(name, data)

        def part(box: Box) -> Tensor:
            *rows, columns = box  # whole rows of blocks: columns may end inside of one
            return dequantize(data[tuple(rows)], kind)[..., columns]

        return StoredTensor(name, info.shape, data, kind, part)
