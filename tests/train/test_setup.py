"""How a step is compiled under the layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fulgurite.train.config import ParallelSection, TrainConfig
from fulgurite.train.setup import compile_step


class SplitLayout:
    """A layout whose ranks share one model, as far as `compile_step` looks at it."""

    def evaluate_batch(self, loss_module: nn.Module, batch: Any) -> None: ...

    def prepare_export(self, model: nn.Module) -> None: ...


@pytest.mark.parametrize(
    ("section", "is_compiled"),
    [
        (ParallelSection(tensor=2, data_shard=0), True),
        (ParallelSection(context=2, data_shard=0, remat="full"), True),
        (ParallelSection(tensor=2, remat="full"), False),  # its DTensors can't be recomputed
    ],
)
def test_layers_of_a_shared_model_are_compiled(section: ParallelSection, is_compiled: bool) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    config = replace(TrainConfig(), parallel=section)
    layout: Any = SplitLayout()
    loss, layers = compile_step(model, model, config, torch.device("cpu"), layout)
    assert loss is model and (layers is not None) == is_compiled
