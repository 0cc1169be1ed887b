# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped matmul for a few rows of each expert: packed weights are read once, and decoded on the way.

In: what `grouped_matmul` has made of the operator's arguments. Out: its result filled in, or False where
the kernel for more rows is the faster one.

One program takes a few rows of one expert's weight and up to R of its tokens. It finds its expert from
the ends of the groups on the device; a row that another program has costs a program that ends at
once. An expert with more tokens than R is read again for the next R, mostly from the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_operands import DequantScheme, QuantizedOperand
from fulgurite.kernels.gemm.triton_small_m import launch_small_m_gemm
from fulgurite.kernels.tuning.heuristics import heuristics_for


def try_small_m_grouped_gemm(
    out: Tensor,
    x: Tensor,
    rows: Tensor | None,
    parts: QuantizedOperand,
    weight: DequantScheme,
    tensor_scale: bool,
    factors: Tensor | None,
    ends: Tensor,
    bias: Tensor | None,
    gate: tuple[int, float, float],
) -> bool:
    """Whether `out` has been filled."""
    dense = weight.dequant == "dense" or x.dtype == torch.float32
    given = (len(out), len(ends), parts.data.shape[1], x.shape[1], weight)
    config = None if dense else heuristics_for(x.device).expert_small_m_config(*given)
    if config is None:
        return False
    launch_small_m_gemm(
        x, parts, weight, config, out, tensor_scale=tensor_scale, rows=rows, factors=factors, ends=ends,
        bias=bias, gate=gate,
    )  # fmt: skip
    return True
