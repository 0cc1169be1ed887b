"""Layouts of tensor and context parallelism: the data layouts, with models and batches split first.

    shard              split matrices over `tp`, attention over `cp`; then data parallelism as it is
    run_microbatches   split each microbatch over `cp`; then sum partial gradients over `tp`

Ranks of one tensor group have the same microbatches, and those of one context group parts of them:
`data_rank` counts neither. Gradients are summed over data and context ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.registry import get_sharding_rules
from fulgurite.models.layers import CausalLM
from fulgurite.parallel.mesh import Axis
from fulgurite.train.batch import Batch
from fulgurite.train.config import TrainConfig
from fulgurite.train.layout import StepTotals
from fulgurite.train.loss import LossSums
from fulgurite.train.parallel.compiled import trace_collectives
from fulgurite.train.parallel.context import check_context_degree, split_attention, split_batch
from fulgurite.train.parallel.data import ReplicatedData
from fulgurite.train.parallel.fsdp import ShardedData, is_fsdp_shard
from fulgurite.train.parallel.layout_base import Degrees, sum_losses
from fulgurite.train.parallel.tensor import (
    TensorSharding,
    check_tensor_degree,
    shard_tensor_parallel,
)


def check_model_parallel(config: TrainConfig, model_config: ModelConfig, degrees: Degrees) -> None:
    """ArgumentError for degrees that a model or its sequences don't divide by."""
    check_task(config, degrees)
    check_tensor_degree(model_config, degrees.tp)
    if degrees.cp > 1 and config.data.sequence_length is not None:
        check_context_degree(config.data.sequence_length, degrees.cp)


def check_task(config: TrainConfig, degrees: Degrees) -> None:
    """ArgumentError for what works only where one rank has a whole model."""
    if degrees.tp * degrees.cp * degrees.pp == 1:
        return
    where = "parallel.tensor, pipeline or context above 1"
    if config.tune.method != "none" or config.tune.task not in ("text", "chat"):
        raise ArgumentError(
            f"tune.method={config.tune.method!r} and tune.task={config.tune.task!r} with {where}",
            next="use data ranks (parallel.data, parallel.data_shard)",
        )
    if config.precision.matmul != "none":
        raise ArgumentError(
            f"precision.matmul={config.precision.matmul!r} with {where}: a shard of a matrix would "
            "have scales of its own",
            next="precision.matmul='none', or data ranks only",
        )


class ReplicatedModelParallel(ReplicatedData):
    """Tensor and context parallelism with replicated data ranks, or with one."""

    tensor: TensorSharding | None = None
    _model: nn.Module

    def shard(self, model: nn.Module) -> nn.Module:
        self._model = split_model(self, model)
        return super().shard(model)

    def run_microbatches(self, loss_module: nn.Module, batches: Sequence[Batch]) -> StepTotals:
        totals = super().run_microbatches(loss_module, split_batches(self, batches))
        if self.tensor is not None:
            self.tensor.reduce_gradients(self._model)
        return totals

    def evaluate_batch(self, loss_module: nn.Module, batch: Batch) -> LossSums:
        return evaluate_split(self, loss_module, batch)

    def prepare_export(
        self, model: nn.Module
    ) -> tuple[nn.Module, Callable[[str, Tensor], Tensor] | None]:
        return model, None  # DTensors gather themselves


class ShardedModelParallel(ReplicatedModelParallel, ShardedData):
    """The same with FSDP2 or HSDP over the data ranks."""

    def reduction_groups(
        self, parameters: Sequence[nn.Parameter]
    ) -> list[tuple[Axis, list[nn.Parameter]]]:
        """FSDP sums over data ranks only: what it sharded is left to sum over context ranks."""
        sharded = [p for p in parameters if is_fsdp_shard(p)]
        return [*super().reduction_groups(parameters), (self.ranks.axis("cp"), sharded)]


def split_model(layout: ReplicatedModelParallel, model: nn.Module) -> nn.Module:
    """Split a whole model over tensor and context ranks, in place."""
    assert isinstance(model, CausalLM), f"{type(model).__name__} has no sharding rules"
    ranks, degrees = layout.ranks, layout.degrees
    if degrees.cp > 1:
        split_attention(model, trace_collectives(ranks.axis("cp")))
    if degrees.tp > 1:
        layout.tensor = shard_tensor_parallel(
            model,
            ranks.mesh["tp"],
            trace_collectives(ranks.axis("tp")),
            get_sharding_rules(model.config),
            sequence_parallel=layout.config.parallel.sequence,
            keep_experts=degrees.ep > 1,
        )
    return model


def split_batches(layout: ReplicatedModelParallel, batches: Sequence[Batch]) -> Sequence[Batch]:
    if layout.degrees.cp == 1:
        return batches
    return [split_batch(batch, layout.ranks.axis("cp")) for batch in batches]


@torch.no_grad()
def evaluate_split(
    layout: ReplicatedModelParallel, loss_module: nn.Module, batch: Batch
) -> LossSums:
    """The sums of a microbatch, of which each context rank computes a part."""
    (part,) = split_batches(layout, [batch])
    sums: LossSums = loss_module(
        part.tokens_BT, part.labels_BT, part.positions_BT, part.documents_BT
    )
    return sum_losses(sums, layout.ranks.axis("cp"), in_order=False)
