"""The backward of the negative log likelihood as elementwise ops.

In: the arguments of `aten.nll_loss_backward` and `nll_loss2d_backward`. Out: the gradient. torch's rule scatters -1
into zeros, which no generated kernel does; here each element asks whether it is its row's class:

    grad[n,c] = where(c == target[n] and target[n] != ignored, -weight[c] * grad_loss / total_weight, 0)

So the gradient of a cross entropy is one kernel; `cross_entropy` lets it look at the logits themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
MEAN = 1  # of `reduction`: none, mean, sum


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    grad, target = of_rows(grad_output, self, target, reduction, total_weight)
    return by_class(grad, self, target, weight, ignore_index)


def of_rows(
    grad: Tensor, self: Tensor, target: Tensor, reduction: int, total_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of each row's loss and its class, with a dimension of one in the place of the classes."""
    classes = 0 if self.dim() < 2 else 1
    if reduction == MEAN:
        grad = grad / total_weight
    if self.dim() == 1 and target.dim() > 0:
        target = target[0]
    if self.dim() > grad.dim() > 0:
        grad = grad.unsqueeze(classes)
    return grad, target.unsqueeze(classes)


def by_class(
    grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, ignored: int
) -> Tensor:
    """The gradient of each class of a row, from what `of_rows` gave."""
    classes = 0 if self.dim() < 2 else 1
    along = [-1 if dim == classes else 1 for dim in range(self.dim())]
    if weight is not None:
        grad = grad * weight.reshape(along)
    place = torch.arange(self.shape[classes], device=self.device).reshape(along)
    here = (place == target) & (target != ignored)
    return torch.where(here, -grad, 0.0).to(self.dtype)


def of_own_class(
    grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, ignored: int
) -> Tensor:
    """The gradient of each row's own class: all others are zero, so this is also their sum."""
    counts = target != ignored
    if weight is not None:
        grad = grad * weight[torch.where(counts, target, 0)]
    return torch.where(counts, -grad, 0.0).to(self.dtype)


PIECES: dict[Any, Callable[..., Tensor]] = {
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
}
