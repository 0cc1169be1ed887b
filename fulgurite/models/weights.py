"""Checkpoints into models: a path in, a `Decoder` with its weights out.

    open_checkpoint   config.json or GGUF metadata -> family, ModelConfig, where the tensors are
    plan              the family's table x the parameters x the tensors there are -> what fills what
    load_checkpoint   modules on meta, then one tensor at a time to its final dtype and device

Names and shapes are checked before the first byte of a weight is read, and the error lists all that
is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models import hub
from fulgurite.models.config import Fields, ModelConfig
from fulgurite.models.family import BY_ROWS, Family, Rule
from fulgurite.models.gguf_file import GGUFFile
from fulgurite.models.layers import Decoder
from fulgurite.models.packed import keep_packed
from fulgurite.models.registry import family_of, family_of_gguf
from fulgurite.models.safetensors_file import (
    PICKLED,
    SafetensorsFiles,
    find_files,
    refuse_pickle,
)
from fulgurite.models.stored import Shape, StoredTensor
from fulgurite.quant import QuantTensor

COPY_BYTES = 32 * 2**20  # of float32 that may lie beside a tensor while it is converted
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
KEEP = ("dense", "packed")


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


@dataclass(frozen=True)
class Assignment:
    """One tensor of the checkpoint, by one rule, into one parameter."""

    rule: Rule
    parameter: str
    expert: int


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    keep: str = "dense",
    activations: str | None = None,
) -> Decoder:
    """The model of a folder, file or name (see hub.py); dtype None keeps the checkpoint's.

    `keep="packed"` leaves weights that the file has in blocks as they are (see packed.py), multiplied
    by `quant_linear` with `activations`: None what is fastest on the device, "none" exact.
    """
    checkpoint = open_checkpoint(hub.resolve(name))
    return load_checkpoint(
        checkpoint, dtype=dtype, device=device, keep=keep, activations=activations
    )


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
            "there is no config.json here", where=str(folder), next="give the checkpoint's folder"
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"config.json can't be read: {error}", where=str(file)) from error
    if not isinstance(values, dict):
        raise WeightsError("config.json holds no object", where=str(file))
    return Fields(values, str(file))


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


def build_model(config: ModelConfig, family: Family, dtype: torch.dtype) -> Decoder:
    """The modules on the meta device: shapes and dtypes without memory."""
    with _default_dtype(dtype), torch.device("meta"):
        model = family.build(config)
    assert isinstance(model, Decoder), f"{family.name} builds no Decoder"
    return model


@torch.inference_mode(False)  # parameters are plain tensors wherever they are loaded
def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    keep: str = "dense",
    activations: str | None = None,
) -> Decoder:
    if keep not in KEEP:
        raise ArgumentError(f"keep={keep!r} is not a way to keep weights", next=" or ".join(KEEP))
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"a model can't compute in {dtype}", next="try torch.bfloat16")
    model = build_model(checkpoint.config, checkpoint.family, dtype or checkpoint.config.dtype)
    assignments = plan(checkpoint, model)
    filled: set[str] = set()
    if keep == "packed":
        tensors = ((plain_name(stored.name), stored) for stored in checkpoint.files.read())
        filled = keep_packed(
            model, tensors, assignments, checkpoint.config, device=device, activations=activations
        )
    allocate(model, device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for stored in checkpoint.files.read():
            for assignment in assignments.get(plain_name(stored.name), ()):
                if assignment.parameter not in filled:
                    fill(parameters[assignment.parameter], stored, assignment, checkpoint.config)
    return model.eval()


def fill(
    parameter: Tensor, stored: StoredTensor, assignment: Assignment, config: ModelConfig
) -> None:
    """Copy one tensor into its place, in pieces so that little lies beside it."""
    rule = assignment.rule
    target = rule.put(parameter, config, assignment.expert)
    step = max(1, COPY_BYTES // max(1, 4 * target[:1].numel()))
    taken = None if rule.take in BY_ROWS else rule.take(stored.all(), config)
    for start in range(0, target.shape[0], step):
        stop = min(start + step, target.shape[0])
        if taken is None:
            piece = rule.take(stored.rows(start, stop), config)
        else:
            piece = taken[start:stop]
        target[start:stop].copy_(piece)


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


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Replace meta parameters by empty memory on the device; computed buffers move along."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, QuantTensor):  # kept packed: it has its memory
                continue
            assert parameter.is_meta, f"{path}.{name} already has memory"
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(memory))
    model.to(device)


def random_model(
    config: ModelConfig,
    family: Family,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    std: float = 0.02,
) -> Decoder:
    """A model with random weights, for benchmarks and tests; norms have weight one."""
    model = build_model(config, family, dtype or config.dtype)
    allocate(model, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, std, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
