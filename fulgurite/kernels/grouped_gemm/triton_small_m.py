"""Grouped GEMM for a few rows of each expert: quantized weights are read once and dequantized in
registers.

In: the operator's arguments and the weight as kernels take it. Out: the output filled in, or False
if the kernel for more rows is faster.

A program takes a few rows of one expert's weight and up to `block_m` of its tokens. It finds its
expert from the offsets on the device; a program whose row another program has ends at once. An
expert with more rows is read again for the next ones, mostly from L2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_operands import DequantScheme, QuantizedOperand
from fulgurite.kernels.gemm.triton_small_m import SmallMInputs, launch_small_m_gemm
from fulgurite.kernels.grouped_gemm.args import GroupedGemmArgs
from fulgurite.kernels.tuning import heuristics_for


def try_small_m_grouped_gemm(
    out: Tensor, args: GroupedGemmArgs, weight: QuantizedOperand, scheme: DequantScheme
) -> bool:
    """Whether `out` has been filled."""
    x = args.x
    if scheme.dequant == "dense" or x.dtype == torch.float32:
        return False
    config = heuristics_for(x.device).small_m_experts(
        len(out), args.num_experts, weight.data.shape[1], x.shape[1], scheme
    )
    if config is None:
        return False
    inputs = SmallMInputs(
        x, weight, scheme, out, row_indices=args.row_indices, row_weights=args.row_weights,
        expert_offsets=args.offsets, bias=args.bias, gate=args.gate,
    )  # fmt: skip
    launch_small_m_gemm(inputs, config)
    return True
