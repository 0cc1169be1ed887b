# mypy: allow-untyped-defs, allow-incomplete-defs
"""`quant_linear` and `grouped_quant_linear` on a GPU.

In: the operators' arguments. Out: x @ weight.T + bias, or NotImplemented for what only the reference
takes: float32 activations (but of GGUF and 4-bit integer weights without minima), e2m1 with float16
activations, experts in GGUF blocks.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.gemm import triton_launch
from fulgurite.kernels.gemm.triton_gguf import gguf_linear
from fulgurite.kernels.gemm.triton_scaled_mm import grouped_scaled_mm, scaled_mm
from fulgurite.kernels.quantize.triton_dequantize import dequantize_weight
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.quant import resolve_format

UNQUANTIZED = "none"


def quant_linear(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None = None,
    activations: str = UNQUANTIZED,
) -> Any:
    """`fulgurite::quant_linear`."""
    rows = x.reshape(-1, x.shape[-1])
    if activations != UNQUANTIZED:
        parts = quantize(rows, activations)
        if parts is NotImplemented:
            return NotImplemented
        out = scaled_mm(parts[0], parts[1:], activations, data, scales, format, bias, x.dtype)
    else:
        out = _weight_only_gemm(rows, data, scales, format, bias)
    return out if out is NotImplemented else out.reshape(*x.shape[:-1], out.shape[-1])


def _weight_only_gemm(
    rows: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    ends: Tensor | None = None,
) -> Any:
    entry = resolve_format(format)
    weight = triton_launch.dequant_scheme(entry)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if weight is None or not triton_launch.supports_dtype(rows, weight) or data.numel() == 0:
        return (
            NotImplemented if ends is not None else gguf_linear(rows, data, scales, entry, bias)
        )
    m, k = rows.shape
    n = data.shape[-2]
    heuristics = heuristics_for(rows.device)
    if ends is None:
        config = heuristics.weight_only_config(m, n, k, weight)
    else:
        config = heuristics.expert_gemm_config(m, n, k, data.shape[0], weight, is_8bit=False)
    if config is None:  # many rows: what the library saves pays for writing the weight out
        parts = triton_launch.make_operand(data, scales, entry, weight)
        return F.linear(
            rows,
            dequantize_weight(rows.dtype, weight, parts, entry),
            None if bias is None else bias.to(rows.dtype),
        )
    return triton_launch.launch_gemm(
        rows, None, None, data, scales, entry, weight, bias, rows.dtype, config, ends
    )


def grouped_quant_linear(
    x: Tensor,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None = None,
    activations: str = UNQUANTIZED,
) -> Any:
    """`fulgurite::grouped_quant_linear`."""
    if activations == UNQUANTIZED:
        return _weight_only_gemm(x, data, scales, format, bias, offsets)
    parts = quantize(x, activations)
    if parts is NotImplemented:
        return NotImplemented
    return grouped_scaled_mm(
        parts[0], parts[1:], activations, offsets, data, scales, format, bias, x.dtype
    )


__all__ = ["grouped_quant_linear", "quant_linear"]
