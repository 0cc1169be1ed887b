"""`scaled_mm` and the experts' linears on the CPU, around `linear.py` and `grouped_matmul.py`.

The left operand is dequantized (a few rows), the weight stays packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.gemm.cpu_linear import quant_linear
from fulgurite.kernels.gemm.quant_linear import PLAIN, decode_parts
from fulgurite.kernels.grouped_gemm.cpu import grouped_matmul
from fulgurite.kernels.grouped_gemm.ops import NO_GATE
from fulgurite.quant import resolve


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
    """The operator's implementation for the CPU."""
    rows = decode_parts(a, a_scales, resolve(a_format))
    out = quant_linear(rows, b, b_scales, b_format, bias, PLAIN)
    return out if out is NotImplemented else out.to(out_dtype)


def grouped_quant_linear(
    x: Tensor,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    """The operator's implementation for the CPU: a grouped matmul without a gate."""
    out: Tensor = grouped_matmul(
        x, None, None, None, offsets, data, scales, format, bias, activations, NO_GATE, 0.0, 0.0
    )
    return out


def grouped_scaled_mm(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    offsets: Tensor,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The same with packed rows."""
    rows = decode_parts(a, a_scales, resolve(a_format))
    out = grouped_quant_linear(rows, offsets, b, b_scales, b_format, bias, PLAIN)
    return out if out is NotImplemented else out.to(out_dtype)
