"""`scaled_mm`: a @ b.T + bias with both operands quantized.

    y[m, n] = sum over k of dequantize(a)[m, k] * dequantize(b)[n, k]  + bias[n]

In: a [.., M, K] and b [N, K], each in a format of `FORMATS`, with K in the same order. So every
layout of scales works: per tensor, row, 1x128 with 128x128, 16-wide NVFP4, 32-wide MX, int8 rows.
Out: [.., M, N] in `out_dtype`, summed in float32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.kernels import registry
from fulgurite.kernels.gemm import cpu_scaled_mm, reference, triton_scaled_mm
from fulgurite.kernels.gemm.quant_linear import check_bias
from fulgurite.op import op
from fulgurite.quant import QuantTensor, resolve_format
from fulgurite.quant.shapes import logical_shape

# device type -> kernel with the operator's arguments; it may return NotImplemented
SCALED_MM_KERNELS = {
    "cpu": cpu_scaled_mm.scaled_mm,
    "cuda": triton_scaled_mm.scaled_mm,
}


def scaled_mm(
    a: QuantTensor,
    b: QuantTensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """a @ b.T + bias; `out_dtype` is by default the dtype that `a` dequantizes to."""
    if b.dim() != 2 or a.dim() < 2 or a.shape[-1] != b.shape[-1]:
        raise FormatError(
            f"a {list(a.shape)} and b {list(b.shape)} can't be multiplied as a @ b.T",
            where=f"a in {a.format.name}, b in {b.format.name}",
            next="a is [.., M, K] and b is [N, K], both with K last and blocks along K",
        )
    check_bias(bias, b.shape[:1])
    out: Tensor = scaled_mm_op(
        a.packed,
        list(a.scales.values()),
        a.format.name,
        b.packed,
        list(b.scales.values()),
        b.format.name,
        bias,
        out_dtype or a.dtype,
    )
    return out


@op("fulgurite::scaled_mm")
def scaled_mm_op(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The operator: both operands as packed data and their stored scales."""
    arguments = (a, a_scales, a_format, b, b_scales, b_format, bias, out_dtype)
    out: Tensor = registry.dispatch(SCALED_MM_KERNELS, a.device, reference.scaled_mm, *arguments)
    return out


@scaled_mm_op.fake
def _(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    left = logical_shape(resolve_format(a_format), a.shape)
    right = logical_shape(resolve_format(b_format), b.shape)
    assert left[-1] == right[-1], f"K of a is {left[-1]} and of b {right[-1]}"
    return a.new_empty((*left[:-1], right[0]), dtype=out_dtype)
