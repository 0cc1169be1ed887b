"""Batch-invariant operators for modules of transformers on GPUs, in deterministic mode.

    with InvariantOps():
        hidden = decoder(...)        every ATen op of the block goes through `__torch_dispatch__`

    products      mm, addmm, bmm, baddbmm, grouped_mm      our GEMMs with one order of K
    reductions    sum, mean, var, norms, softmax           `row_sum`: one tree for any number of rows
    selections    topk, sort                               stable: equal values in the order of indices
    index_add     adds the rows of an index in their order
    the rest      elementwise ops, views, copies, lookups, and ops without floating-point results run
                  as they are; anything else raises an error that names the op and the module

So what runs under it is batch-invariant, or refused. The attention of the modules is ours already.

Shapes: R rows; K columns.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise.triton_row_sum import row_sum
from fulgurite.kernels.gemm.triton_invariant_gemm import invariant_bmm
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm

aten = torch.ops.aten
GEMM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Ops that add nothing up: they allocate, copy, look up or select. Maxima and counts are exact in any
# order.
MOVES = frozenset((
    "alias", "amax", "amin", "arange", "as_strided", "cat", "clone", "constant_pad_nd", "copy",
    "copy_", "detach", "embedding", "empty", "empty_like", "empty_strided", "expand_copy", "fill",
    "fill_", "flip", "full", "full_like", "gather", "histc", "index", "index_copy_", "index_put",
    "index_put_", "index_select", "lift_fresh", "lift_fresh_copy", "masked_fill", "masked_fill_",
    "masked_scatter", "max", "min", "new_empty", "new_empty_strided", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "repeat", "repeat_interleave", "_reshape_copy", "roll",
    "scalar_tensor", "scatter", "scatter_", "select_scatter", "slice_scatter", "stack", "_to_copy",
    "tril", "triu", "_unsafe_view", "where", "zero_", "zeros", "zeros_like",
))  # fmt: skip
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class InvariantOps(TorchDispatchMode):
    """Replaces every op whose results depend on the number of rows; see the top of this file."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = REPLACEMENTS.get(func)
        if replacement is not None:
            return replacement(*args, **kwargs)
        if is_row_invariant(func, args):
            return func(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(COMPOSITE):  # inference mode does not take them apart
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(result)):
            raise _refuse(func)
        return result


def is_row_invariant(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op gives each element of its result without adding up others."""
    if func.namespace == "fulgurite" or torch.Tag.pointwise in func.tags or func.is_view:
        return True
    name = func._schema.name.partition("::")[2]
    if "reduce" in func._overloadname or (name.startswith("index_put") and args[3:4] == (True,)):
        return False  # they add
    return name in MOVES


def _refuse(func: Any) -> ArgumentError:
    where = _calling_module()
    return ArgumentError(
        f"deterministic=True does not support this model on a GPU: {where} calls {func}, which has "
        "no batch-invariant kernel",
        next="leave out deterministic=True, or use device='cpu'",
    )


def _calling_module() -> str:
    """The innermost module on the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return "the model"


# ---- products ------------------------------------------------------------------------------------


def _bmm(x_BMK: Tensor, w_BKN: Tensor) -> Tensor:
    if x_BMK.dtype not in GEMM_DTYPES:
        raise _refuse(aten.bmm.default)
    return invariant_bmm(x_BMK, w_BKN)


def _mm(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    return _bmm(x_MK[None], w_KN[None])[0]


def _addmm(c: Tensor, x_MK: Tensor, w_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if c.dim() == 1 and c.shape[0] == w_KN.shape[1] and beta == alpha == 1:
        return invariant_bmm(x_MK[None], w_KN[None], c)[0]
    return beta * c + alpha * _mm(x_MK, w_KN)


def _baddbmm(
    c: Tensor, x_BMK: Tensor, w_BKN: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = alpha * _bmm(x_BMK, w_BKN)
    return product if beta == 0 else beta * c + product


def _grouped_mm(
    x_SK: Tensor,
    w_EKN: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if offs is None or x_SK.dim() != 2 or w_EKN.dim() != 3 or bias is not None:
        raise _refuse(aten._grouped_mm.default)
    out_SN = grouped_gemm(x_SK, offs.int(), w_EKN.transpose(1, 2))
    return out_SN if out_dtype is None else out_SN.to(out_dtype)


# ---- reductions ----------------------------------------------------------------------------------


def _sum_last(x: Tensor) -> Tensor:
    """The sum over the last dimension, in float32."""
    return row_sum(x.reshape(math.prod(x.shape[:-1]), x.shape[-1])).view(x.shape[:-1])


def _sum_dims(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The sum over some dimensions, in float32."""
    last = sorted(dim % x.dim() for dim in dims)
    rows = x.movedim(last, list(range(x.dim() - len(last), x.dim()))).flatten(-len(last))
    total = _sum_last(rows)
    if keepdim:
        total = total.view([1 if dim in last else size for dim, size in enumerate(x.shape)])
    return total


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


def _reduction(
    func: Any, reduce: Callable[[Tensor, Sequence[int], bool], Tensor]
) -> Callable[..., Tensor]:
    """The replacement of a reduction over given dimensions."""

    def run(
        x: Tensor,
        dim: Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if not x.is_floating_point():
            result: Tensor = func(x, dim, keepdim, dtype=dtype)
            return result
        if dim is None or not len(dim) or x.dtype == torch.float64:
            raise _refuse(func)  # over all tokens
        return reduce(x, dim, keepdim).to(dtype or x.dtype)

    return run


def _mean(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return _sum_dims(x, dims, keepdim) / _count(x, dims)


def _var(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    if dim is None or not len(dim):
        raise _refuse(aten.var.correction)
    centered = x.float() - _mean(x, dim, keepdim=True)
    count = _count(x, dim) - (1 if correction is None else correction)
    return (_sum_dims(centered.square(), dim, keepdim) / count).to(x.dtype)


def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if ord != 2 or dim is None:
        raise _refuse(aten.linalg_vector_norm.default)
    return _sum_dims(x.float().square(), dim, keepdim).sqrt().to(dtype or x.dtype)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = range(-len(shape), 0)
    mean = _mean(x, dims, keepdim=True)
    centered = x.float() - mean
    rstd = (_mean(centered.square(), dims, keepdim=True) + eps).rsqrt()
    out = centered * rstd
    out = out if weight is None else out * weight.float()
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype), mean, rstd


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = (_mean(x.float().square(), range(-len(shape), 0), keepdim=True) + eps).rsqrt()
    out = x.float() * rstd
    out = out if weight is None else out * weight.float()
    return out.to(x.dtype), rstd


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    weights = (x.float() - x.amax(dim, keepdim=True).float()).exp()
    out = weights / _sum_dims(weights, [dim], keepdim=True)
    return out if half_to_float else out.to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted = x.float() - x.amax(dim, keepdim=True).float()
    out = shifted - _sum_dims(shifted.exp(), [dim], keepdim=True).log()
    return out if half_to_float else out.to(x.dtype)


# ---- selections and additions by index -----------------------------------------------------------


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(x, dim=dim, descending=descending, stable=True)
    return values, indices


def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    values, indices = _sort(x, dim, descending=largest)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _index_add_(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """By a stable sort of the index, without atomics."""
    rows = source if alpha == 1 else alpha * source
    indices = [None] * (dim % x.dim()) + [index]
    out: Tensor = aten.index_put_.default(x, indices, rows, True)
    return out


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    return _index_add_(x.clone(), dim, index, source, alpha=alpha)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten._grouped_mm.default: _grouped_mm,
    aten.sum.dim_IntList: _reduction(aten.sum.dim_IntList, _sum_dims),
    aten.mean.dim: _reduction(aten.mean.dim, _mean),
    aten.var.correction: _var,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten._fused_rms_norm.default: _rms_norm,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten.sort.default: _sort,
    aten.topk.default: _topk,
    aten.index_add_.default: _index_add_,
    aten.index_add.default: _index_add,
}
