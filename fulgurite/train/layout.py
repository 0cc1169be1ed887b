"""`Layout`: the interface between a training step and the ranks that share it.

    layout = ...                                     # layout.py: OneRank; parallel/: all others
    model = layout.shard(model)                      # before the optimizer is made
    totals = layout.run_microbatches(loss_module, batches)   # forward, backward; gradients reduced
    norm = layout.gradient_norm(parameters)
    optimizer.step()

**The loss of a step** is a sum over all tokens of the global batch, divided by their number; so a layout
divides gradients by the global number of tokens with a loss, not by microbatches or ranks.

**Same bits.** A step's microbatches are the leaves of a binary tree. In deterministic mode gradients are
added in the order of that tree, whichever rank computed which leaf: a rank has a contiguous power-of-two
share of the leaves, adds them up as a subtree, and subtrees are added across ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from fulgurite.train.batch import Batch


@dataclass(frozen=True)
class StepTotals:
    """What a step gives, over all ranks: scalars on the device, so that reading them can wait.

    Attributes:
        loss: the mean cross entropy of a token, float32.
        z_loss: the mean squared log-partition of a token, float32; not weighted.
        tokens: tokens with a loss.
        load_LE: tokens that each expert of each MoE layer got, padding not counted; None: no experts.
    """

    loss: Tensor
    z_loss: Tensor
    tokens: Tensor
    load_LE: Tensor | None = None


class Layout(Protocol):
    """How ranks share a step."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def data_rank(self) -> int:
        """Which share of a step's microbatches this rank computes."""
        ...

    @property
    def data_ranks(self) -> int: ...

    def shard(self, model: nn.Module) -> nn.Module:
        """The part of the model that this rank holds: its parameters may be DTensors."""
        ...

    def run_microbatches(self, loss_module: nn.Module, batches: Sequence[Batch]) -> StepTotals:
        """Forward and backward of this rank's microbatches; `.grad` of every parameter, None before, is
        reduced and divided by the tokens of the whole step when it returns."""
        ...

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of all gradients of all ranks, on the device."""
        ...

    def sum_over_data(self, x: Tensor) -> Tensor:
        """The sum over data ranks, for metrics and evaluation."""
        ...

    def barrier(self) -> None: ...


@runtime_checkable
class ModelParallelLayout(Protocol):
    """A layout whose ranks share one model or one sequence: tensor, pipeline, context parallelism.

    Its layers may be compiled (parallel/compiled.py). A loss module may not be called by itself.
    """

    def evaluate_batch(self, loss_module: nn.Module, batch: Batch) -> Any:
        """The sums of a microbatch of this data rank, without gradients; equal on its ranks."""
        ...

    def prepare_export(
        self, model: nn.Module
    ) -> tuple[nn.Module, Callable[[str, Tensor], Tensor] | None]:
        """A module with all parameters of one rank, and how to gather one of them."""
        ...
