"""`quant_linear` on a GPU.

In: the operator's arguments. Out: x @ weight.T + bias, or NotImplemented for what only the
reference takes: float32 activations (except of GGUF and 4-bit integer weights without minima), e2m1
with float16 activations, experts in GGUF blocks. nf4, fp4 and int8 with zero points are dequantized
to memory for every number of rows.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.common.triton_operands import (
    DequantScheme,
    QuantizedOperand,
    dense_operand,
    dequant_scheme,
    dequantize_first_scheme,
    make_operand,
    supports_dtype,
)
from fulgurite.kernels.elementwise.gated_activation import UNGATED, GatedActivation
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.gemm.triton_gguf import gguf_linear
from fulgurite.kernels.gemm.triton_launch import GemmInputs, launch_gemm
from fulgurite.kernels.gemm.triton_scaled_mm import grouped_scaled_mm, scaled_mm
from fulgurite.kernels.gemm.triton_small_m import SmallMInputs, launch_small_m_gemm
from fulgurite.kernels.quantize.triton_dequantize import dequantize_weight
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.kernels.tuning.deterministic import DeterministicHeuristics
from fulgurite.quant import QuantTensor, resolve_format


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


def fused_quant_linear(
    x: Tensor,
    weight: QuantTensor,
    bias: Tensor | None = None,
    *,
    gate: GatedActivation = UNGATED,
    residual: Tensor | None = None,
) -> Any:
    """gate(x @ weight.T + bias) + residual in one kernel; NotImplemented for more than a few rows.

    With a gate, the first half of the weight's rows are the gate's, and the second half are up's.
    """
    entry = weight.format
    scheme, rows = dequant_scheme(entry), x.reshape(-1, x.shape[-1])
    if scheme is None or dequantize_first_scheme(entry) is not None or 0 in (*x.shape, len(weight)):
        return NotImplemented
    (m, k), n = rows.shape, len(weight)
    config = heuristics_for(x.device).weight_only_gemm(m, n, k, scheme)
    is_supported = supports_dtype(rows, scheme) and n % gate.num_inputs == 0
    if config is None or not config.small_m or not is_supported:
        return NotImplemented
    columns = n // gate.num_inputs
    if residual is not None and (
        residual.dtype != x.dtype or residual.shape != (*x.shape[:-1], columns)
    ):
        return NotImplemented
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    operand = make_operand(weight.packed, list(weight.scales.values()), entry, scheme)
    if residual is not None:
        residual = residual.reshape(-1, columns)
        residual = residual if residual.stride(-1) == 1 else residual.contiguous()
    out = rows.new_empty((m, columns))
    inputs = SmallMInputs(rows, operand, scheme, out, bias=bias, residual=residual, gate=gate)
    launch_small_m_gemm(inputs, config)
    return out.view(*x.shape[:-1], columns)


def _weight_only_gemm(
    rows: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    expert_offsets: Tensor | None = None,
) -> Any:
    entry = resolve_format(format)
    scheme = dequant_scheme(entry)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    first = dequantize_first_scheme(entry)
    if first is not None and expert_offsets is None and data.numel():
        return _dequantized_gemm(rows, first, make_operand(data, scales, entry, first), bias)
    if scheme is None or not supports_dtype(rows, scheme) or data.numel() == 0:
        if expert_offsets is not None:
            return NotImplemented
        return gguf_linear(rows, data, scales, entry, bias)
    (m, k), n = rows.shape, data.shape[-2]
    heuristics, weight = heuristics_for(rows.device), make_operand(data, scales, entry, scheme)
    if expert_offsets is None:
        config = heuristics.weight_only_gemm(m, n, k, scheme)
    else:
        config = heuristics.expert_gemm(m, n, k, data.shape[0], scheme, is_8bit=False)
    if (
        config is None
    ):  # many rows: the library's GEMM is faster by more than writing the weight costs
        return _dequantized_gemm(rows, scheme, weight, bias)
    inputs = GemmInputs(rows, weight, scheme, rows.dtype, bias=bias, expert_offsets=expert_offsets)
    return launch_gemm(inputs, config)


def dense_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] @ weight.T + bias in 16 bits, by a kernel that is the same for every M."""
    heuristics = heuristics_for(rows.device)
    assert isinstance(heuristics, DeterministicHeuristics), "outside of deterministic mode"
    operand, scheme = dense_operand(weight), DequantScheme("dense", "none")
    inputs = GemmInputs(rows, operand, scheme, rows.dtype, bias=bias)
    return launch_gemm(inputs, heuristics.dense_gemm(rows.shape[0], *weight.shape))


def _dequantized_gemm(
    rows: Tensor, scheme: DequantScheme, weight: QuantizedOperand, bias: Tensor | None
) -> Tensor:
    dense = dequantize_weight(rows.dtype, scheme, weight)
    if is_deterministic():
        return dense_linear(rows, dense, bias)
    return F.linear(rows, dense, None if bias is None else bias.to(rows.dtype))


def grouped_quant_linear(
    x: Tensor,
    expert_offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None = None,
    activations: str = UNQUANTIZED,
) -> Any:
    """y[t] = x[t] @ weight[e].T + bias[e] for offsets[e - 1] <= t < offsets[e].

    Grouped GEMM calls it for formats that have no kernel of their own.
    """
    if activations == UNQUANTIZED:
        return _weight_only_gemm(x, data, scales, format, bias, expert_offsets)
    parts = quantize(x, activations)
    if parts is NotImplemented:
        return NotImplemented
    return grouped_scaled_mm(
        parts[0], parts[1:], activations, expert_offsets, data, scales, format, bias, x.dtype
    )
