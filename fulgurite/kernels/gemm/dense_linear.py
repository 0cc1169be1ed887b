"""`dense_linear`: x @ weight.T + bias + residual with a dense weight, row by row the same.

In: x [.., K] and a weight [N, K] in float32, bfloat16 or float16; optionally a bias [N] and a
residual [.., N]. Out: [.., N] in x's dtype, summed in float32 and rounded once. The result of a row
depends on that row alone, unlike that of BLAS libraries, which pick kernels by the number of rows.

`DenseLinear` is an `nn.Linear` that calls it in deterministic mode (`fulgurite.determinism`).
Backward is that of `F.linear`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.determinism import deterministic, is_deterministic
from fulgurite.kernels import registry
from fulgurite.kernels.elementwise.ops import add
from fulgurite.kernels.gemm import cpu_dense, triton_quant_linear
from fulgurite.kernels.gemm.triton_invariant_gemm import invariant_linear
from fulgurite.op import op


def _cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
    if not cpu_dense.supports_dtypes(x, weight, bias, residual) or weight.stride(1) != 1:
        return NotImplemented
    if x.dtype != weight.dtype or (residual is not None and residual.dtype != x.dtype):
        return NotImplemented
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out_shape = (rows.shape[0], weight.shape[0])
    extra = None if residual is None else residual.reshape(out_shape).contiguous()
    epilogue = cpu_dense.Epilogue(bias=None if bias is None else bias[None], residual=extra)
    out = cpu_dense.dense_gemm(rows, None, weight[None], epilogue, x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


def _gpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
    if x.dtype not in GPU_DTYPES or weight.dtype != x.dtype:
        return NotImplemented
    if x.numel() == 0 or weight.numel() == 0:
        return NotImplemented
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if x.dtype == torch.float32 or weight.stride(1) != 1:
        out = invariant_linear(rows, weight, bias)
    else:
        with deterministic():
            out = triton_quant_linear.dense_linear(rows, weight, bias)
    out = out.view(*x.shape[:-1], weight.shape[0])
    return out if residual is None else add(residual, out)


GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# device type -> kernel with the operator's arguments; it may return NotImplemented
DENSE_LINEAR_KERNELS: dict[str, registry.Kernel] = {"cpu": _cpu_linear, "cuda": _gpu_linear}


def dense_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias + residual."""
    if registry.can_skip_dispatcher(x, weight, bias, residual):
        return _run(x, weight, bias, residual)
    out: Tensor = dense_linear_op(x, weight, bias, residual)
    return out


@op("fulgurite::dense_linear")
def dense_linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """The operator."""
    return _run(x, weight, bias, residual)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    out: Tensor = registry.dispatch(
        DENSE_LINEAR_KERNELS, x.device, _reference, x, weight, bias, residual
    )
    return out


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    out = F.linear(x, weight, bias)
    return out if residual is None else residual + out


@dense_linear_op.fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@dense_linear_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    x, weight, bias, residual = inputs
    grad_rows = grad_out.flatten(0, -2)
    grad_bias = None if bias is None else grad_rows.sum(0).to(bias.dtype)
    grad_weight = grad_rows.t() @ x.flatten(0, -2)
    return grad_out @ weight, grad_weight, grad_bias, None if residual is None else grad_out


class DenseLinear(nn.Linear):
    """An `nn.Linear` whose rows don't depend on each other in deterministic mode."""

    def forward(self, input: Tensor) -> Tensor:
        if is_deterministic():
            return dense_linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)


def use_dense_kernels(model: nn.Module) -> None:
    """Make every plain `nn.Linear` of a model a `DenseLinear`, in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            module.__class__ = _dense_class(type(module))


_dense_classes: dict[type[nn.Linear], type[nn.Linear]] = {nn.Linear: DenseLinear}


def _dense_class(cls: type[nn.Linear]) -> type[nn.Linear]:
    """`DenseLinear`, or for a subclass of `nn.Linear` one that is both."""
    if cls not in _dense_classes:
        _dense_classes[cls] = type(f"Dense{cls.__name__}", (DenseLinear, cls), {})
    return _dense_classes[cls]
