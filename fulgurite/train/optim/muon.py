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

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fulgurite.errors import ArgumentError
from fulgurite.kernels.optimizer import triton_muon
from fulgurite.train.optim.adamw import (
    AdamW,
    Slot,
    read_gradients,
    read_weights,
    write_states,
    write_weights,
)
from fulgurite.train.optim.shards import read_local, sharded_dims, wrap_like
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
        slots = self._update_by_kernels(slots, group)
        if not slots:
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
            scale = update_scale(slots[part[0]])
            for i, result in zip(part, results, strict=True):
                weights[i].add_(result.to(weights[i].dtype), alpha=-rate * scale)
        write_weights(slots, weights)

    def _update_by_kernels(self, slots: Sequence[Slot], group: dict[str, Any]) -> list[Slot]:
        """Update whole matrices on a GPU, a few launches for all of one shape; returns the other slots.

        Those have momenta in 8 or 16 bit, weights that are rounded stochastically, or split matrices.
        """
        found = [(slot, make_muon_weight(slot)) for slot in slots]
        taken = [(slot, weight) for slot, weight in found if weight is not None]
        own = [slot for slot, _ in taken]
        batches = [[taken[i] for i in part] for part in self._split_batches(own)]
        stacks = [stack_updates([slot for slot, _ in batch]) for batch in batches]
        triton_muon.add_momentum(
            [weight for batch in batches for _, weight in batch],
            [update for _, updates in stacks for update in updates],
            self.momentum,
        )
        rate = float(group["lr"])
        for batch, (stack_NRC, _) in zip(batches, stacks, strict=True):
            parts = newton_schulz(stack_NRC).split([count_matrices(slot) for slot, _ in batch])
            triton_muon.apply_updates(
                [weight for _, weight in batch],
                parts,
                1 - rate * group["weight_decay"],
                rate * update_scale(batch[0][0]),
            )
        return [slot for slot, weight in found if weight is None]

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


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def make_muon_weight(slot: Slot) -> triton_muon.MuonWeight | None:
    """The tensors of the kernels; None: they don't take them."""
    if not has_kernels(slot.weight.device) or splits_matrices(slot.parameter):
        return None
    low = slot.state.get("master_low")
    if low is not None:
        low = read_local(low)
    momentum = read_local(slot.state[MOMENTUM])
    weight = triton_muon.MuonWeight(slot.weight, low, slot.gradient, momentum)
    return weight if weight.can_run() else None


def stack_updates(slots: Sequence[Slot]) -> tuple[Tensor, list[Tensor]]:
    """A batch for the updates of slots, not initialized, and the part of each slot."""
    counts = [count_matrices(slot) for slot in slots]
    weight = slots[0].weight
    size = sum(counts), *weight.shape[-2:]
    stack_NRC = torch.empty(size, dtype=MATMUL_DTYPES["cuda"], device=weight.device)
    return stack_NRC, list(stack_NRC.split(counts))


def count_matrices(slot: Slot) -> int:
    return math.prod(slot.weight.shape[:-2])


def update_scale(slot: Slot) -> float:
    """The factor of an orthogonalized update: it has the size of one of AdamW."""
    return RMS_OF_ADAMW * float(max(slot.parameter.shape[-2:])) ** 0.5


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
    norms = torch.linalg.vector_norm(matrices_NRC, dim=(-2, -1), keepdim=True)
    x = matrices_NRC / norms.clamp(min=1e-7)
    for _ in range(ITERATIONS):  # the Gram matrix of the shorter side
        gram = torch.bmm(x.mT, x) if is_tall else torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factors = (x, polynomial) if is_tall else (polynomial, x)
        x = torch.baddbmm(x, *factors, beta=a)
    return x


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
