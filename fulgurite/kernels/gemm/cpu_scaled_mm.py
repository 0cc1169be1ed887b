"""`scaled_mm` on the CPU: the left operand is dequantized (a few rows), the weight stays
quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.gemm.cpu_linear import quant_linear
from fulgurite.kernels.gemm.reference import UNQUANTIZED, dequantize_packed
from fulgurite.quant import resolve_format


def scaled_mm(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`fulgurite::scaled_mm`."""
    rows = dequantize_packed(a, a_scales, resolve_format(a_format))
    out = quant_linear(rows, b, b_scales, b_format, bias, UNQUANTIZED)
    return out if out is NotImplemented else out.to(out_dtype)
