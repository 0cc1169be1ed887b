"""Grouped GEMM in plain torch: the definition that every kernel is compared with.

In: rows sorted by expert and one weight per expert. Out: each row times the weight of its expert.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.gemm.reference import (
    UNQUANTIZED,
    dequantize_packed,
    fake_quantize_activations,
)
from fulgurite.quant import resolve_format


def upcast(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


DENSE = "dense"  # the format of a weight that is not packed


def reference(
    x: Tensor,
    rows: Tensor | None,
    places: Tensor | None,
    factors: Tensor | None,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """One expert after the other in float32, the ends read on the host."""
    given = x if rows is None else x[rows]
    given = (
        upcast(given)
        if activations == UNQUANTIZED
        else fake_quantize_activations(given, activations)
    )
    products = given.new_zeros(given.shape[0], data.shape[1])
    for expert, start, end in nonempty_groups(offsets):
        product = F.linear(given[start:end], dequantize_expert(data, scales, format, expert))
        if factors is not None:
            product = product * factors[start:end, None]
        if bias is not None:
            product = product + bias[expert]
        products[start:end] = product
    return GatedActivation(gate, alpha, limit)(products).to(x.dtype)


def nonempty_groups(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of each expert that has rows, on the host."""
    spans = itertools.pairwise([0, *offsets.tolist()])
    return [(expert, start, end) for expert, (start, end) in enumerate(spans) if end > start]


def dequantize_expert(data: Tensor, scales: list[Tensor], format: str, expert: int) -> Tensor:
    """The matrix of one expert in float32 (or float64)."""
    if format == DENSE:
        return upcast(data[expert])
    return dequantize_packed(
        data[expert], [scale[expert] for scale in scales], resolve_format(format)
    )


def wgrad_reference(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """One expert after the other in float32, the ends read on the host."""
    out = a.new_zeros(offsets.shape[0], a.shape[1], b.shape[1])
    for expert, start, end in nonempty_groups(offsets):
        out[expert] = upcast(a[start:end]).t() @ upcast(b[start:end])
    return out
