"""Adapters from PEFT's files: a folder and a model in, the model with wrapped modules out.

The layout of the files is that of peft_files.py. An adapter that adds more than a product of two
matrices (DoRA, biases, saved modules) is an error, and so is a tensor that belongs to no weight.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models import CausalLM
from fulgurite.models.moe import Experts
from fulgurite.train.tune.adapters import LoRAExperts, LoRALinear, LoRAModule
from fulgurite.train.tune.lora import (
    EXPERT_WEIGHTS,
    adapter_modules,
    adapter_weights,
    list_candidates,
    set_module,
)
from fulgurite.train.tune.peft_files import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from fulgurite.train.tune.published_names import (
    ExpertPart,
    LinearPart,
    expert_part,
    find_family,
    linear_parts,
)

# Options of PEFT that change what an adapter computes.
UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
)
Pair = tuple[Tensor, Tensor]


@dataclass
class AdapterFiles:
    """The contents of a folder; `used` are the tensors that were read."""

    folder: Path
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    used: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, folder: Path) -> AdapterFiles:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise WeightsError(f"there is no {name}", where=str(folder))
        fields = read_config(folder / CONFIG_FILE)
        tensors = load_file(folder / WEIGHTS_FILE)
        return cls(folder, fields, {name.removeprefix(PREFIX): x for name, x in tensors.items()})

    def take(self, module: str) -> Pair | None:
        """A and B of a module of transformers; None: it has no adapter."""
        names = [f"{module}.lora_{part}.weight" for part in "AB"]
        if not all(name in self.tensors for name in names):
            return None
        self.used.update(names)
        a, b = (self.tensors[name] for name in names)
        return a, b

    def scaling(self, module: str) -> float:
        """What the product of a module is multiplied by."""
        rank, alpha = self.fields["r"], self.fields["lora_alpha"]
        rank = _pick(self.fields.get("rank_pattern"), module, rank)
        alpha = _pick(self.fields.get("alpha_pattern"), module, alpha)
        return float(alpha) / (math.sqrt(rank) if self.fields.get("use_rslora") else rank)

    def check_all_used(self) -> None:
        unused = sorted(set(self.tensors) - self.used)
        if unused or not self.tensors:
            raise WeightsError(
                f"{len(unused)} tensors of the adapter belong to no weight of the model"
                if unused
                else "the adapter has no tensors",
                where=str(self.folder / WEIGHTS_FILE),
                unexpected="\n".join(unused[:8]),
                next="load it into the model that it was trained on",
            )


def _pick(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_config(file: Path) -> dict[str, Any]:
    """The fields of an adapter_config.json of plain LoRA."""
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"cannot parse {file.name}: {error}", where=str(file)) from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise WeightsError("this is not a LoRA adapter", where=str(file))
    other = [f"{key}={fields[key]!r}" for key in UNSUPPORTED if fields.get(key)]
    if fields.get("bias", "none") != "none":
        other.append(f"bias={fields['bias']!r}")
    if other:
        raise WeightsError(
            f"adapters with {', '.join(other)} are not supported",
            where=str(file),
            next="merge them with PEFT, and load the merged model",
        )
    return fields


def load_adapters(model: CausalLM, folder: str | Path, *, trainable: bool = True) -> list[str]:
    """Wrap the modules that a folder of PEFT has adapters for; returns the names of their weights.

    trainable   the adapters need gradients; the rest of the model is frozen either way
    """
    files = AdapterFiles.read(Path(folder))
    if adapter_modules(model):
        raise ArgumentError("this model has adapters already", next="merge_adapters(model) first")
    family, candidates = find_family(model), list_candidates(model)
    wrapped: dict[str, LoRAModule] = {}
    for path in dict.fromkeys(path for path, part in candidates.values() if not part):
        linear = model.get_submodule(path)
        parts = linear_parts(family, model.config, path, linear.out_features)  # type: ignore[arg-type]
        pair = read_linear(files, parts, linear.out_features)  # type: ignore[arg-type]
        if pair is not None:
            scaling = files.scaling(parts[0].module)
            wrapped[path] = LoRALinear(linear, len(pair[0]), scaling)  # type: ignore[arg-type]
            _fill(wrapped[path], path, {path: pair}, files)
    for path in dict.fromkeys(path for path, part in candidates.values() if part):
        layers = {name: expert_part(family, f"{path}.{name}") for name in EXPERT_WEIGHTS}
        pairs = read_experts(files, layers, model.get_submodule(path))
        if pairs:
            wrapped[path] = _wrap_experts(model, path, pairs, files, layers)
    files.check_all_used()
    model.requires_grad_(False)
    for path, module in wrapped.items():
        module.train(model.get_submodule(path).training)
        for weights in module.weights(path):
            weights.a.requires_grad_(trainable)
            weights.b.requires_grad_(trainable)
        set_module(model, path, module)
    return [weights.path for weights in adapter_weights(model)]


def _wrap_experts(
    model: CausalLM,
    path: str,
    pairs: dict[str, Pair],
    files: AdapterFiles,
    layers: Mapping[str, ExpertPart],
) -> LoRAExperts:
    base = model.get_submodule(path)
    assert isinstance(base, Experts), f"{path} are no experts"
    ranks = {a.shape[1] for a, _ in pairs.values()}
    scalings = {files.scaling(f"{layers[name].module}.{name}") for name in pairs}
    if len(ranks) > 1 or len(scalings) > 1:
        raise WeightsError(
            "the two weights of experts have adapters of different rank or alpha",
            where=f"{files.folder}, {path}",
            next="merge them with PEFT, and load the merged model",
        )
    module = LoRAExperts(base, tuple(pairs), ranks.pop(), scalings.pop())
    _fill(module, path, {f"{path}.{name}": pair for name, pair in pairs.items()}, files)
    return module


def _fill(module: LoRAModule, path: str, pairs: dict[str, Pair], files: AdapterFiles) -> None:
    for weights in module.weights(path):
        for parameter, value in zip((weights.a, weights.b), pairs[weights.path], strict=True):
            if parameter.shape != value.shape:
                raise WeightsError(
                    f"the adapter of {weights.path} is {list(value.shape)}; the model needs "
                    f"{list(parameter.shape)}",
                    where=str(files.folder / WEIGHTS_FILE),
                    next="load it into the model that it was trained on",
                )
            with torch.no_grad():
                parameter.copy_(value)


def read_linear(files: AdapterFiles, parts: list[LinearPart], outputs: int) -> Pair | None:
    """A and B of a linear here, from the linears of transformers that it consists of."""
    found = [(part, files.take(part.module)) for part in parts]
    pairs = [(part, *pair) for part, pair in found if pair is not None]
    if not pairs:
        return None
    for part, _, b in pairs:
        if int(part.rows.max()) >= len(b):
            raise WeightsError(
                f"the adapter of {part.module} has {len(b)} rows; the model needs "
                f"{int(part.rows.max()) + 1}",
                where=str(files.folder / WEIGHTS_FILE),
                next="load it into the model that it was trained on",
            )
    if len(parts) == 1:
        part, a, b = pairs[0]
        b = b[part.rows]
        used = b.any(dim=0)  # a fused linear also has ranks of its other rows
        is_fused = len(part.rows) < len(pairs[0][2])
        return (a[used], b[:, used]) if is_fused and bool(used.any()) else (a, b)
    b = pairs[0][2].new_zeros(outputs, sum(len(a) for _, a, _ in pairs))
    first = 0
    for part, a, part_b in pairs:
        b[part.own, first : first + len(a)] = part_b[part.rows]
        first += len(a)
    return torch.cat([a for _, a, _ in pairs]), b


def read_experts(
    files: AdapterFiles, layers: Mapping[str, ExpertPart], base: torch.nn.Module
) -> dict[str, Pair]:
    """[E, r, D] and [E, O, r] of each expert weight that has an adapter."""
    gate_up, down = EXPERT_WEIGHTS
    inner = files.take(f"{layers[gate_up].module}.base_layer")
    outer = files.take(layers[gate_up].module)
    if outer is None:
        return {}
    found = {gate_up: inner, down: outer} if inner is not None else {}
    if inner is None:
        targets = files.fields.get("target_parameters") or ()
        is_gate_up = any(str(target).rpartition(".")[2] == gate_up for target in targets)
        found = {gate_up if is_gate_up else down: outer}
    experts = len(getattr(base, gate_up))
    return {
        name: unstack_experts(layers[name], experts, *pair)
        for name, pair in found.items()
        if pair is not None
    }


def unstack_experts(part: ExpertPart, experts: int, a: Tensor, b: Tensor) -> Pair:
    """[E r, D] and [O, r E] -> [E, r, D] and [E, O, r]."""
    a_ErD = a.unflatten(0, (experts, -1))
    b_EOr = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if part.swapped:
        a_ErD, b_EOr = b_EOr.transpose(1, 2), a_ErD.transpose(1, 2)
    if part.interleaved:
        b_EOr = b_EOr.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return a_ErD, b_EOr
