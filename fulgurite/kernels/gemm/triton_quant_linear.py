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
from fulgurite.kernels.gemm.triton_gguf import blocks_linear
from fulgurite.kernels.gemm.triton_scaled_mm import grouped_scaled_mm, scaled_mm
from fulgurite.kernels.quantize.triton_dequantize import weight_as
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning import gemm
from fulgurite.quant import resolve

PLAIN = "none"


def quant_linear(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None = None,
    activations: str = PLAIN,
) -> Any:
    """`fulgurite::quant_linear`."""
    rows = x.reshape(-1, x.shape[-1])
    if activations != PLAIN:
        parts = quantize(rows, activations)
        if parts is NotImplemented:
            return NotImplemented
        out = scaled_mm(parts[0], parts[1:], activations, data, scales, format, bias, x.dtype)
    else:
        out = _weight_only(rows, data, scales, format, bias)
    return out if out is NotImplemented else out.reshape(*x.shape[:-1], out.shape[-1])


def _weight_only(
    rows: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    ends: Tensor | None = None,
) -> Any:
    entry = resolve(format)
    weight = triton_launch.weight_of(entry)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if weight is None or not triton_launch.takes(rows, weight) or data.numel() == 0:
        return (
            NotImplemented if ends is not None else blocks_linear(rows, data, scales, entry, bias)
        )
    m, k = rows.shape
    n = data.shape[-2]
    tile: gemm.Tile | gemm.FewTile | None
    if ends is None:
        tile = gemm.for_weight_only(m, n, k, weight, rows.device)
    else:
        tile = gemm.for_experts(m, n, k, data.shape[0], weight, same=False)
    if tile is None:  # many rows: what the library saves pays for writing the weight out
        parts = triton_launch.packed(data, scales, entry, weight)
        return F.linear(
            rows,
            weight_as(rows.dtype, weight, parts, entry),
            None if bias is None else bias.to(rows.dtype),
        )
    return triton_launch.matmul(
        rows, None, None, data, scales, entry, weight, bias, rows.dtype, tile, ends
    )


def grouped_quant_linear(
    x: Tensor,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None = None,
    activations: str = PLAIN,
) -> Any:
    """`fulgurite::grouped_quant_linear`."""
    if activations == PLAIN:
        return _weight_only(x, data, scales, format, bias, offsets)
    parts = quantize(x, activations)
    if parts is NotImplemented:
        return NotImplemented
    return grouped_scaled_mm(
        parts[0], parts[1:], activations, offsets, data, scales, format, bias, x.dtype
    )


__all__ = ["grouped_quant_linear", "quant_linear"]
