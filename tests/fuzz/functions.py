"""Functions that lines of random programs call: gradient modes, own gradients, hooks, `out=`.

In: a function and operands. Out: its result. All of them work in eager, in float64 and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def mixed_precision(function: Callable[..., Any], *operands: Any) -> Any:
    """The function's result under autocast to bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device, torch.bfloat16):
        return function(*operands)


def without_gradient(function: Callable[..., Any], *operands: Any) -> Any:
    """The function's result under `torch.no_grad`."""
    with torch.no_grad():
        return function(*operands)


def with_gradient(function: Callable[..., Any], *operands: Any) -> Any:
    """The function's result under `torch.enable_grad` inside `torch.no_grad`."""
    with torch.no_grad(), torch.enable_grad():
        return function(*operands)


def with_out(function: Callable[..., Tensor], *operands: Any) -> Tensor:
    """The function's result, written to every second element of other memory."""
    with torch.no_grad():
        like = function(*operands)
        out = like.new_zeros((*like.shape, 2))[..., 0]
        function(*operands, out=out)
    return out


def with_new_out(function: Callable[..., Tensor], *operands: Any) -> Tensor:
    """The function's result, written to an empty tensor, which the function resizes."""
    with torch.no_grad():
        out = torch.empty(0, dtype=function(*operands).dtype)
        function(*operands, out=out)
    return out


def recomputed(function: Callable[..., Any], *operands: Any) -> Any:
    """The function's result, computed again in backward."""
    return checkpoint(function, *operands, use_reentrant=False)


def hooked(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient a hook multiplies."""
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * factor)
    return y


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x * 3  # not its derivative


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x * y * factor, x > y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, ctx.factor = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        of_x = (gradient * y * 2).sum_to_size(x.shape) if ctx.needs_input_grad[0] else None
        of_y = (gradient * x * ctx.factor).sum_to_size(y.shape) if ctx.needs_input_grad[1] else None
        return of_x, of_y, None


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 5


def square(x: Tensor) -> Tensor:
    """x², with a gradient of its own."""
    return _Square.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def product(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """x · y · factor, with a gradient of its own and a second result without one."""
    result, _ = _Product.apply(x, y, factor)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


def doubled(x: Tensor) -> Tensor:
    """2 x, by a function that writes to its operand."""
    return _Doubled.apply(x * 1)  # type: ignore[no-any-return,no-untyped-call]


def partly_written(x: Tensor, step: int) -> Tensor:
    """x, with some elements doubled through a view of a view."""
    y = x * 1
    y.view(-1)[1:][::step].mul_(2)
    return y


def gradient_inside(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of the function's sum, computed inside the program."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf)
    return gradient
