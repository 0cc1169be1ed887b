"""`fp8_linear`: x @ weight.T + bias with all three GEMMs of training in FP8.

    forward    y[m, n]  = q(x)[m, k] · q(w)[n, k]        contracted over k, blocks along k
    backward   gx[m, k] = q(g)[m, n] · q(wᵀ)[k, n]       contracted over n, blocks along n
               gw[n, k] = q(gᵀ)[n, m] · q(xᵀ)[k, m]      contracted over m, blocks along m

In: x [.., K], a weight [N, K] and a bias [N] in 16 or 32 bits, and the name of a recipe. Out: y
[.., N] in x's dtype (autocast's if it is on); gradients in the dtype of what they belong to. Sums
are in float32.

A recipe names the format of `FORMATS` that each operand is cast to. Scales are computed from the
data (dynamic), so there is no state to save. An operand is cast twice, once along each dimension
that it is contracted over, unless one scale serves both.

Saved for backward: x cast for its second use, a byte an element. Of the weight nothing is saved:
its second cast is computed from the weight in backward ("recompute"). With "keep", that cast is
saved. A sharded weight needs "recompute": its gathered form is freed after forward and gathered
again for backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.scaled_mm import scaled_mm_op
from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.quant.format import WHOLE_DIM, resolve_format

QuantizedMatrix = tuple[Tensor, Tensor]  # codes, scales


@dataclass(frozen=True)
class Fp8Recipe:
    """Formats of x, of the weight and of the gradient of y, in both of their casts."""

    x: str
    weight: str
    gradient: str
    one_scale: bool = False  # both casts of an operand share a scale


FP8_RECIPES: dict[str, Fp8Recipe] = {
    "tensorwise": Fp8Recipe(
        "fp8_e4m3_tensor", "fp8_e4m3_tensor", "fp8_e5m2_tensor", one_scale=True
    ),
    "rowwise": Fp8Recipe("fp8_e4m3_row", "fp8_e4m3_row", "fp8_e4m3_row"),
    "blockwise": Fp8Recipe("fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e4m3_1x128"),
    "mxfp8": Fp8Recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"),
}
WEIGHT_CAST_MODES = ("recompute", "keep")


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str = "rowwise",
    weights: str = "recompute",
) -> Tensor:
    """x @ weight.T + bias, forward and backward in FP8."""
    check_recipe(recipe, weights)
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    with torch.autocast(x.device.type, enabled=False):
        out: Tensor = _FP8Linear.apply(x, weight, bias, recipe, weights, dtype)
    return out


def check_recipe(recipe: str, weights: str) -> None:
    """Raise for an unknown name."""
    if recipe not in FP8_RECIPES:
        names = ", ".join(FP8_RECIPES)
        raise ArgumentError(f"{recipe!r} is not an FP8 recipe", next=f"one of {names}")
    if weights not in WEIGHT_CAST_MODES:
        names = ", ".join(WEIGHT_CAST_MODES)
        raise ArgumentError(f"weights={weights!r} is not allowed", next=f"one of {names}")


class _FP8Linear(torch.autograd.Function):
    """The formulas of the module's docstring. AOTAutograd traces through both methods."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: str,
        weights: str,
        dtype: torch.dtype,
    ) -> Tensor:
        formats = FP8_RECIPES[recipe]
        rows = x.reshape(-1, x.shape[-1])
        x_fp8 = _cast(rows, formats.x)
        weight_fp8 = _cast(weight, formats.weight)
        y = _scaled_matmul(x_fp8, formats.x, weight_fp8, formats.weight, bias, dtype)
        ctx.formats, ctx.keeps_weight, ctx.shape = formats, weights == "keep", x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        saved: list[Tensor | None] = [None, None, None, None, None]
        if needs_weight:
            saved[:2] = _cast_transposed(rows, formats.x, x_fp8, formats.one_scale)
        if needs_x and ctx.keeps_weight:
            saved[2:4] = _cast_transposed(weight, formats.weight, weight_fp8, formats.one_scale)
        elif needs_x:
            saved[4] = weight
        ctx.save_for_backward(*saved)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        formats: Fp8Recipe = ctx.formats
        x_t, x_t_scale, weight_t, weight_t_scale, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad_y = gradients[0].reshape(-1, gradients[0].shape[-1])
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_fp8 = _cast(grad_y, formats.gradient)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            weight_t_fp8 = (weight_t, weight_t_scale)
            if not ctx.keeps_weight:
                weight_t_fp8 = _cast(weight.t(), formats.weight)
            grad_x = _scaled_matmul(
                grad_fp8, formats.gradient, weight_t_fp8, formats.weight, None, x_dtype
            )
            grad_x = grad_x.reshape(ctx.shape)
        if needs_weight:
            grad_t_fp8 = _cast_transposed(grad_y, formats.gradient, grad_fp8, formats.one_scale)
            grad_weight = _scaled_matmul(
                grad_t_fp8, formats.gradient, (x_t, x_t_scale), formats.x, None, weight_dtype
            )
        if needs_bias:
            grad_bias = grad_y.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _cast(matrix: Tensor, format: str, static: Tensor | None = None) -> QuantizedMatrix:
    codes, scale = quantize_op(matrix, format, static)
    return codes, scale


def _cast_transposed(
    matrix: Tensor, format: str, cast: QuantizedMatrix, one_scale: bool
) -> QuantizedMatrix:
    """The cast of the transpose; a per-tensor scale is not computed twice.

    Rows are padded with zeros to whole blocks: they become K.
    """
    entry = resolve_format(format)
    if entry.block[1] != WHOLE_DIM and not entry.allows_partial_blocks:
        matrix = F.pad(matrix, (0, 0, 0, -matrix.shape[0] % entry.block[1]))
    return _cast(matrix.t(), format, cast[1] if one_scale else None)


def _scaled_matmul(
    a: QuantizedMatrix,
    a_format: str,
    b: QuantizedMatrix,
    b_format: str,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """a @ b.T + bias."""
    out: Tensor = scaled_mm_op(a[0], [a[1]], a_format, b[0], [b[1]], b_format, bias, dtype)
    return out
