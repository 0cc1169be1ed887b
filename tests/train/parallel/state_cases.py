"""What ranks run in the tests of sharded states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from fulgurite.train.batch import Batch
from fulgurite.train.config import ParallelSection, TrainConfig
from fulgurite.train.loss import LossModule, LossSums
from fulgurite.train.optim.build import build_optimizer
from fulgurite.train.parallel import build_layout
from fulgurite.train.parallel.data import ReplicatedData
from fulgurite.train.parallel.fsdp import ShardedData
from fulgurite.train.parallel.layout_base import Degrees, RankMesh
from fulgurite.train.step import TrainStep
from fulgurite.train.tune.lora import (
    LoRAConfig,
    adapter_weights,
    adapters_merged,
    add_adapters,
)
from tests.train.parallel.layout_cases import Case, build_model, local_batches, model_config


class UnevenLoss(nn.Module):
    """A model of two parameters; only rank 0 uses the second."""

    def __init__(self, uses_second: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2))
        self.second = nn.Parameter(torch.zeros(2))
        self.uses_second = uses_second

    def forward(self, tokens: Tensor, *rest: Any) -> LossSums:
        total = self.first.sum() + (self.second.sum() if self.uses_second else 0.0)
        zero = torch.zeros(())
        return LossSums(total, zero, zero, torch.tensor(1), None)


def use_parameters_unevenly() -> tuple[list[float], list[float]]:
    ranks = RankMesh(Degrees(dp_shard=2), 20.0, "cpu")
    layout = ShardedData(TrainConfig(), ranks)
    model = layout.shard(UnevenLoss(ranks.rank == 0))
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    layout.run_microbatches(model, [Batch(tokens, tokens, tokens)])
    gradients = [p.grad.full_tensor().tolist() for p in model.parameters()]  # type: ignore[union-attr]
    layout.barrier()
    layout.close()
    return gradients[0], gradients[1]


def merge_into_shards() -> tuple[bool, float]:
    """Whether adapters stay whole, and how far merged shards are from a merge on one rank."""
    models = [build_model("moe", torch.float32) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        add_adapters(model, LoRAConfig(rank=2))
        for weights in adapter_weights(model):
            nn.init.constant_(weights.b, 0.1)
    ranks = RankMesh(Degrees(dp_shard=2), 20.0, "cpu")
    layout = ShardedData(TrainConfig(), ranks)
    sharded = layout.shard(models[0])
    is_whole = not any(isinstance(w.a, DTensor) for w in adapter_weights(sharded))
    differences = []
    with adapters_merged(sharded), adapters_merged(models[1]):
        expected = dict(models[1].named_parameters())
        for name, parameter in sharded.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            differences.append(float((full - expected[name]).detach().abs().max()))
    layout.barrier()
    layout.close()
    return is_whole, max(differences)


class SmallLoss(nn.Module):
    """A bfloat16 parameter with this gradient in all elements."""

    def __init__(self, gradient: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.gradient = gradient

    def forward(self, tokens: Tensor, *rest: Any) -> LossSums:
        zero = torch.zeros(())
        return LossSums((self.weight * self.gradient).sum(), zero, zero, torch.tensor(1), None)


def sum_small_gradients(shard: int) -> list[float]:
    ranks = RankMesh(Degrees(dp_replicate=3 // shard, dp_shard=shard), 20.0, "cpu")
    kind = ShardedData if shard > 1 else ReplicatedData
    layout = kind(TrainConfig(), ranks)
    model = layout.shard(SmallLoss(256.0 if ranks.rank == 0 else 1.0))
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    layout.run_microbatches(model, [Batch(tokens, tokens, tokens)])
    gradient: Any = next(model.parameters()).grad
    gradient = gradient.full_tensor() if shard > 1 else gradient
    values: list[float] = gradient.tolist()
    layout.close()
    return values


def load_other_layout(folder: str, action: str, degrees: dict[str, Any]) -> list[float]:
    """Two steps, save, two steps; or load, and the same two steps."""
    case = Case("moe", steps=4, parallel=degrees)
    config = replace(case.config, parallel=replace(ParallelSection(timeout=60.0), **degrees))
    model = build_model(case.model, case.dtype)
    if action == "load":
        for parameter in model.parameters():
            parameter.data.fill_(0.01)
    layout: Any = build_layout(config, model_config(case.model), "cpu")
    loss_module = LossModule(layout.shard(model), config.loss)
    optimizer = build_optimizer(model, config.optimizer, case.steps)
    step = TrainStep(loss_module, model, optimizer, layout, config)
    if action == "save":
        for number in range(2):
            step(number, local_batches(case, layout, number))
    weights, states = get_state_dict(model, optimizer)
    if action == "save":
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    else:
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    losses = [step(number, local_batches(case, layout, number)).loss for number in range(2, 4)]
    layout.barrier()
    layout.close()
    return losses
