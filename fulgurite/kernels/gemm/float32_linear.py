"""`float32_linear`: x @ weight.T + bias in float32, for the logits of routers.

Operands of any dtype; products, sums and the result are float32 (float64 for float64 operands). bfloat16
operands on a GPU are not converted: tensor cores multiply them exactly and sum in float32, so x is read
once in 16 bit. Their gradients need the float32 gradient g times bfloat16 operands. g is split into two
bfloat16 terms, which have 16 of its 24 bits, and results are rounded to bfloat16 (8 bits) once:

    high = bf16(g)    low = bf16(g - high)
    grad_x = [high, low] @ [weight; weight]        grad_weight = high.T @ x + low.T @ x

In deterministic mode it is `dense_linear` of float32 copies: the bits of a row don't depend on others.

Shapes: T rows; E outputs; D inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.gemm.dense_linear import dense_linear
from fulgurite.kernels.gemm.reference import upcast


def float32_linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, float32."""
    bias_E = None if bias_E is None else upcast(bias_E)
    if is_deterministic():
        return dense_linear(upcast(x_TD), upcast(weight_ED), bias_E)
    if not can_use_tensor_cores(x_TD, weight_ED):
        return F.linear(upcast(x_TD), upcast(weight_ED), bias_E)
    out_TE: Tensor = _Bfloat16Linear.apply(x_TD, weight_ED)  # type: ignore[no-untyped-call]
    return out_TE if bias_E is None else out_TE + bias_E


def can_use_tensor_cores(x_TD: Tensor, weight_ED: Tensor) -> bool:
    return x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16 and x_TD.dim() == 2


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """The product of bfloat16 matrices in float32."""
    return torch.mm(a, b, out_dtype=torch.float32)


class _Bfloat16Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return multiply(x_TD, weight_ED.t())

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_TD, weight_ED = ctx.saved_tensors
        high_TE = grad_TE.to(torch.bfloat16)
        low_TE = (grad_TE - high_TE.float()).to(torch.bfloat16)
        terms_TE = torch.cat((high_TE, low_TE), dim=1)
        grad_x_TD = terms_TE @ torch.cat((weight_ED, weight_ED))
        high_ED, low_ED = multiply(terms_TE.t(), x_TD).chunk(2)
        return grad_x_TD, (high_ED + low_ED).to(torch.bfloat16)
