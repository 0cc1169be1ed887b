"""Layouts of pipelines: stages over ranks, with everything else inside a stage.

shard              keep the layers of this rank's stages; then split and shard them as without stages
run_microbatches   the schedule, then sums over tied stages, data, context and tensor ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from fulgurite.train.accumulate import mean_totals, trainable_parameters
from fulgurite.train.batch import Batch
from fulgurite.train.config import TrainConfig
from fulgurite.train.layout import StepTotals
from fulgurite.train.loss import LossSums
from fulgurite.train.parallel.data import divide_gradients
from fulgurite.train.parallel.layout_base import RankMesh, sum_losses
from fulgurite.train.parallel.model_layouts import (
    ReplicatedModelParallel,
    ShardedModelParallel,
    split_batches,
)
from fulgurite.train.parallel.pipeline import Pipeline


class ReplicatedPipeline(ReplicatedModelParallel):
    """A pipeline with replicated data ranks, or with one; stages may be tensor- or context-parallel."""

    def __init__(self, config: TrainConfig, ranks: RankMesh) -> None:
        super().__init__(config, ranks)
        self.pipeline = Pipeline(config, ranks)

    def shard(self, model: nn.Module) -> nn.Module:
        self.pipeline.keep_stages(model)
        return super().shard(model)

    def run_microbatches(self, loss_module: nn.Module, batches: Sequence[Batch]) -> StepTotals:
        return run_pipeline(self, loss_module, batches)

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return super().gradient_norm(self.pipeline.counted_once(self._model, parameters))

    def evaluate_batch(self, loss_module: nn.Module, batch: Batch) -> LossSums:
        sums = self.pipeline.evaluate(loss_module, split_batches(self, [batch]))
        return sum_losses(sums, self.ranks.axis("cp"), in_order=False)

    def prepare_export(
        self, model: nn.Module
    ) -> tuple[nn.Module, Callable[[str, Tensor], Tensor] | None]:
        return self.pipeline.whole_model(model), self.pipeline.gather_parameter


class ShardedPipeline(ReplicatedPipeline, ShardedModelParallel):
    """The same with FSDP2 or HSDP over the data ranks."""


def run_pipeline(
    layout: ReplicatedPipeline, loss_module: nn.Module, batches: Sequence[Batch]
) -> StepTotals:
    """A step: the schedule, then sums over tied stages, data, context and tensor ranks."""
    sums = layout.pipeline.run(loss_module, split_batches(layout, batches))
    layout.pipeline.sum_tied_gradients(layout._model)
    parameters = trainable_parameters(loss_module)
    reducer = layout.reducer(parameters)
    reducer.arm()
    reducer.finish()
    if layout.tensor is not None:
        layout.tensor.reduce_gradients(layout._model)
    sums = layout.sum_over_tokens(sums)
    divide_gradients(parameters, sums.tokens)
    return mean_totals(sums)
