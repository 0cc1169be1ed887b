"""`fp8_grouped_mm`: grouped GEMM of training with forward and the gradient of x in FP8.

    forward    y[s, n]  = q(x)[s, k] · q(w[e])[n, k]       contracted over k, blocks along k
    backward   gx[s, k] = q(g)[s, n] · q(w[e]ᵀ)[k, n]      contracted over n, blocks along n
               gw[e]    = g[e's rows]ᵀ · x[e's rows]       in x's dtype

In: x [S, K], rows sorted by expert; weights [E, N, K]; `offsets` int32 [E], the ends of the experts'
rows; the name of a recipe of `FP8_RECIPES`. Out: [S, N] in x's dtype, zero past `offsets[-1]`.

The weight's gradient stays in 16 bits: it is contracted over an expert's rows, and where those begin
is known on the device only, so blocks of scales would cross experts. Of x a copy is saved, of the
weight nothing (`fp8_linear` says why).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.gemm.fp8_linear import FP8_RECIPES, Fp8Recipe
from fulgurite.kernels.grouped_gemm.ops import grouped_wgrad
from fulgurite.kernels.grouped_gemm.scaled import scaled_grouped_mm_op
from fulgurite.kernels.quantize.ops import quantize_op


def fp8_grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, recipe: str = "rowwise") -> Tensor:
    """Each row times the weight [E, N, K] of its expert, forward and backward of x in FP8."""
    out: Tensor = _FP8GroupedMM.apply(x, weight, offsets, recipe)
    return out


class _FP8GroupedMM(torch.autograd.Function):
    """The formulas of the module's docstring. AOTAutograd traces through both methods."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, recipe: str) -> Tensor:
        ctx.formats = formats = FP8_RECIPES[recipe]
        ctx.save_for_backward(x, weight, offsets)
        return _multiply(x, formats.x, weight, formats, offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        formats: Fp8Recipe = ctx.formats
        grad_y = gradients[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(grad_y, formats.gradient, weight.transpose(1, 2), formats, offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_wgrad(grad_y, x, offsets).to(weight.dtype)
        return grad_x, grad_weight, None, None


def _multiply(
    rows: Tensor, format: str, weight: Tensor, formats: Fp8Recipe, offsets: Tensor
) -> Tensor:
    codes, scale = quantize_op(rows, format)
    weight_codes, weight_scale = quantize_op(weight.contiguous(), formats.weight)
    out: Tensor = scaled_grouped_mm_op(
        codes, [scale], format, offsets, weight_codes, [weight_scale], formats.weight, rows.dtype
    )
    return out


def fp8_grouped_gemm(
    x: Tensor,
    row_indices: Tensor | None,
    positions: Tensor | None,
    row_weights: Tensor | None,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: GatedActivation,
    recipe: str,
) -> Tensor:
    """`fulgurite::grouped_gemm` of a dense weight with its GEMMs in FP8, the rest in plain torch."""

    def multiply(rows: Tensor) -> Tensor:
        return fp8_grouped_mm(rows, weight, offsets, recipe)

    return apply_grouped(multiply, x, row_indices, positions, row_weights, offsets, bias, gate)


def apply_grouped(
    multiply: Callable[[Tensor], Tensor],
    x: Tensor,
    row_indices: Tensor | None,
    positions: Tensor | None,
    row_weights: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    gate: GatedActivation,
) -> Tensor:
    """What `fulgurite::grouped_gemm` does around its GEMM, which is `multiply`, in plain torch."""
    rows = x if row_indices is None else _GatherRows.apply(x, row_indices, positions)
    sums = multiply(rows).float()
    if row_weights is not None:
        sums = sums * row_weights[:, None]
    if bias is not None:
        position = torch.arange(sums.shape[0], device=x.device, dtype=offsets.dtype)
        expert = torch.searchsorted(offsets, position, right=True)
        shifted = sums + bias.float()[expert.clamp(max=bias.shape[0] - 1)]
        sums = torch.where((position < offsets[-1])[:, None], shifted, 0.0)
    return gate(sums).to(x.dtype)


class _GatherRows(torch.autograd.Function):
    """x[row_indices]; the gradients of a row's copies are summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_indices: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return x[row_indices]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        copies = gradients[0].float()[positions]
        return copies.sum(dim=1).to(gradients[0].dtype), None, None
