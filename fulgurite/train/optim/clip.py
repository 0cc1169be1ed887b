"""Gradient clipping without waiting for the device: gradients and their norm in, scaled ones out.

    g = g * min(1, max_norm / norm)

A norm that is infinite or NaN leaves the gradients as they are: no finite factor repairs them, and
zeros would hide the fault. The training step sees the norm and skips the update.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fulgurite.errors import ArgumentError
from fulgurite.train.optim.scale import scale_tensors
from fulgurite.train.optim.shards import read_local


def clip_gradients(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their norm is at most `max_norm`; 0: no limit.

    `norm` is the norm of all gradients of all ranks, on the device. Nothing waits for its value.
    """
    if not max_norm >= 0:
        raise ArgumentError(f"max_norm={max_norm}", next="use a positive number, or 0 for no limit")
    if max_norm == 0:
        return
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    factor = (max_norm / norm.detach().float()).clamp(max=1.0)  # norm 0: infinity, clamped to 1
    factor = torch.where(norm.isfinite(), factor, 1.0)
    for gradients in _group_gradients(parameters).values():
        scale_tensors(gradients, factor)


def local_gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The norm of this rank's gradients, float32; shards of other ranks are not in it."""
    norms: list[Tensor] = []
    for (_, dtype), gradients in _group_gradients(parameters).items():
        wide = None if dtype in (torch.float32, torch.float64) else torch.float32
        norms += torch._foreach_norm(gradients, 2, wide)
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([x.to(norms[0].device).float() for x in norms]))


def _group_gradients(
    parameters: Iterable[Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Local gradients by device and dtype; each parameter once, empty ones left out."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    seen: set[int] = set()
    for parameter in parameters:
        if parameter.grad is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        gradient = read_local(parameter.grad.detach())
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return groups
