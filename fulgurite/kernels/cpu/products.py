"""`scaled_mm` and the experts' linears on the CPU: loops around the kernels of `linear.py`.

The left operand is dequantized (a few rows), the weight stays packed. Ends of groups are read on the
host, which on a CPU costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.cpu.linear import quant_linear
from fulgurite.kernels.quant_linear import PLAIN, decode_parts
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
    """The operator's implementation for the CPU: one linear for each expert that has rows."""
    out = x.new_zeros(x.shape[0], data.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            levels = [scale[expert] for scale in scales]
            of_expert = None if bias is None else bias[expert]
            rows = quant_linear(x[start:end], data[expert], levels, format, of_expert, activations)
            if rows is NotImplemented:
                return rows
            out[start:end] = rows
            start = end
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
