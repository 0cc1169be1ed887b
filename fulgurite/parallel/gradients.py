"""Which gradients have to be summed over which ranks, and doing it.

In: a model that `parallelize` divided, after `backward`. Out: gradients that equal those of one rank with
all tokens, where losses are summed over the data axis.

    experts over ranks                     over ranks that have the same experts (`replica`); before that, an
                                           expert in several slots over those (`expert`)
    weights that were divided              over the data axis
    key heads that several ranks keep      over those ranks, then over the data axis
    whole weights inside a divided module  over all ranks: each saw its own heads or columns
    whole weights, tokens divided          over all ranks: each saw its own tokens
    all others                             over the data axis

A rank that has no gradient, since no token came by, takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fulgurite.parallel.collectives import sum_over
from fulgurite.parallel.mesh import Axis, Mesh

BUCKET = 32 << 20  # elements that are summed in one collective


@dataclass(frozen=True)
class KeyCopies:
    """A parameter that is rows `start`.. of one with `rows` rows, kept by several ranks."""

    rows: int
    start: int


@dataclass(frozen=True)
class ExpertCopies:
    """A stack of the experts in this rank's slots, of `experts` in all, some of them in other slots too."""

    slots: tuple[int, ...]
    experts: int


@dataclass
class Gradients:
    """The axis of each parameter's sum, by name, and what is kept several times."""

    axes: dict[str, str] = field(default_factory=dict)
    copies: dict[str, KeyCopies] = field(default_factory=dict)
    slots: dict[str, ExpertCopies] = field(default_factory=dict)
    model: nn.Module | None = None

    def reduce(self, mesh: Mesh) -> None:
        """Sum the gradients of the model, in place."""
        assert self.model is not None, "parallelize fills this in"
        parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        for name, parameter in parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if name in self.copies:
                _sum_keys(parameter.grad, self.copies[name], mesh.tensor)
            if name in self.slots:
                _sum_slots(parameter.grad, self.slots[name], mesh.expert)
        for axis in (mesh.replica, mesh.data, mesh.world):
            if axis.group is not None:
                chosen = [p.grad for n, p in parameters.items() if self.axes[n] == axis.name]
                _sum_all([gradient for gradient in chosen if gradient is not None], axis)


def _sum_slots(gradient: Tensor, copies: ExpertCopies, axis: Axis) -> None:
    """Every slot of an expert gets the sum of all of them; room for all experts is needed for that."""
    slots = torch.tensor(copies.slots, device=gradient.device)
    whole = gradient.new_zeros(copies.experts, *gradient.shape[1:]).index_add(0, slots, gradient)
    gradient.copy_(sum_over(whole, axis, "sum of expert gradients")[slots])


def _sum_keys(gradient: Tensor, copies: KeyCopies, axis: Axis) -> None:
    whole = gradient.new_zeros(copies.rows, *gradient.shape[1:])
    mine = slice(copies.start, copies.start + gradient.shape[0])
    whole[mine] = gradient
    gradient.copy_(sum_over(whole, axis, "sum of key gradients")[mine])


def _sum_all(gradients: list[Tensor], axis: Axis) -> None:
    """Many small ones travel together."""
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        parts = sum_over(flat, axis, "sum of gradients").split([g.numel() for g in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Gradients of one dtype, up to BUCKET elements each; the same on every rank."""
    found: list[list[Tensor]] = []
    open: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        bucket = open.get(gradient.dtype)
        if bucket is None or sum(g.numel() for g in bucket) + gradient.numel() > BUCKET:
            bucket = open[gradient.dtype] = []
            found.append(bucket)
        bucket.append(gradient)
    return found
