"""Parameter groups: a model in, `param_groups` of an optimizer out.

    matrices     weights of linears, experts and routers: weight decay; Muon if chosen
    embeddings   token embeddings and the LM head: AdamW; the LM head alone has weight decay
    vectors      norms, biases, gates of one number: AdamW, no weight decay

A parameter that two modules share (tied embeddings) is in one group once. The selection bias of a
router (`correction_bias`) is in none: `balance.py` sets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fulgurite.errors import ArgumentError
from fulgurite.models.moe import Router
from fulgurite.train.config import OptimizerSection
from fulgurite.train.optim.schedule import group_peak

ALGORITHMS = ("adamw", "muon")


def named_trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that an optimizer updates, each once, with its first name."""
    biases = {
        id(module.correction_bias)
        for module in model.modules()
        if isinstance(module, Router) and module.correction_bias is not None
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in biases:
            yield name, parameter


def build_groups(model: nn.Module, section: OptimizerSection) -> list[dict[str, Any]]:
    """The groups that are not empty; names are in `names`, in the order of `params`."""
    if (section.name or "adamw") not in ALGORITHMS:
        raise ArgumentError(
            f"optimizer.name={section.name!r}", next=f"use one of {', '.join(ALGORITHMS)}"
        )
    kinds = classify_parameters(model)
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named_trainable(model):
        kind = kinds[id(parameter)]
        if kind not in groups:
            groups[kind] = _make_group(kind, section)
        groups[kind]["params"].append(parameter)
        groups[kind]["names"].append(name)
    if not groups:
        raise ArgumentError(
            "the model has no parameter to train", next="set requires_grad of some parameters"
        )
    return list(groups.values())


def classify_parameters(model: nn.Module) -> dict[int, str]:
    """The kind of each parameter, by its id."""
    kinds = {
        id(parameter): "matrices" if _is_matrix(name, parameter) else "vectors"
        for name, parameter in model.named_parameters()
    }
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "lm_head":
            kinds.update({id(p): "lm_head" for p in module.parameters() if p.dim() >= 2})
    for module in model.modules():  # after the LM head: a tied weight is an embedding
        if isinstance(module, nn.Embedding):
            # The parameter itself: tensor-parallel modules read it as a local tensor.
            kinds.update({id(p): "embeddings" for p in module.parameters(recurse=False)})
    return kinds


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """False for stacked biases of experts and for filters of short convolutions, too."""
    module, _, own = name.rpartition(".")
    return parameter.dim() >= 2 and not own.endswith("bias") and "conv" not in own + module


def _make_group(kind: str, section: OptimizerSection) -> dict[str, Any]:
    algorithm = (section.name or "adamw") if kind == "matrices" else "adamw"
    return {
        "params": [],
        "names": [],
        "kind": kind,
        "algorithm": algorithm,
        "lr": group_peak(section, algorithm),
        "weight_decay": section.weight_decay if kind in ("matrices", "lm_head") else 0.0,
    }
