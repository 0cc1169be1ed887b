"""Checkpoints: a path in; family, configuration, tensors and weight assignments out.

    open_checkpoint   config.json or GGUF metadata -> family, ModelConfig, tensor source
    assign_weights    weight mappings, parameters, tensor names -> tensor name -> parameters

Names and shapes are checked before any weight is read. One error lists everything that is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.registry import find_family, find_gguf_family
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor, Shape
from fulgurite.models.loading.gguf_checkpoint import GGUFCheckpoint
from fulgurite.models.loading.safetensors_checkpoint import (
    PICKLE_SUFFIXES,
    SafetensorsCheckpoint,
    find_shard_files,
    reject_pickle,
)
from fulgurite.models.weight_mapping import WeightAssignment, WeightMapping

# Prefixes of the language model in multimodal checkpoints -> the prefixes of weight mappings.
MULTIMODAL_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
SHARED_FIELDS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
LM_HEAD_NAMES = ("lm_head.weight", "output.weight")
QUANT_METHODS = ("fp8", "mxfp4")


class TensorSource(Protocol):
    """The tensors of a checkpoint, from safetensors or GGUF files."""

    def shapes(self) -> dict[str, Shape]: ...

    def iter_tensors(self) -> Iterator[CheckpointTensor]: ...


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: its config is read, its tensors are not."""

    path: Path
    family: ModelFamily
    config: ModelConfig
    source: TensorSource
    weights: tuple[WeightMapping, ...]
    ignored: tuple[str, ...]

    def tensors(self) -> Iterator[tuple[str, CheckpointTensor]]:
        """Every tensor, with its name as in weight mappings."""
        for tensor in self.source.iter_tensors():
            yield strip_multimodal_prefix(tensor.name), tensor


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the configuration and the list of tensors, but no weights."""
    if path.is_file() and path.suffix in PICKLE_SUFFIXES:
        reject_pickle([path], path.parent)
    if path.suffix == ".gguf":
        return _open_gguf(GGUFCheckpoint(path))
    folder = path.parent if path.is_file() else path
    fields = read_config_file(folder)
    find_shard_files(path)  # reports missing weights before an unsupported architecture
    family = find_family(fields)
    _check_quantization(fields)
    config = family.read_config(get_language_model_fields(fields))
    return Checkpoint(
        path, family, config, SafetensorsCheckpoint(path), family.weights, family.ignored
    )


def _open_gguf(file: GGUFCheckpoint) -> Checkpoint:
    family = find_gguf_family(
        file.architecture, file.has_experts, file.gating_function, str(file.path)
    )
    assert family.gguf is not None, f"{family.name} is in GGUF_ARCHITECTURES without a mapping"
    fields = ConfigFields(
        family.gguf.read_config_fields(file.fields) | file.read_token_fields(), str(file.path)
    )
    config = family.read_config(fields)
    ignored = family.gguf.ignored + file.ignored
    weights = family.gguf.select_mappings(file.shapes().keys())
    return Checkpoint(file.path, family, config, file, weights, ignored)


def read_config_file(folder: Path) -> ConfigFields:
    """Read the config.json of a checkpoint folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise WeightsError(
            "this folder has no config.json", where=str(folder), next=_suggest_path(folder)
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"cannot parse config.json: {error}", where=str(file), next="download it again"
        ) from error
    if not isinstance(values, dict):
        raise WeightsError(
            "config.json is not a JSON object", where=str(file), next="download it again"
        )
    return ConfigFields(values, str(file))


def _suggest_path(folder: Path) -> str:
    """Suggest a path to pass instead, from the contents of the folder."""
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"pass one of its files: {ggufs[0]}"
    if any(folder.glob("*.safetensors")):
        return "download config.json from the model repository into this folder"
    inside = sorted(file.parent for file in folder.glob("*/config.json"))
    if inside:
        return f"pass the checkpoint's own folder: {inside[0]}"
    return "pass a checkpoint folder (config.json, weights, tokenizer.json) or a .gguf file"


def get_language_model_fields(fields: ConfigFields) -> ConfigFields:
    """The fields of the language model. A multimodal config.json nests them in `text_config`."""
    if "text_config" not in fields:
        return fields
    text_fields = fields.get_section("text_config")
    shared = {name: fields.values[name] for name in SHARED_FIELDS if name in fields}
    return ConfigFields({**shared, **text_fields.values}, text_fields.where)


def _check_quantization(fields: ConfigFields) -> None:
    if "quantization_config" in fields:
        section = fields.get_section("quantization_config")
        method = section.get_choice("quant_method", QUANT_METHODS, "")
        if method == "fp8":
            section.require("weight_block_size", [128, 128])


def assign_weights(checkpoint: Checkpoint, model: nn.Module) -> dict[str, list[WeightAssignment]]:
    """Map each checkpoint tensor to the parameters it fills.

    One error lists every missing, unexpected and mismatched tensor.
    """
    config = checkpoint.config
    parameters = dict(model.named_parameters())
    expected = map_expected_names(checkpoint.weights, config, parameters)
    present = {
        strip_multimodal_prefix(name): shape for name, shape in checkpoint.source.shapes().items()
    }
    missing = [name for name in expected if name not in present]
    unexpected = [
        name for name in present if name not in expected and not _is_ignored(checkpoint, name)
    ]
    mismatched = [
        problem
        for name, assignments in expected.items()
        if name in present
        for assignment in assignments
        if (problem := describe_shape_mismatch(assignment, name, present[name], parameters, config))
    ]
    if missing or unexpected or mismatched:
        counts = (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
        what = ", ".join(f"{len(names)} {kind}" for kind, names in counts if names)
        raise WeightsError(
            f"the checkpoint does not match the {checkpoint.family.name} architecture: {what}",
            where=str(checkpoint.path),
            missing="\n".join(missing),
            unexpected="\n".join(unexpected),
            mismatched="\n".join(mismatched),
            next="check that config.json belongs to these weights",
        )
    return expected


def map_expected_names(
    weights: tuple[WeightMapping, ...], config: ModelConfig, parameters: dict[str, Tensor]
) -> dict[str, list[WeightAssignment]]:
    """Every tensor name that the checkpoint should contain, with its assignments."""
    result: dict[str, list[WeightAssignment]] = {}
    by_target: dict[str, list[WeightMapping]] = {}
    for mapping in weights:
        by_target.setdefault(mapping.target, []).append(mapping)
    for parameter in parameters:
        match = re.match(r"layers\.(\d+)\.", parameter)
        layer = match.group(1) if match else ""
        target = re.sub(r"^layers\.\d+\.", "layers.{layer}.", parameter)
        assert target in by_target, f"{config.family} has no weight mapping for {parameter}"
        for mapping in by_target[target]:
            num_experts = 1
            if "{expert}" in mapping.source:
                assert config.moe is not None, f"{mapping.source} needs a model with experts"
                num_experts = config.moe.num_experts
            for expert in range(num_experts):
                source = mapping.source.replace("{layer}", layer).replace("{expert}", str(expert))
                result.setdefault(source, []).append(WeightAssignment(mapping, parameter, expert))
    return result


def describe_shape_mismatch(
    assignment: WeightAssignment,
    name: str,
    shape: Shape,
    parameters: dict[str, Tensor],
    config: ModelConfig,
) -> str:
    """What is wrong with a tensor's shape, or "". The mapping is applied on the meta device."""
    mapping, parameter = assignment.mapping, parameters[assignment.parameter]
    target = mapping.target_view(parameter, config, assignment.expert).shape
    text = f"{name}: shape {list(shape)}; {assignment.parameter} needs {list(target)}"
    try:
        converted = mapping.convert(torch.empty(shape, device="meta"), config).shape
    except (RuntimeError, IndexError):  # the conversion is a view that this shape does not allow
        return f"{text} after conversion"
    if converted == target:
        return ""
    return text + (f", converted it is {list(converted)}" if converted != shape else "")


def _is_ignored(checkpoint: Checkpoint, name: str) -> bool:
    if checkpoint.config.tie_word_embeddings and name in LM_HEAD_NAMES:
        return True
    num_layers = str(len(checkpoint.config.layers))
    patterns = (pattern.replace("{num_layers}", num_layers) for pattern in checkpoint.ignored)
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def strip_multimodal_prefix(name: str) -> str:
    """A tensor name without the prefix that multimodal checkpoints add."""
    for prefix, replacement in MULTIMODAL_PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
