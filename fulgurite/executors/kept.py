"""torch's matmuls, with their results in memory that is kept: what CPU graphs call for large ones.

In: the arguments of `torch.mm`, `torch.addmm` and `torch.bmm`. Out: the same results, in blocks of
`fuser.memory`. The results of fused kernels, activations and gradients then share one pool: what one gives
back the next one takes, and large blocks neither cost page faults anew nor break up the heap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.fuser.runtime import memory_pool


def mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out=_room(a.dtype, a.shape[0], b.shape[1]))


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b, out=_room(a.dtype, a.shape[0], a.shape[1], b.shape[2]))


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = _room(a.dtype, a.shape[0], b.shape[1])
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)


KEPT: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.mm.default: mm,
    torch.ops.aten.bmm.default: bmm,
    torch.ops.aten.addmm.default: addmm,
}


def spelling(node: fx.Node) -> Callable[..., Tensor] | None:
    """The function of this module for a matmul on the CPU whose result is of a fixed, large size."""
    found, value = KEPT.get(node.target), node.meta.get("val")
    if found is None or not isinstance(value, Tensor) or value.device.type != "cpu":
        return None
    static = all(isinstance(size, int) for size in value.shape)
    large = static and value.numel() * value.element_size() >= memory_pool.SMALLEST
    return found if large and value.is_contiguous() and value.dtype in memory_pool.CODES else None


def _room(dtype: torch.dtype, *sizes: int) -> Tensor:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return memory_pool.allocate(sizes, tuple(reversed(strides)), dtype)
