"""A GGUF file as a Hugging Face checkpoint: names, layouts, config.json and tokenizer mapped back.

In: an open GGUF file. Out: a `Source`. A GGUF tensor is converted to the parameter of our module
(the family's GGUF mapping), and the parameter back to the Hugging Face tensor (the family's
safetensors mapping, inverted). Parameters of one layer are kept until another layer is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fulgurite.compress.source import Source, SourceTensor, stored_tensors, write_json
from fulgurite.errors import WeightsError
from fulgurite.models import weight_mapping
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.registry import ARCHITECTURES
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.checkpoint import Checkpoint
from fulgurite.models.loading.checkpoint_tensor import TensorEntry
from fulgurite.models.loading.gguf_checkpoint import GGUFCheckpoint
from fulgurite.models.loading.weight_assignment import assign_weights, map_expected_names
from fulgurite.models.tokenizer import Tokenizer, from_gguf, save_backend
from fulgurite.models.weight_mapping import Convert, WeightAssignment

# Families whose GGUF metadata contains all of config.json, and their `model_type`.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "mixtral": "mixtral",
}
DTYPE = torch.bfloat16  # of what stays dense; GGUF files store norms in float32
# Conversions that select rows of one fused tensor, in the order of its rows.
ROW_SLICES: tuple[Convert, ...] = (
    weight_mapping.slice_q,
    weight_mapping.slice_k,
    weight_mapping.slice_v,
    weight_mapping.slice_first_half,
    weight_mapping.slice_second_half,
)


def open_gguf_source(checkpoint: Checkpoint, model: CausalLM) -> Source:
    """The source of a GGUF file; `model` is on the meta device."""
    file, family, config = checkpoint.source, checkpoint.family, checkpoint.config
    assert isinstance(file, GGUFCheckpoint), f"{checkpoint.path} is not a GGUF file"
    if family.name not in MODEL_TYPES:
        raise _not_supported(checkpoint, f"its family {family.name} can't be mapped back")
    parameters = dict(model.named_parameters())
    reader = ParameterReader(checkpoint, model)
    tensors: dict[str, SourceTensor] = {}
    for name, assignments in map_expected_names(family.weights, config, parameters).items():
        part = _view_parts(assignments, config)
        if part is None:
            raise _not_supported(checkpoint, f"{name} is stored in another layout")
        shape = part(lambda parameter: parameters[parameter]).shape
        tensors[name] = SourceTensor(
            name,
            tuple(shape),
            DTYPE,
            _make_reader(part, reader),
            tuple(assignments),
            was_quantized=False,
        )
    return Source(
        checkpoint.path,
        family,
        config,
        tensors,
        _build_config(file, family),
        lambda folder: _write_files(file, folder),
    )


def _not_supported(checkpoint: Checkpoint, reason: str) -> WeightsError:
    return WeightsError(
        f"this GGUF file can't be written as a safetensors checkpoint: {reason}",
        where=str(checkpoint.path),
        next="quantize the model's safetensors checkpoint instead",
    )


class ParameterReader:
    """Parameters of our modules from a GGUF file; those of one layer are kept."""

    def __init__(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        self.config = checkpoint.config
        self.tensors = stored_tensors(checkpoint)
        self.shapes = {name: value.shape for name, value in model.named_parameters()}
        self.sources: dict[str, list[tuple[TensorEntry, WeightAssignment]]] = {}
        for name, assignments in assign_weights(checkpoint, model).items():
            for assignment in assignments:
                pairs = self.sources.setdefault(assignment.parameter, [])
                pairs.append((self.tensors[name], assignment))
        self.layer = ""
        self.kept: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """The values of one parameter, in float32."""
        match = re.match(r"layers\.\d+\.", name)
        layer = match.group(0) if match else name
        if layer != self.layer:
            self.layer, self.kept = layer, {}
        if name not in self.kept:
            value = torch.empty(self.shapes[name])
            for tensor, assignment in self.sources[name]:
                mapping = assignment.mapping
                target = mapping.target_view(value, self.config, assignment.expert)
                target.copy_(mapping.convert(tensor.read_all(), self.config))
            self.kept[name] = value
        return self.kept[name]


GetParameter = Callable[[str], Tensor]


def _view_parts(
    assignments: list[WeightAssignment], config: ModelConfig
) -> Callable[[GetParameter], Tensor] | None:
    """A function from parameters to the Hugging Face tensor; None if it is not a view of them."""
    converts = [assignment.mapping.convert for assignment in assignments]
    if any(c is not weight_mapping.identity and c not in ROW_SLICES for c in converts):
        return None
    if len(assignments) > 1:
        if weight_mapping.identity in converts:
            return None
        assignments = sorted(assignments, key=lambda a: ROW_SLICES.index(a.mapping.convert))

    def view(get: GetParameter) -> Tensor:
        parts = [a.mapping.target_view(get(a.parameter), config, a.expert) for a in assignments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return view


def _make_reader(
    part: Callable[[GetParameter], Tensor], reader: ParameterReader
) -> Callable[[], Tensor]:
    return lambda: part(reader.read)


def _build_config(file: GGUFCheckpoint, family: ModelFamily) -> dict[str, object]:
    """config.json from the metadata."""
    assert family.gguf is not None, f"{family.name} is in MODEL_TYPES without a GGUF mapping"
    architecture = next(name for name, entry in ARCHITECTURES.items() if entry is family)
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[family.name],
        "torch_dtype": str(DTYPE).removeprefix("torch."),
        **family.gguf.read_config_fields(file.fields),
        **file.read_token_fields(),
    }


def _write_files(file: GGUFCheckpoint, folder: Path) -> None:
    if "tokenizer.ggml.tokens" in file.metadata:
        write_tokenizer(from_gguf(file.metadata, str(file.path)), folder)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    save_backend(tokenizer, folder / "tokenizer.json")
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= tokenizer.special_tokens
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    write_json(folder / "tokenizer_config.json", settings)
    generation: dict[str, object] = {"eos_token_id": list(tokenizer.stop_ids)}
    if tokenizer.bos_id is not None:
        generation["bos_token_id"] = tokenizer.bos_id
    write_json(folder / "generation_config.json", generation)
