"""The checkpoint that is quantized: a folder or file in; tensors, config.json and tokenizer out.

Tensors have the names and layouts of the Hugging Face checkpoint, so that the written folder is the
same architecture for every engine that reads those. Each is read on demand; quantized ones are
dequantized. A GGUF file is presented in the same way (`gguf_source.py`).
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fulgurite.models import weight_mapping
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.checkpoint import (
    Checkpoint,
    read_config_file,
    strip_multimodal_prefix,
)
from fulgurite.models.loading.checkpoint_tensor import TensorEntry, full_slices
from fulgurite.models.loading.weight_assignment import assign_weights
from fulgurite.models.weight_mapping import WeightAssignment

# Files that are copied beside the weights: tokenizer, chat template, generation settings, license.
COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the checkpoint.

    Attributes:
        name: its Hugging Face name.
        shape: its shape.
        dtype: the dtype it is written in, if it stays dense.
        read: its values, dequantized.
        assignments: the parameters of our modules that it fills; none: the model does not need it.
        was_quantized: whether the checkpoint stores it quantized.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    assignments: tuple[WeightAssignment, ...] = ()
    was_quantized: bool = False

    def fill(self, model: nn.Module, values: Tensor, config: ModelConfig) -> None:
        """Copy values of this tensor into the parameters of the model."""
        for assignment in self.assignments:
            mapping = assignment.mapping
            parameter = model.get_parameter(assignment.parameter)
            target = mapping.target_view(parameter.data, config, assignment.expert)
            target.copy_(mapping.convert(values, config))


@dataclass(frozen=True)
class Source:
    """A checkpoint as the quantizer sees it.

    Attributes:
        path: the folder or file.
        family: the model family.
        config: the model's configuration.
        tensors: every tensor by name, in the order they are written.
        config_values: config.json, without quantization.
        write_files: writes tokenizer and other text files into a folder.
    """

    path: Path
    family: ModelFamily
    config: ModelConfig
    tensors: dict[str, SourceTensor]
    config_values: dict[str, object]
    write_files: Callable[[Path], None]


def open_safetensors_source(checkpoint: Checkpoint, model: CausalLM) -> Source:
    """The source of a folder or safetensors file; `model` is on the meta device."""
    path = checkpoint.path
    folder = path.parent if path.is_file() else path
    assigned = assign_weights(checkpoint, model)
    tensors: dict[str, SourceTensor] = {}
    for stored in stored_tensors(checkpoint).values():
        found = tuple(assigned.get(strip_multimodal_prefix(stored.name), ()))
        wrapped = _wrap(stored, found, checkpoint.config)
        for tensor in _split_experts(wrapped, stored, checkpoint.family):
            tensors[tensor.name] = tensor
    values = dict(read_config_file(folder).values)
    for field in QUANTIZATION_FIELDS:
        values.pop(field, None)
    return Source(
        path,
        checkpoint.family,
        checkpoint.config,
        tensors,
        values,
        lambda target: copy_text_files(folder, target),
    )


def stored_tensors(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint by their names in the file."""
    return dict(checkpoint.source.entries())


def is_stored_quantized(stored: TensorEntry) -> bool:
    return stored.is_quantized


def _wrap(
    stored: TensorEntry, assignments: tuple[WeightAssignment, ...], config: ModelConfig
) -> SourceTensor:
    quantized = is_stored_quantized(stored)
    dtype = stored.dtype or config.dtype
    return SourceTensor(
        stored.name, stored.shape, dtype, stored.read_all, assignments, was_quantized=quantized
    )


def _split_experts(
    tensor: SourceTensor, stored: TensorEntry, family: ModelFamily
) -> Iterator[SourceTensor]:
    """The tensor; or, if it stacks experts [E, in, out] that have names of their own, those."""
    targets = {assignment.mapping.target for assignment in tensor.assignments}
    parts = [mapping for mapping in family.named_experts if {mapping.target} == targets]
    if not parts or len(tensor.shape) != 3:
        yield tensor
        return
    (assignment,) = tensor.assignments
    assert assignment.mapping.convert is weight_mapping.transpose, f"{tensor.name} is transposed"
    experts, inputs, outputs = tensor.shape
    size = outputs // len(parts)
    prefix = tensor.name.rpartition(".")[0]
    for expert in range(experts):
        for index, mapping in enumerate(parts):
            columns = slice(index * size, (index + 1) * size)
            yield replace(
                tensor,
                name=f"{prefix}.{expert}.{mapping.source.rpartition('{expert}.')[2]}",
                shape=(size, inputs),
                read=_make_expert_reader(stored, expert, columns),
                assignments=(WeightAssignment(mapping, assignment.parameter, expert),),
            )


def _make_expert_reader(stored: TensorEntry, expert: int, columns: slice) -> Callable[[], Tensor]:
    def read() -> Tensor:
        _, inputs, _ = full_slices(stored.shape)
        return stored.read((slice(expert, expert + 1), inputs, columns))[0].t()

    return read


def copy_text_files(folder: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation settings and license."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and any(fnmatch.fnmatch(file.name, p) for p in COPIED_FILES):
            shutil.copyfile(file, target / file.name)
        elif file.is_dir() and file.name == "additional_chat_templates":
            shutil.copytree(file, target / file.name)


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
