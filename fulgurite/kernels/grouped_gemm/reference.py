"""Grouped GEMM in plain torch: the references that kernels are tested against.

In: the arguments of the operators. Out: their results, one expert after the other in float32. The
offsets are read on the host.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from fulgurite.kernels.gemm.reference import (
    UNQUANTIZED,
    dequantize_packed,
    fake_quantize_activations,
    multiply,
    upcast,
)
from fulgurite.kernels.grouped_gemm.args import DENSE, GroupedGemmArgs
from fulgurite.quant import resolve_format


def grouped_gemm(args: GroupedGemmArgs) -> Tensor:
    """`fulgurite::grouped_gemm`."""
    rows = args.x if args.row_indices is None else args.x[args.row_indices]
    if args.activations == UNQUANTIZED:
        rows = upcast(rows)
    else:
        rows = fake_quantize_activations(rows, args.activations)
    out = rows.new_zeros(rows.shape[0], args.data.shape[1])
    for expert, start, end in nonempty_groups(args.offsets):
        weight = dequantize_expert(args.data, args.scales, args.format, expert)
        y = multiply(rows[start:end], weight)
        if args.row_weights is not None:
            y = y * args.row_weights[start:end, None]
        if args.bias is not None:
            y = y + args.bias[expert]
        out[start:end] = y
    return args.gate(out).to(args.x.dtype)


def grouped_wgrad(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`fulgurite::grouped_wgrad`."""
    out = a.new_zeros(offsets.shape[0], a.shape[1], b.shape[1])
    for expert, start, end in nonempty_groups(offsets):
        out[expert] = upcast(a[start:end]).t() @ upcast(b[start:end])
    return out


def nonempty_groups(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of each expert that has rows, on the host."""
    spans = itertools.pairwise([0, *offsets.tolist()])
    return [(expert, start, end) for expert, (start, end) in enumerate(spans) if end > start]


def dequantize_expert(data: Tensor, scales: list[Tensor], format: str, expert: int) -> Tensor:
    """The weight of one expert in float32 (or float64)."""
    if format == DENSE:
        return upcast(data[expert])
    expert_scales = [scale[expert] for scale in scales]
    return dequantize_packed(data[expert], expert_scales, resolve_format(format))
