"""Muon: matrices are updated by the orthogonalized momentum of their gradients.

    m = mu m + (1 - mu) g              u = (1 - mu) g + mu m          (Nesterov)
    o = newton_schulz(u)               all singular values near 1
    w = w (1 - lr * decay) - lr * 0.2 sqrt(max(rows, columns)) * o

The factor gives updates the size of AdamW's, so that both share a learning rate and a weight decay.

The last two dimensions are the matrix. Stacked experts are one matrix an expert: gate and up rows of
an expert together, as they are one linear. Matrices of one shape are orthogonalized as a batch.

**Shards.** If ranks split the stack, each has whole matrices and works alone. If they split matrices,
these are gathered, each rank orthogonalizes its share of the batch, and the results are gathered. The
result is that of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fulgurite.errors import ArgumentError
from fulgurite.train.optim.adamw import (
    AdamW,
    Slot,
    read_gradients,
    read_weights,
    write_states,
    write_weights,
)
from fulgurite.train.optim.shards import sharded_dims, wrap_like
from fulgurite.train.optim.states import read_state

MOMENTUM = "momentum_buffer"
# Coefficients of the quintic iteration and their number, as published with Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS_OF_ADAMW = 0.2
# bfloat16 is enough for the iteration, as published; CPUs are faster in float32.
MATMUL_DTYPES = {"cuda": torch.bfloat16}


class Muon(AdamW):
    """Muon for groups with `algorithm="muon"`, AdamW for all others."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        batched: bool = True,
        **options: Any,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ArgumentError(
                f"optimizer.momentum={momentum}", next="use a number from 0 to below 1"
            )
        self.momentum, self.batched = momentum, batched
        super().__init__(params, lr, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("algorithm") == "muon":
            vectors = [p for p in param_group["params"] if p.dim() < 2]
            if vectors:
                raise ArgumentError(
                    f"Muon updates matrices, and a parameter is {list(vectors[0].shape)}",
                    next="put vectors into a group with algorithm='adamw'",
                )
        super().add_param_group(param_group)

    def state_names(self, algorithm: str) -> tuple[str, ...]:
        return (MOMENTUM,) if algorithm == "muon" else super().state_names(algorithm)

    def needs_empty(self, slot: Slot) -> bool:
        return MOMENTUM in slot.state and splits_matrices(slot.parameter)

    def update(self, slots: Sequence[Slot], group: dict[str, Any]) -> None:
        if group["algorithm"] != "muon":
            super().update(slots, group)
            return
        weights = read_weights(slots)
        gradients = read_gradients(slots, weights)
        momenta = [read_state(slot.state, MOMENTUM) for slot in slots]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        updates = torch._foreach_lerp(gradients, momenta, self.momentum)
        write_states(slots, MOMENTUM, momenta)
        del momenta, gradients
        rate = float(group["lr"])
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        for part in self._split_batches(slots):
            results = orthogonalize([slots[i] for i in part], [updates[i] for i in part])
            for i, result in zip(part, results, strict=True):
                scale = RMS_OF_ADAMW * max(slots[i].parameter.shape[-2:]) ** 0.5
                weights[i].add_(result.to(weights[i].dtype), alpha=-rate * scale)
        write_weights(slots, weights)

    def _split_batches(self, slots: Sequence[Slot]) -> list[list[int]]:
        """Indices of slots that are orthogonalized together: the same matrices and sharding."""
        batches: dict[object, list[int]] = {}
        for index, slot in enumerate(slots):
            parameter = slot.parameter
            where = (
                (parameter.device_mesh, parameter.placements)
                if splits_matrices(parameter)
                else None
            )
            key = (parameter.shape[-2:], where) if self.batched else index
            batches.setdefault(key, []).append(index)
        return list(batches.values())


def splits_matrices(parameter: Tensor) -> bool:
    """Whether ranks hold parts of a matrix."""
    last = {parameter.dim() - 1, parameter.dim() - 2}
    return bool(sharded_dims(parameter) & last)


def orthogonalize(slots: Sequence[Slot], updates: Sequence[Tensor]) -> list[Tensor]:
    """Local shards of the orthogonalized updates, from local shards of the updates."""
    device = updates[0].device
    dtype = MATMUL_DTYPES.get(device.type, updates[0].dtype)
    updates = [update.to(dtype) for update in updates]
    if not splits_matrices(slots[0].parameter):
        stacks = [update.reshape(-1, *update.shape[-2:]) for update in updates]
        batch = newton_schulz(torch.cat(stacks))
        parts = batch.split([len(stack) for stack in stacks])
        return [part.reshape(update.shape) for part, update in zip(parts, updates, strict=True)]
    whole = [_gather(slot.parameter, update) for slot, update in zip(slots, updates, strict=True)]
    stacks = [update.reshape(-1, *update.shape[-2:]) for update in whole]
    batch = _share_work(torch.cat(stacks), slots[0].parameter)
    parts = batch.split([len(stack) for stack in stacks])
    return [
        _take_shard(slot.parameter, part.reshape(slot.parameter.shape))
        for slot, part in zip(slots, parts, strict=True)
    ]


def newton_schulz(matrices_NRC: Tensor) -> Tensor:
    """The nearest matrices with singular values near 1, by five steps of a quintic iteration."""
    a, b, c = COEFFICIENTS
    is_tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    x = matrices_NRC.mT if is_tall else matrices_NRC
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norms.clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


# ---- ranks ---------------------------------------------------------------------------------------


def _gather(parameter: Tensor, update: Tensor) -> Tensor:
    sharded = wrap_like(parameter, update.contiguous())
    assert isinstance(sharded, DTensor), "only DTensors split matrices"
    return sharded.full_tensor()


def _share_work(matrices_NRC: Tensor, parameter: Tensor) -> Tensor:
    """`newton_schulz`, each rank of the shards' group for its share of the batch."""
    group = _find_group(parameter)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    count, share = len(matrices_NRC), -(-len(matrices_NRC) // size)
    own = matrices_NRC[rank * share : (rank + 1) * share]
    result = matrices_NRC.new_zeros(share, *matrices_NRC.shape[1:])
    if len(own):
        result[: len(own)] = newton_schulz(own)
    gathered = result.new_empty(share * size, *matrices_NRC.shape[1:])
    dist.all_gather_into_tensor(gathered, result, group=group)
    return gathered[:count]


def _find_group(parameter: Tensor) -> dist.ProcessGroup:
    """The ranks along the first dimension of the mesh that splits matrices."""
    assert isinstance(parameter, DTensor), "only DTensors split matrices"
    dim = next(i for i, p in enumerate(parameter.placements) if not isinstance(p, Replicate))
    return parameter.device_mesh.get_group(dim)


def _take_shard(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has."""
    assert isinstance(parameter, DTensor), "only DTensors split matrices"
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, parameter.placements).to_local()
