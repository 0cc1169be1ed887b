"""Pipeline stages: a model in, the same model with this rank's layers only, and its stages, out.

    split = split_layers(num_layers, num_stages)          layers of each stage
    stages = keep_stages(model, indices, split)           in place: other layers are dropped
    StageModule(loss_module, stage, ...)                  what a pipeline schedule runs

A stage runs the whole `LossModule` on a microbatch, with three differences (`StagedLM`): the embedding is
what the stage before sent, only its own layers run, and before the last stage hidden states take the
place of a loss. So routing statistics and the auxiliary loss work as on one rank. A loss of a stage
that is not the last joins the gradient of what the stage sends (`_JoinLoss`).

Parameters keep the names of one rank: `layers.7.attention.q_proj.weight` on whichever rank has it. With
tied embeddings the first and the last stage have `embed_tokens`, and sum its gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fulgurite.errors import ArgumentError
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import KVCache
from fulgurite.models.layers import CausalLM
from fulgurite.models.rope import RotaryCosSin
from fulgurite.models.state_spec import StateSpec
from fulgurite.train.balance import find_routers
from fulgurite.train.batch import Batch
from fulgurite.train.loss import LossModule, LossSums, LossTable
from fulgurite.train.parallel.deferred import WeightGradients


@dataclass(frozen=True)
class Stage:
    """Some layers of a model: `start` to `stop` - 1.

    Attributes:
        index, count: which stage of how many.
        start, stop: its layers.
        routers: which of the model's routers, counted from the first layer, are in it.
        total_routers: of the whole model.
    """

    index: int
    count: int
    start: int
    stop: int
    routers: tuple[int, ...] = ()
    total_routers: int = 0

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def split_layers(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """The layers of each stage. The first stages have one more where they don't divide evenly: the
    last has the head and the loss."""
    if num_stages > num_layers:
        raise ArgumentError(
            f"{num_layers} layers are too few for {num_stages} pipeline stages",
            next="a smaller parallel.pipeline, or pipeline_schedule '1f1b', which has one stage a rank",
        )
    size, more = divmod(num_layers, num_stages)
    starts = [number * size + min(number, more) for number in range(num_stages + 1)]
    return list(itertools.pairwise(starts))


class SkippedLayer(nn.Module):
    """A layer that another rank has; it keeps the numbers of the others."""


class StagedLM(CausalLM):
    """A `CausalLM` of which one stage runs at a time.

    `has_split_tokens`: sequence parallelism splits the tokens between layers.
    """

    active: Stage | None = None
    incoming_TD: Tensor | None = None
    has_split_tokens: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return next(self.layers.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.layers.parameters()).device

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(s for s in self._specs() if isinstance(s, AttentionSpec))

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return tuple(s for s in self._specs() if isinstance(s, StateSpec))

    def _specs(self) -> list[Any]:
        """Of the layers that this rank has."""
        return [x.attention.spec for x in self.layers if not isinstance(x, SkippedLayer)]

    def embed_inputs(self, token_ids_X: Tensor) -> Tensor:
        if self._stage().is_first:
            return super().embed_inputs(token_ids_X)
        x_XD = self.incoming_TD
        assert x_XD is not None, "a stage behind the first gets hidden states"
        return x_XD if self.has_split_tokens else x_XD.view(*token_ids_X.shape, -1)

    def run_layers(
        self, x_XD: Tensor, positions_X: Tensor, cos_sins: Sequence[RotaryCosSin], cache: KVCache
    ) -> Tensor:
        stage = self._stage()
        for number in range(stage.start, stage.stop):
            index = self.rotary_index[number]
            cos_sin = None if index is None else cos_sins[index]
            x_XD = self.layers[number](x_XD, positions_X, cos_sin, cache)
        return self.norm(x_XD) if stage.is_last else x_XD

    def _stage(self) -> Stage:
        if self.active is None:
            raise ArgumentError(
                "a pipeline stage was called as a whole model",
                next="layout.run_microbatches or layout.evaluate_microbatches runs all stages",
            )
        return self.active


def keep_stages(model: CausalLM, indices: Sequence[int], num_stages: int) -> list[Stage]:
    """Drop what the stages `indices` don't need, in place; returns them."""
    split = split_layers(len(model.layers), num_stages)
    numbers = iter(range(len(find_routers(model))))
    routers = [[next(numbers) for _ in find_routers(layer)] for layer in model.layers]
    total = sum(map(len, routers))
    stages = []
    for index in indices:
        start, stop = split[index]
        own = tuple(number for layer in routers[start:stop] for number in layer)
        stages.append(Stage(index, num_stages, start, stop, own, total))
    kept = {number for stage in stages for number in range(stage.start, stage.stop)}
    for number in range(len(model.layers)):
        if number not in kept:
            model.layers[number] = SkippedLayer()
    is_first, is_last = (
        any(getattr(s, which) for s in stages) for which in ("is_first", "is_last")
    )
    if not is_first and not (is_last and model.config.tie_word_embeddings):
        model.embed_tokens = None  # type: ignore[assignment]
    if not is_last:
        model.norm = model.lm_head = None  # type: ignore[assignment]
    model.__class__ = StagedLM
    return stages


class HiddenOutput(LossTable):
    """In place of the head before the last stage: keeps hidden states for the next one; no loss."""

    hidden_TD: Tensor | None = None

    def sum_cross_entropy(
        self, hidden_TD: Tensor, labels_T: Tensor, z_weight: float, scale: float, cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.hidden_TD = hidden_TD
        zero = hidden_TD.new_zeros((), dtype=torch.float32)
        return zero, zero, zero

    def compute_logits(self, x: Tensor) -> Tensor:
        raise ArgumentError("this pipeline stage has no head", next="run all stages")


class StageModule(nn.Module):
    """One stage for a pipeline schedule: hidden states and the number of a microbatch in; hidden
    states out, or the loss of the last stage.

    `batches` are those of the step; `sums` gets the losses and expert loads of each forward.
    """

    def __init__(self, loss_module: LossModule, stage: Stage) -> None:
        super().__init__()
        self.loss_module, self.stage = loss_module, stage
        self.batches: Sequence[Batch] = ()
        self.sums: list[LossSums] = []
        self.weight_gradients: WeightGradients | None = None  # of zero-bubble schedules

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        batch, stage = self.batches[int(number)], self.stage
        with self._activate(None if stage.is_first else x) as output:
            sums: LossSums = self.loss_module(
                batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT
            )
        self.sums.append(LossSums(*(None if v is None else v.detach() for v in sums)))
        if stage.is_last:
            return sums.total
        hidden_TD = output.hidden_TD
        assert hidden_TD is not None, "the loss module calls sum_cross_entropy"
        if sums.total.requires_grad:  # an auxiliary loss
            hidden_TD = _JoinLoss.apply(hidden_TD, sums.total)
        return hidden_TD.clone()  # zero-bubble schedules detach it in place, which a view forbids

    @contextmanager
    def _activate(self, incoming_TD: Tensor | None) -> Iterator[HiddenOutput]:
        """Run this stage in the block."""
        model: Any = self.loss_module.model
        stage, output, section = self.stage, HiddenOutput(), self.loss_module.section
        head = model.lm_head
        share = len(stage.routers) / max(1, stage.total_routers)  # a mean over all layers
        try:
            model.active, model.incoming_TD = stage, incoming_TD
            self.loss_module.section = replace(section, aux_loss=section.aux_loss * share)
            model.lm_head = head if stage.is_last else output
            yield output
        finally:
            model.active = model.incoming_TD = None
            model.lm_head, self.loss_module.section = head, section


class _JoinLoss(Function):
    """x, whose backward also runs that of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss.new_ones(loss.shape))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], ctx.saved_tensors[0]
