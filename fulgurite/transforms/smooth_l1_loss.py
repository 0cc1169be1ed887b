"""The backward of the smooth L1 loss, with eager's gradient of NaN.

In: the arguments of `aten.smooth_l1_loss_backward`. Out: the gradient. torch's decomposition takes the sign
where `|x| < beta` is false, and the sign of NaN is 0: a gradient that is NaN in eager mode was 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import pw_cast_for_opmath
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fulgurite.transforms.nll_loss import REDUCTION_MEAN

aten = torch.ops.aten


@pw_cast_for_opmath
def smooth_l1_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, beta: float
) -> Tensor:
    is_mean = reduction == REDUCTION_MEAN and not guard_or_false(self.numel() == 0)
    grad = grad_output * (1.0 / self.numel() if is_mean else 1.0)
    x = self - target
    return torch.where(x.abs() >= beta, grad * x.sign(), grad * x / beta)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.smooth_l1_loss_backward.default: smooth_l1_loss_backward
}
