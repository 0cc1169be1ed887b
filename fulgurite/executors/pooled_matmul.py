"""Matmuls of torch with outputs from the memory pool, for large matmuls of CPU graphs.

In: the arguments of `torch.mm`, `torch.addmm` and `torch.bmm`. Out: the same results, in blocks of
`fuser.runtime.memory_pool`. So outputs of fused kernels, activations and gradients share one pool: a
released block is reused by the next output. Large blocks then cost no new page faults and don't fragment
the heap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.fuser.runtime import memory_pool
from fulgurite.trace.node_meta import fake_value


def mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out=_allocate_contiguous(a.dtype, a.shape[0], b.shape[1]))


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b, out=_allocate_contiguous(a.dtype, a.shape[0], a.shape[1], b.shape[2]))


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = _allocate_contiguous(a.dtype, a.shape[0], b.shape[1])
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)


POOLED_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.mm.default: mm,
    torch.ops.aten.bmm.default: bmm,
    torch.ops.aten.addmm.default: addmm,
}


def find_pooled_function(node: fx.Node) -> Callable[..., Tensor] | None:
    """The pooled function for a CPU matmul whose output has a static, large size; else None."""
    function, value = POOLED_FUNCTIONS.get(node.target), fake_value(node)
    if function is None or not isinstance(value, Tensor) or value.device.type != "cpu":
        return None
    is_static = all(isinstance(size, int) for size in value.shape)
    is_large = is_static and value.numel() * value.element_size() >= memory_pool.MIN_POOLED_BYTES
    is_poolable = value.is_contiguous() and value.dtype in memory_pool.DLPACK_CODES
    return function if is_large and is_poolable else None


def _allocate_contiguous(dtype: torch.dtype, *sizes: int) -> Tensor:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return memory_pool.allocate(sizes, tuple(reversed(strides)), dtype)
