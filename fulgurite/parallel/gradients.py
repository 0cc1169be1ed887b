"""Gradient reduction: a model that `parallelize` sharded, after `backward`, in; complete gradients out.

The gradients then equal those of one rank with all tokens, where losses are summed over the data axis.

    experts on the expert axis              over ranks with the same experts (`expert_data`); before
                                            that, an expert in several slots over those (`expert`)
    sharded weights                         over the data axis
    key heads that several ranks have       over those ranks, then over the data axis
    replicated weights in a sharded module  over all ranks: each saw its own heads or columns
    replicated weights, sharded tokens      over all ranks: each saw its own tokens
    all others                              over the data axis

A rank without a gradient, because it had no tokens, takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fulgurite.parallel.collectives import all_reduce
from fulgurite.parallel.mesh import Axis, Mesh

BUCKET_ELEMENTS = 32 << 20  # of one all-reduce


@dataclass(frozen=True)
class ReplicatedKeyHeads:
    """A parameter that is rows `start`... of a full one with `rows` rows; several ranks have it."""

    rows: int
    start: int


@dataclass(frozen=True)
class ReplicatedExperts:
    """A stack of the experts in this rank's slots; some of them are in other slots, too."""

    slots: tuple[int, ...]
    num_experts: int


@dataclass
class GradientReduction:
    """The axis of each parameter's all-reduce, by name, and the replicated parameters."""

    axes: dict[str, str] = field(default_factory=dict)
    replicated_keys: dict[str, ReplicatedKeyHeads] = field(default_factory=dict)
    replicated_experts: dict[str, ReplicatedExperts] = field(default_factory=dict)
    model: nn.Module | None = None

    def reduce(self, mesh: Mesh) -> None:
        """Reduce the gradients of the model, in place."""
        assert self.model is not None, "parallelize fills this in"
        parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        for name, parameter in parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if name in self.replicated_keys:
                _reduce_replicated_keys(parameter.grad, self.replicated_keys[name], mesh.tensor)
            if name in self.replicated_experts:
                _reduce_replicated_experts(
                    parameter.grad, self.replicated_experts[name], mesh.expert
                )
        for axis in (mesh.expert_data, mesh.data, mesh.world):
            if axis.group is not None:
                gradients = [p.grad for n, p in parameters.items() if self.axes[n] == axis.name]
                _reduce_bucketed([gradient for gradient in gradients if gradient is not None], axis)


def _reduce_replicated_experts(gradient: Tensor, copies: ReplicatedExperts, axis: Axis) -> None:
    """Every slot of an expert gets the sum of all its slots. Needs memory for all experts."""
    slots = torch.tensor(copies.slots, device=gradient.device)
    whole = gradient.new_zeros(copies.num_experts, *gradient.shape[1:]).index_add(
        0, slots, gradient
    )
    gradient.copy_(all_reduce(whole, axis, "all-reduce of expert gradients")[slots])


def _reduce_replicated_keys(gradient: Tensor, copies: ReplicatedKeyHeads, axis: Axis) -> None:
    whole = gradient.new_zeros(copies.rows, *gradient.shape[1:])
    mine = slice(copies.start, copies.start + gradient.shape[0])
    whole[mine] = gradient
    gradient.copy_(all_reduce(whole, axis, "all-reduce of key gradients")[mine])


def _reduce_bucketed(gradients: list[Tensor], axis: Axis) -> None:
    """All-reduce many small gradients together."""
    for bucket in _make_buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        parts = all_reduce(flat, axis, "all-reduce of gradients").split([g.numel() for g in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _make_buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Buckets of one dtype and up to BUCKET_ELEMENTS elements; equal on every rank."""
    found: list[list[Tensor]] = []
    open: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        bucket = open.get(gradient.dtype)
        if bucket is None or sum(g.numel() for g in bucket) + gradient.numel() > BUCKET_ELEMENTS:
            bucket = open[gradient.dtype] = []
            found.append(bucket)
        bucket.append(gradient)
    return found
