"""Launch configs of the grouped GEMM kernels.

In: rows, experts, and how the weight is dequantized. Out: a `LaunchConfig`, or None where another kernel is faster. The
choice depends on shapes alone, so a row's result does not depend on where other rows were routed.
`benchmarks/sweep_moe.py` times other configs.
"""

from __future__ import annotations

import torch

from fulgurite.kernels.common.triton_operands import DequantScheme
from fulgurite.kernels.integer_math import next_power_of_2
from fulgurite.kernels.tuning.config import LaunchConfig


class GroupedGemmHeuristics:
    """Grouped GEMM: rows sorted by expert, one weight [N, K] per expert."""

    grouped_gemm_dense_rows: int  # rows per expert from which x has the rows of the tensor cores' tile
    grouped_gemm_4bit_rows: tuple[int, int, int]  # average rows per expert: 16, 32, 64 rows per block

    def grouped_gemm_config(
        self, rows: int, experts: int, weight: DequantScheme, is_gated: bool, dtype: torch.dtype
    ) -> LaunchConfig:
        """Any weight. A gate has two accumulators per block, so half of the columns."""
        block_m = min(128, max(16, next_power_of_2(max(1, rows // experts))))
        block_k = _choose_block_k(weight, dtype)
        if block_m <= 32:
            stages = 5 if block_k <= 64 else 4
            return LaunchConfig(block_m, 32 if is_gated else 64, block_k, num_warps=4, num_stages=stages)
        if block_m == 64:
            return LaunchConfig(64, 64 if is_gated else 128, block_k, num_warps=4, num_stages=4)
        if dtype == torch.float32:
            return LaunchConfig(64, 64, block_k, num_warps=4, num_stages=2)
        block_k = block_k if weight.is_4bit else min(block_k, 64)
        return LaunchConfig(block_m, 128 if is_gated else 256, block_k, num_warps=8, num_stages=3)

    def grouped_dense_config(self, rows: int, experts: int, is_gated: bool) -> LaunchConfig | None:
        """16-bit weights and enough rows to fill the tensor cores; None otherwise."""
        if rows < self.grouped_gemm_dense_rows * experts:
            return None
        return LaunchConfig(128, 128 if is_gated else 256, 64, num_warps=8, num_stages=4)

    def grouped_fp8_config(
        self, rows: int, experts: int, is_gated: bool, quantizes_output: bool
    ) -> LaunchConfig | None:
        """FP8 times FP8, scaled every 128 of K; None with few rows.

        64 rows per block where most experts have no more, or where a gated output is not quantized: its accumulators
        would not fit in registers.
        """
        dense_rows = self.grouped_gemm_dense_rows * experts
        if rows < dense_rows:
            return None
        is_small = 2 * rows <= 3 * dense_rows or (is_gated and not quantizes_output)
        block_n = 128 if is_gated else 256
        return LaunchConfig(64 if is_small else 128, block_n, 128, num_warps=8, num_stages=4)

    def grouped_4bit_config(
        self, rows: int, experts: int, weight: DequantScheme, is_gated: bool
    ) -> LaunchConfig | None:
        """4-bit weights: each is dequantized once for up to 128 rows of its expert. None for other weights.

        `block_n` counts rows of the weight, of gate and up together. 128 rows are right with 8 warps and 128 columns
        only: Triton 3.6 miscompiles 4 warps, 256 columns and, with few steps over K, 256 rows (which would be a tenth
        faster with hundreds of rows).
        """
        if not weight.is_4bit:
            return None
        average = max(1, rows // experts)
        block_k = weight.group_size if weight.scaling == "mainloop" else 128
        up_to_16, up_to_32, up_to_64 = self.grouped_gemm_4bit_rows
        if average <= up_to_32:
            block_m = 16 if average <= up_to_16 else 32
            return LaunchConfig(block_m, 128, block_k, num_warps=4, num_stages=4)
        if average <= up_to_64:
            return LaunchConfig(64, 128, block_k, num_warps=4 if is_gated else 8, num_stages=4)
        return LaunchConfig(128, 128, block_k, num_warps=8, num_stages=3)

    def grouped_wgrad_config(self, n: int, dtype: torch.dtype) -> LaunchConfig:
        """Weight gradient: `block_m` rows per step, and the two sides of the output block."""
        if dtype == torch.float32:
            return LaunchConfig(32, 64, 64, num_warps=4, num_stages=2)
        return LaunchConfig(64, 128, 16 if n <= 16 else 128, num_warps=8, num_stages=3)


def _choose_block_k(weight: DequantScheme, dtype: torch.dtype) -> int:
    if weight.dequant == "dense":
        return 32 if dtype == torch.float32 else 64
    return min(weight.block_k, 128)
