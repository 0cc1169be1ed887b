"""The backward of the negative log likelihood as elementwise ops.

In: the arguments of `aten.nll_loss_backward` and `nll_loss2d_backward`. Out: the gradient. torch's
decomposition scatters -1 into zeros, which the fuser can't generate. Here each element compares its class
with its row's target:

    grad[n,c] = where(c == target[n] and target[n] != ignore_index,
                      -weight[c] * grad_loss / total_weight, 0)

The gradient of a cross entropy is then one kernel. `cross_entropy` lets it read the logits directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
REDUCTION_MEAN = 1  # value of `reduction`: 0 none, 1 mean, 2 sum


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    grad, target = broadcast_row_gradients(grad_output, self, target, reduction, total_weight)
    return class_gradients(grad, self, target, weight, ignore_index)


def broadcast_row_gradients(
    grad: Tensor, self: Tensor, target: Tensor, reduction: int, total_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Each row's loss gradient and target, with a size-1 class dimension."""
    classes = 0 if self.dim() < 2 else 1
    if reduction == REDUCTION_MEAN:
        grad = grad / total_weight
    if self.dim() == 1 and target.dim() > 0:
        target = target[0]
    if self.dim() > grad.dim() > 0:
        grad = grad.unsqueeze(classes)
    return grad, target.unsqueeze(classes)


def class_gradients(
    grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> Tensor:
    """The gradient of every class, from the outputs of `broadcast_row_gradients`."""
    classes = 0 if self.dim() < 2 else 1
    along = [-1 if dim == classes else 1 for dim in range(self.dim())]
    if weight is not None:
        grad = grad * weight.reshape(along)
    class_index = torch.arange(self.shape[classes], device=self.device).reshape(along)
    is_target = (class_index == target) & (target != ignore_index)
    return torch.where(is_target, -grad, 0.0).to(self.dtype)


def target_class_gradients(
    grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> Tensor:
    """The gradient of each row's target class. All other classes are zero, so it is also the row sum."""
    is_counted = target != ignore_index
    if weight is not None:
        grad = grad * weight[torch.where(is_counted, target, 0)]
    return torch.where(is_counted, -grad, 0.0).to(self.dtype)


DECOMPOSITIONS: dict[Any, Callable[..., Tensor]] = {
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
}
