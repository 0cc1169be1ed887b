"""Weight gradients computed later: backward of linears in, their matmuls for weights as one call out.

Zero-bubble schedules split backward. The gradient of a stage's input is sent as soon as it is there;
gradients of weights fill the time in which a rank would wait. torch splits an autograd graph for that,
which custom operators don't allow. Here linears do it themselves:

    dx = dy @ W               in backward
    dW += dy.T @ x            queued; `take` returns the queue as a function, to be called later

Everything but the weights of plain linears (norms, experts, embeddings, head) is computed at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fulgurite.kernels.gemm.dense_linear import DenseLinear

disable_capture = functools.partial(
    torch.compiler.disable, reason="a zero-bubble schedule computes gradients of weights later"
)


class WeightGradients:
    """The queue of weight gradients of one backward."""

    def __init__(self) -> None:
        self._queue: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def push(self, weight: nn.Parameter, x: Tensor, gradient: Tensor) -> None:
        self._queue.append((weight, x, gradient))

    def take(self) -> Callable[[], None]:
        """The gradients queued so far, as a function that computes and adds them."""
        queue, self._queue = self._queue, []

        @torch.no_grad()
        def run() -> None:
            for weight, x, gradient in queue:
                product = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
                weight.grad = product if weight.grad is None else weight.grad.add_(product)
            queue.clear()

        return run


class DeferredLinear(nn.Linear):
    """A linear whose weight gradient is queued."""

    weight_gradients: WeightGradients

    @disable_capture
    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not self.weight.requires_grad:
            return F.linear(input, self.weight, self.bias)
        return _DeferredLinear.apply(input, self.weight, self.bias, self.weight_gradients)


class _DeferredLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, queue: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.queue, ctx.has_bias = weight, queue, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        ctx.queue.push(ctx.weight, x, gradient)
        bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, bias, None


def defer_weight_gradients(module: nn.Module, queue: WeightGradients) -> int:
    """Defer the weight gradients of all plain linears inside a module; returns their number."""
    count = 0
    for linear in module.modules():
        if type(linear) in (nn.Linear, DenseLinear):
            linear.__class__ = DeferredLinear
            linear.weight_gradients = queue  # type: ignore[assignment]
            count += 1
    return count
