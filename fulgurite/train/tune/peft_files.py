"""Adapters in PEFT's file layout: a model with adapters in, two files out.

    adapter_config.json           rank, alpha, names of the adapted modules of transformers
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight [r, D], lora_B.weight [O, r]

Linears that transformers fuses (`qkv_proj`) get one adapter of the sum of the ranks, with blocks of
zeros in B. Experts are one adapter a parameter: A [E r, D] and B [O, r E], as PEFT stacks them.
`PeftModel.from_pretrained(model, folder)` loads the folder; peft_loading.py is the way back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.files import share, write_atomically
from fulgurite.models import CausalLM
from fulgurite.train.tune.adapters import LoRAWeights
from fulgurite.train.tune.lora import EXPERT_WEIGHTS, LoRAConfig, adapter_weights
from fulgurite.train.tune.published_names import (
    ExpertPart,
    LinearPart,
    expert_part,
    find_family,
    linear_parts,
)

PREFIX = "base_model.model."
# In models with experts PEFT takes linears of these names for experts of older files, whatever their
# full names. As `target_parameters` they are left alone.
EXPERT_LINEARS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def save_adapters(
    model: CausalLM, config: LoRAConfig, folder: str | Path, base_name: str | None = None
) -> None:
    """Write the adapters of a model. `base_name`: the model that they belong to."""
    family, folder = find_family(model), Path(folder)
    linears: dict[str, list[tuple[LinearPart, LoRAWeights]]] = {}
    experts: dict[str, dict[str, tuple[ExpertPart, LoRAWeights]]] = {}
    for weights in adapter_weights(model):
        if weights.a.dim() == 3:
            part = expert_part(family, weights.path)
            experts.setdefault(part.module, {})[part.name] = part, weights
            continue
        for rows in linear_parts(family, model.config, weights.path, weights.b.shape[0]):
            linears.setdefault(rows.module, []).append((rows, weights))
    if not linears and not experts:
        raise ArgumentError("this model has no adapters", next="add_adapters(model, LoRAConfig())")
    tensors: dict[str, Tensor] = {}
    patterns: dict[str, tuple[int, float]] = {}
    for module, parts in linears.items():
        a, b = _fuse(parts)
        _store(tensors, module, a, b)
        scaling = parts[0][1].scaling
        if (len(a), scaling) != (config.rank, config.scaling):
            patterns[module] = len(a), scaling
    for module, named in experts.items():
        for name, (part, weights) in named.items():
            is_inner = len(named) > 1 and name == EXPERT_WEIGHTS[0]
            inner = f"{module}.base_layer" if is_inner else module
            _store(tensors, inner, *_stack_experts(part, weights))
    parameters = [f"{module}.{name}" for module, named in experts.items() for name in named]
    modules = list(linears)
    if model.config.moe is not None:
        mistaken = [name for name in modules if name.rpartition(".")[2] in EXPERT_LINEARS]
        modules = [name for name in modules if name not in mistaken]
        parameters += [f"{name}.weight" for name in mistaken]
    fields = _config_fields(config, modules, parameters, patterns, base_name)
    _write_files(folder, tensors, fields)


def _write_files(folder: Path, tensors: dict[str, Tensor], fields: dict[str, Any]) -> None:
    """Write weights, then the config, without which nothing loads them: a killed process leaves no half."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    unfinished = folder / f".{WEIGHTS_FILE}.partial"
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"})
        share(unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(folder / WEIGHTS_FILE)
    finally:
        unfinished.unlink(missing_ok=True)
    write_atomically(folder / CONFIG_FILE, json.dumps(fields, indent=2) + "\n")


def _config_fields(
    config: LoRAConfig,
    modules: list[str],
    parameters: list[str],
    patterns: Mapping[str, tuple[int, float]],
    base_name: str | None,
) -> dict[str, Any]:
    alphas = {
        name: scaling * (math.sqrt(rank) if config.use_rslora else rank)
        for name, (rank, scaling) in patterns.items()
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        # PEFT takes no dropout for parameters; it matters only to training
        "lora_dropout": 0.0 if parameters else config.dropout,
        "use_rslora": config.use_rslora,
        "bias": "none",
        "target_modules": modules,
        "target_parameters": parameters or None,
        "rank_pattern": {_escape(name): rank for name, (rank, _) in patterns.items()},
        "alpha_pattern": {_escape(name): alpha for name, alpha in alphas.items()},
    }


def _escape(name: str) -> str:
    """A pattern of PEFT that matches just this module."""
    return "^" + name.replace(".", r"\.")


def _store(tensors: dict[str, Tensor], module: str, a: Tensor, b: Tensor) -> None:
    for name, tensor in (("lora_A", a), ("lora_B", b)):
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        tensors[f"{PREFIX}{module}.{name}.weight"] = copy


def _fuse(parts: list[tuple[LinearPart, LoRAWeights]]) -> tuple[Tensor, Tensor]:
    """A and B of one linear of transformers, from the linears here that are rows of it."""
    (rows, weights), *others = parts
    if not others and torch.equal(rows.rows, torch.arange(len(rows.rows))):
        return weights.a, weights.b[rows.own]
    rank = sum(weights.a.shape[0] for _, weights in parts)
    size = max(int(rows.rows.max()) + 1 for rows, _ in parts)
    b = weights.b.new_zeros(size, rank)
    first = 0
    for rows, weights in parts:
        last = first + weights.a.shape[0]
        b[rows.rows, first:last] = weights.b.detach()[rows.own]
        first = last
    return torch.cat([weights.a.detach() for _, weights in parts]), b


def _stack_experts(part: ExpertPart, weights: LoRAWeights) -> tuple[Tensor, Tensor]:
    """[E, r, D] and [E, O, r] -> [E r, D] and [O, r E]."""
    a, b = weights.a.detach(), weights.b.detach()
    if part.interleaved:  # gate rows, up rows -> gate, up, gate, up, …
        b = b.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    if part.swapped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)
