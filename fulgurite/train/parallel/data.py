"""Replicated data ranks: every rank has all dense weights and samples of its own.

    this rank's microbatches ─ forward, backward ─▶ local sums ─ all-reduce ─▶ gradients of the step

Buckets of gradients are all-reduced while backward still computes the next ones. In deterministic mode
microbatches are leaves of a `SumTree` instead, and ranks add their subtrees in the order of that tree:
losses, gradients and weights have the same bits on any number of data ranks. For that the number of
microbatches of a rank must be a power of two.

With `parallel.expert` above 1 the experts are distributed over the same ranks (expert.py); gradients of
experts are summed over the ranks with the same experts only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fulgurite.parallel.mesh import Axis
from fulgurite.train.accumulate import (
    SumTree,
    mean_totals,
    run_backward,
    store_gradients,
    take_gradients,
    trainable_parameters,
)
from fulgurite.train.batch import Batch
from fulgurite.train.layout import StepTotals
from fulgurite.train.loss import LossSums
from fulgurite.train.optim.scale import scale_tensors
from fulgurite.train.parallel.expert import distribute_experts, is_expert_shard
from fulgurite.train.parallel.layout_base import ParallelLayout, sum_losses
from fulgurite.train.parallel.reduction import BucketReducer, local_tensor, reduce_in_order


class ReplicatedData(ParallelLayout):
    """Data ranks with equal weights; experts may be distributed."""

    _reducer: tuple[list[nn.Parameter], BucketReducer] | None = None

    def shard(self, model: nn.Module) -> nn.Module:
        if self.degrees.ep > 1:
            distribute_experts(model, self.ranks)
        return model

    def run_microbatches(self, loss_module: nn.Module, batches: Sequence[Batch]) -> StepTotals:
        parameters = trainable_parameters(loss_module)
        if self.is_deterministic:
            return self._run_in_order(loss_module, parameters, batches)
        reducer = self.reducer(parameters)
        tree = SumTree()
        try:
            for number, batch in enumerate(batches):
                if number == len(batches) - 1:
                    reducer.arm()
                tree.push(run_backward(loss_module, batch))
            reducer.finish()
        finally:
            reducer.disarm()
        sums = self.sum_over_tokens(LossSums(*tree.total()))  # type: ignore[arg-type]
        divide_gradients(parameters, sums.tokens)
        return mean_totals(sums)

    def _run_in_order(
        self, loss_module: nn.Module, parameters: list[nn.Parameter], batches: Sequence[Batch]
    ) -> StepTotals:
        tree = SumTree()
        for batch in batches:
            sums = run_backward(loss_module, batch)
            tree.push([*take_gradients(parameters), *sums])
        values, count = tree.total(), len(parameters)
        gradients = reduce_in_order(parameters, values[:count], self.ranks.axis("tokens"))
        sums = self.sum_over_tokens(LossSums(*values[count:]))  # type: ignore[arg-type]
        store_gradients(parameters, gradients, sums.tokens)
        return mean_totals(sums)

    def reducer(self, parameters: list[nn.Parameter]) -> BucketReducer:
        """The buckets of these parameters, made once."""
        if self._reducer is None or not is_same_list(self._reducer[0], parameters):
            self._reducer = parameters, BucketReducer(self.reduction_groups(parameters))
        return self._reducer[1]

    def reduction_groups(
        self, parameters: Sequence[nn.Parameter]
    ) -> list[tuple[Axis, list[nn.Parameter]]]:
        """Which parameters are summed over which ranks."""
        experts = [p for p in parameters if is_expert_shard(p)]
        dense = [p for p in parameters if not is_expert_shard(p)]
        return [(self.ranks.axis("tokens"), dense), (self.ranks.axis("ep_replicate"), experts)]

    def sum_over_tokens(self, sums: LossSums) -> LossSums:
        """Losses, tokens and expert load of all ranks with different tokens."""
        return sum_losses(sums, self.ranks.axis("tokens"), self.is_deterministic)


def is_same_list(left: Sequence[nn.Parameter], right: Sequence[nn.Parameter]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


@torch.no_grad()
def divide_gradients(parameters: Sequence[nn.Parameter], tokens: Tensor) -> None:
    """Divide `.grad` by the number of tokens, in place."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    scale_tensors(gradients, tokens.clamp(min=1).float().reciprocal())
