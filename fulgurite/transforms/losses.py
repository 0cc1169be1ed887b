"""The backward of the negative log likelihood as elementwise ops.

In: the arguments of `aten.nll_loss_backward` and `nll_loss2d_backward`. Out: the gradient. torch's rule scatters -1
into zeros, which no generated kernel does; here each element asks whether it is its row's class:

    grad[n,c] = where(c == target[n] and target[n] != ignored, -weight[c] * grad_loss / total_weight, 0)

So the gradient of a cross entropy is one kernel that reads the logarithms and writes the gradient.
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
    classes = 0 if self.dim() < 2 else 1
    grad, target = _of_rows(grad_output, self, target, reduction, total_weight)
    along = [-1 if dim == classes else 1 for dim in range(self.dim())]
    if weight is not None:
        grad = grad * weight.reshape(along)
    place = torch.arange(self.shape[classes], device=self.device).reshape(along)
    here = (place == target) & (target != ignore_index)
    return torch.where(here, -grad, 0.0).to(self.dtype)


def gradient_of_class(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """The gradient of each row's own class: all others are zero, so this is also their sum."""
    grad, target = _of_rows(grad_output, self, target, reduction, total_weight)
    counts = target != ignore_index
    if weight is not None:
        grad = grad * weight[torch.where(counts, target, 0)]
    return torch.where(counts, -grad, 0.0).to(self.dtype)


def _of_rows(
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


PIECES: dict[Any, Callable[..., Tensor]] = {
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
}
