"""What a path holds: its family, configuration and tensors, and which tensor fills which parameter.

    open_checkpoint   config.json or GGUF metadata -> family, ModelConfig, where the tensors are
    plan              the family's table x the parameters x the tensors there are -> what fills what

Names and shapes are checked before the first byte of a weight is read, and the error lists all that
is wrong.
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
from fulgurite.models.config import Fields, ModelConfig
from fulgurite.models.family import Family, Rule
from fulgurite.models.gguf_file import GGUFFile
from fulgurite.models.registry import family_of, family_of_gguf
from fulgurite.models.safetensors_file import (
    PICKLED,
    SafetensorsFiles,
    find_files,
    refuse_pickle,
)
from fulgurite.models.stored import Shape, StoredTensor

# Multimodal checkpoints keep their language model under a prefix: the name there, and as the tables
# have it.
PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
SHARED_FIELDS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
HEADS = ("lm_head.weight", "output.weight")
QUANT_METHODS = ("fp8", "mxfp4")


class TensorFiles(Protocol):
    """Where tensors come from: safetensors or GGUF."""

    def shapes(self) -> dict[str, Shape]: ...

    def read(self) -> Iterator[StoredTensor]: ...


@dataclass(frozen=True)
class Checkpoint:
    """What a path turned out to hold."""

    path: Path
    family: Family
    config: ModelConfig
    files: TensorFiles
    weights: tuple[Rule, ...]
    ignored: tuple[str, ...]

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Every tensor by the name that tables have for it."""
        return ((plain_name(stored.name), stored) for stored in self.files.read())


@dataclass(frozen=True)
class Assignment:
    """One tensor of the checkpoint, by one rule, into one parameter."""

    rule: Rule
    parameter: str
    expert: int


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the configuration and the list of tensors; no weights yet."""
    if path.is_file() and path.suffix in PICKLED:
        refuse_pickle([path], path.parent)
    if path.suffix == ".gguf":
        return _open_gguf(GGUFFile(path))
    folder = path.parent if path.is_file() else path
    fields = read_config_file(folder)
    find_files(path)  # a folder without weights is said to be one before anything about its family
    family = family_of(fields)
    _check_quantization(fields)
    config = family.read_config(language_fields(fields))
    return Checkpoint(path, family, config, SafetensorsFiles(path), family.weights, family.ignored)


def _open_gguf(file: GGUFFile) -> Checkpoint:
    family = family_of_gguf(file.architecture, file.has_experts, file.gate, str(file.path))
    assert family.gguf is not None, f"{family.name} is listed for GGUF and has no table"
    fields = Fields(family.gguf.read_fields(file.fields) | file.token_fields(), str(file.path))
    config = family.read_config(fields)
    ignored = family.gguf.ignored + file.computed
    weights = family.gguf.rules(file.shapes().keys())
    return Checkpoint(file.path, family, config, file, weights, ignored)


def read_config_file(folder: Path) -> Fields:
    """config.json of a checkpoint folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise WeightsError(
            "there is no config.json here", where=str(folder), next=_instead_of_config(folder)
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"config.json can't be read: {error}", where=str(file), next="download it again"
        ) from error
    if not isinstance(values, dict):
        raise WeightsError("config.json holds no object", where=str(file), next="download it again")
    return Fields(values, str(file))


def _instead_of_config(folder: Path) -> str:
    """What to give, by what the folder has."""
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"give one of its files: {ggufs[0]}"
    if any(folder.glob("*.safetensors")):
        return "download config.json too, from where the weights are, into this folder"
    inside = sorted(file.parent for file in folder.glob("*/config.json"))
    if inside:
        return f"give the checkpoint's own folder: {inside[0]}"
    return "give a checkpoint's folder (config.json, weights, tokenizer.json), or a .gguf file"


def language_fields(fields: Fields) -> Fields:
    """The fields of the language model; a multimodal config.json has them one level down."""
    if "text_config" not in fields:
        return fields
    inner = fields.section("text_config")
    shared = {name: fields.values[name] for name in SHARED_FIELDS if name in fields}
    return Fields({**shared, **inner.values}, inner.where)


def _check_quantization(fields: Fields) -> None:
    if "quantization_config" in fields:
        section = fields.section("quantization_config")
        method = section.choice("quant_method", QUANT_METHODS, "")
        if method == "fp8":
            section.require("weight_block_size", [128, 128])


def plan(checkpoint: Checkpoint, model: nn.Module) -> dict[str, list[Assignment]]:
    """Which tensor fills what; one error names every missing, extra and misshapen tensor."""
    config = checkpoint.config
    parameters = dict(model.named_parameters())
    wanted = expected_names(checkpoint.weights, config, parameters)
    present = {plain_name(name): shape for name, shape in checkpoint.files.shapes().items()}
    missing = [name for name in wanted if name not in present]
    extra = [name for name in present if name not in wanted and not _ignored(checkpoint, name)]
    misshapen = [
        problem
        for name, assignments in wanted.items()
        if name in present
        for assignment in assignments
        if (problem := misfit(assignment, name, present[name], parameters, config))
    ]
    if missing or extra or misshapen:
        counts = (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        what = ", ".join(f"{len(names)} {kind}" for kind, names in counts if names)
        raise WeightsError(
            f"the checkpoint does not fit {checkpoint.family.name}: {what}",
            where=str(checkpoint.path),
            missing="\n".join(missing),
            extra="\n".join(extra),
            misshapen="\n".join(misshapen),
            next="check that config.json belongs to these weights",
        )
    return wanted


def expected_names(
    weights: tuple[Rule, ...], config: ModelConfig, parameters: dict[str, Tensor]
) -> dict[str, list[Assignment]]:
    """Every name the checkpoint should hold, with the assignments it is for."""
    result: dict[str, list[Assignment]] = {}
    by_target: dict[str, list[Rule]] = {}
    for rule in weights:
        by_target.setdefault(rule.target, []).append(rule)
    for parameter in parameters:
        found = re.match(r"layers\.(\d+)\.", parameter)
        layer = found.group(1) if found else ""
        target = re.sub(r"^layers\.\d+\.", "layers.{layer}.", parameter)
        assert target in by_target, f"no rule of {config.family} fills {parameter}"
        for rule in by_target[target]:
            experts = 1
            if "{expert}" in rule.source:
                assert config.experts is not None, f"{rule.source} without experts"
                experts = config.experts.count
            for expert in range(experts):
                source = rule.source.replace("{layer}", layer).replace("{expert}", str(expert))
                result.setdefault(source, []).append(Assignment(rule, parameter, expert))
    return result


def misfit(
    assignment: Assignment,
    name: str,
    shape: Shape,
    parameters: dict[str, Tensor],
    config: ModelConfig,
) -> str:
    """What is wrong with a tensor's shape, or nothing: the rule is tried on the meta device."""
    rule, parameter = assignment.rule, parameters[assignment.parameter]
    target = rule.put(parameter, config, assignment.expert).shape
    text = f"{name}: {list(shape)} in the checkpoint, {assignment.parameter} wants"
    try:
        taken = rule.take(torch.empty(shape, device="meta"), config).shape
    except (RuntimeError, IndexError):  # a view of it that can't be made
        return f"{text} what gives {list(target)}"
    if taken == target:
        return ""
    return f"{text} {list(target)}" + (f", got {list(taken)}" if taken != shape else "")


def _ignored(checkpoint: Checkpoint, name: str) -> bool:
    if checkpoint.config.tied and name in HEADS:
        return True
    past = str(len(checkpoint.config.layers))
    patterns = (pattern.replace("{past}", past) for pattern in checkpoint.ignored)
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def plain_name(name: str) -> str:
    """A checkpoint's name without the prefix that multimodal checkpoints put in front."""
    for prefix, plain in PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
