"""One optimizer step: a step's microbatches in, changed weights and the figures of the step out.

    totals = layout.run_microbatches(loss_module, batches)     gradients of the mean loss of a token
    norm   = layout.gradient_norm(parameters)
    finite?  clip, optimizer.step(), balance                   otherwise nothing changes

A step with a NaN or an infinity in its loss or gradients is skipped: weights, optimizer and router
biases stay as they were. `OneRank` is the layout of a single process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulgurite.determinism import deterministic
from fulgurite.train.accumulate import (
    SumTree,
    count_terms,
    mean_totals,
    norm_of_norms,
    reciprocal,
    run_backward,
    store_gradients,
    take_gradients,
    trainable_parameters,
)
from fulgurite.train.balance import choose_balance, update_balance
from fulgurite.train.batch import Batch
from fulgurite.train.config import TrainConfig
from fulgurite.train.layout import Layout, StepTotals
from fulgurite.train.loss import LossSums
from fulgurite.train.optim.clip import clip_gradients
from fulgurite.train.optim.schedule import (
    learning_rate,
    learning_rate_factor,
    set_learning_rate,
)


class OneRank:
    """The layout of a single process: nothing is shared.

    `deterministic`: microbatches are the leaves of a `SumTree`, which is divided by the tokens of the step.
    Otherwise backward divides, and torch adds each gradient to the sum of those before it, in place.
    """

    rank = 0
    world_size = 1
    data_rank = 0
    data_ranks = 1

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def shard(self, model: nn.Module) -> nn.Module:
        return model

    def run_microbatches(self, loss_module: nn.Module, batches: Sequence[Batch]) -> StepTotals:
        if self.deterministic:
            return self._run_in_order(loss_module, batches)
        counts = torch.stack([count_terms(loss_module, batch) for batch in batches])
        factor, tree = reciprocal(counts.sum()), SumTree()
        for batch in batches:
            tree.push(run_backward(loss_module, batch, factor))
        return mean_totals(LossSums(*tree.total()))  # type: ignore[arg-type]

    def _run_in_order(self, loss_module: nn.Module, batches: Sequence[Batch]) -> StepTotals:
        parameters, tree = trainable_parameters(loss_module), SumTree()
        for batch in batches:
            sums = run_backward(loss_module, batch)
            tree.push([*take_gradients(parameters), *sums])
        values, count = tree.total(), len(parameters)
        sums = LossSums(*values[count:])  # type: ignore[arg-type]
        store_gradients(parameters, values[:count], sums.tokens)
        return mean_totals(sums)

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return norm_of_norms([p.grad for p in parameters if p.grad is not None])

    def sum_over_data(self, x: Tensor) -> Tensor:
        return x

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class StepResult:
    """The figures of a step, on the host.

    Attributes:
        loss, z_loss: means of a token; `z_loss` is not weighted.
        tokens: with a label, of all ranks.
        gradient_norm: before clipping.
        learning_rate: of this step.
        is_skipped: the loss or a gradient was not finite, and nothing changed.
        load_LE: tokens that each expert got; None: no experts.
    """

    loss: float
    z_loss: float
    tokens: int
    gradient_norm: float
    learning_rate: float
    is_skipped: bool
    load_LE: Tensor | None


class TrainStep:
    """Runs optimizer steps: `step(number, batches)`.

    Args:
        loss_module: a `LossModule`, compiled or not, whose `model` the layout has sharded.
        model: the same model; its parameters are those of `optimizer`.
        config: resolved.
    """

    def __init__(
        self,
        loss_module: nn.Module,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        config: TrainConfig,
    ) -> None:
        assert config.steps is not None, "the config is resolved"
        self.loss_module, self.model, self.optimizer = loss_module, model, optimizer
        self.layout, self.config = layout, config
        self.steps = config.steps
        self.balance = choose_balance(model, config.loss)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """Run step `step` (from 0) on this rank's microbatches."""
        section = self.config.optimizer
        set_learning_rate(self.optimizer, section, step, self.steps)
        with deterministic(self.config.deterministic):
            totals = self.layout.run_microbatches(self.loss_module, batches)
        norm = self.layout.gradient_norm(self.parameters)
        # The device waits from here to the next launch, so all that the host reads is read now.
        loss, z_loss, gradient_norm, tokens = read_floats(
            totals.loss, totals.z_loss, norm, totals.tokens
        )
        load_LE = None if totals.load_LE is None else totals.load_LE.cpu()
        is_finite = math.isfinite(loss) and math.isfinite(gradient_norm)
        if is_finite:
            if gradient_norm > section.clip_norm:  # otherwise the factor is 1
                clip_gradients(self.parameters, norm, section.clip_norm)
            self.optimizer.step()
            if self.balance == "bias" and totals.load_LE is not None:
                update_balance(self.model, totals.load_LE, self._balance_rate(step))
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss,
            z_loss,
            int(tokens),
            gradient_norm,
            learning_rate(section, step, self.steps),
            not is_finite,
            load_LE,
        )

    def _balance_rate(self, step: int) -> float:
        """The step of the selection bias: it decays with the learning rate."""
        rate = self.config.loss.balance_rate
        assert rate is not None, "the config is resolved"
        return rate * learning_rate_factor(self.config.optimizer, step, self.steps)


def read_floats(*values: Tensor) -> list[float]:
    """Scalars of the device on the host, in one copy."""
    stacked = torch.stack([value.detach().double().reshape(()) for value in values])
    numbers: list[float] = stacked.tolist()
    return numbers
