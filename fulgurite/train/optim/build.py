"""`build_optimizer`: a model and the options of a run in, its optimizer out."""

from __future__ import annotations

from typing import Any

from torch import nn

from fulgurite.train.config import OptimizerSection
from fulgurite.train.optim.adamw import AdamW
from fulgurite.train.optim.groups import build_groups
from fulgurite.train.optim.muon import Muon
from fulgurite.train.optim.schedule import peak_learning_rate, set_learning_rate


def build_optimizer(
    model: nn.Module, section: OptimizerSection, steps: int, deterministic: bool = False
) -> AdamW:
    """The optimizer of a model that is already sharded, with the learning rate of step 0."""
    groups = build_groups(model, section)
    options: dict[str, Any] = {
        "lr": peak_learning_rate(section),
        "betas": section.betas,
        "eps": section.epsilon,
        "states": section.states,
        "rounding": section.rounding,
    }
    if section.name == "muon":
        # The bits of a batched matmul may depend on the batch, which follows the sharding.
        optimizer: AdamW = Muon(
            groups, momentum=section.momentum, batched=not deterministic, **options
        )
    else:
        optimizer = AdamW(groups, **options)
    set_learning_rate(optimizer, section, 0, steps)
    return optimizer
