"""`scaled_grouped_mm`: grouped GEMM with both operands quantized.

    y[s] = dequantize(a)[s] @ dequantize(b)[e].T          for offsets[e-1] <= s < offsets[e]

In: a [S, K], rows sorted by expert, and b [E, N, K], each as packed data with its scales in a format
of `FORMATS`; `offsets` int32 [E], the ends of the experts' rows, read on the device only. Out: [S, N]
in `out_dtype`, summed in float32 and rounded once. Rows at and past `offsets[-1]` are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.elementwise.gated_activation import UNGATED
from fulgurite.kernels.gemm import triton_scaled_mm
from fulgurite.kernels.gemm.reference import UNQUANTIZED, dequantize_packed
from fulgurite.kernels.grouped_gemm import cpu, reference
from fulgurite.kernels.grouped_gemm.args import GroupedGemmArgs
from fulgurite.op import op
from fulgurite.quant import resolve_format
from fulgurite.quant.shapes import logical_shape


def _scaled_grouped_mm_cpu(*arguments: Any) -> Any:
    """The rows are dequantized, the weights stay quantized."""
    out = cpu.grouped_gemm(_dequantized_rows(*arguments))
    return out if out is NotImplemented else out.to(arguments[-1])


def scaled_grouped_mm_reference(*arguments: Any) -> Tensor:
    """Everything dequantized, one expert after the other in float32."""
    return reference.grouped_gemm(_dequantized_rows(*arguments)).to(arguments[-1])


def _dequantized_rows(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    offsets: Tensor,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    out_dtype: torch.dtype,
) -> GroupedGemmArgs:
    rows = dequantize_packed(a, a_scales, resolve_format(a_format))
    return GroupedGemmArgs(
        rows, None, None, offsets, b, b_scales, b_format, None, UNQUANTIZED, UNGATED
    )


def _scaled_grouped_mm_cuda(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    offsets: Tensor,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    out_dtype: torch.dtype,
) -> Any:
    return triton_scaled_mm.grouped_scaled_mm(
        a, a_scales, a_format, offsets, b, b_scales, b_format, None, out_dtype
    )


# device type -> kernel with the operator's arguments; it may return NotImplemented
SCALED_GROUPED_MM_KERNELS = {"cpu": _scaled_grouped_mm_cpu, "cuda": _scaled_grouped_mm_cuda}


@op("fulgurite::scaled_grouped_mm")
def scaled_grouped_mm_op(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    offsets: Tensor,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """See the top of this file."""
    arguments = (a, a_scales, a_format, offsets.contiguous(), b, b_scales, b_format, out_dtype)
    out: Tensor = registry.dispatch(
        SCALED_GROUPED_MM_KERNELS, a.device, scaled_grouped_mm_reference, *arguments
    )
    return out


@scaled_grouped_mm_op.fake
def _(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    offsets: Tensor,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    left = logical_shape(resolve_format(a_format), a.shape)
    right = logical_shape(resolve_format(b_format), b.shape)
    assert left[-1] == right[-1], f"K of a is {left[-1]} and of b {right[-1]}"
    return a.new_empty((left[0], right[1]), dtype=out_dtype)
