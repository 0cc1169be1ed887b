"""Grouped GEMM: which launch config for which kernel.

In: rows, experts and columns, and the traits of the weights. Out: a `LaunchConfig`, or None where
another kernel is faster. The choice depends on shapes alone, so a row's result does not depend on
which experts other rows were routed to.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.gemm import GemmHeuristics
from fulgurite.kernels.tuning.weight_traits import WeightTraits


class GroupedGemmHeuristics(GemmHeuristics):
    """GEMMs of rows that are sorted by expert."""

    large_m_rows: int
    """Rows of an average expert from which rows of x are the rows of the tensor cores' tile."""
    grouped_group_n: int
    """Tiles of N side by side in kernels that fill the tensor cores with rows of the weight."""
    dense_large_m: LaunchConfig
    """16 bits and many rows; a gated GEMM has half of `block_n` for each of gate and up."""
    dense_extra_rows: int
    """Rows by which tiles of the dense kernel may differ: the tensor cores take no fewer."""
    fp8_large_m: LaunchConfig
    fp8_max_registers: int
    """Above it the assembler interleaves the accumulators of both tiles, and they spill."""
    wgrad: LaunchConfig
    """block_m rows of a step, block_n by block_k of the output."""
    grouped_mm_max_rows: int
    """Rows of an average expert up to which the dense kernel beats torch's grouped_mm."""
    tile_map_num_warps: int
    permute_x: LaunchConfig
    """`block_m` rows whose columns a program permutes for the 4-bit kernel."""
    grouped_epilogue: LaunchConfig
    """`block_n` columns of a program, at most, where the epilogue is a kernel of its own."""

    def expert_gemm(
        self, m: int, n: int, k: int, experts: int, weight: WeightTraits, is_8bit: bool
    ) -> LaunchConfig:
        """Rows of several experts in the kernel of one weight, by the rows of an average expert.

        `is_8bit`: x has 8 bits, too, and they are multiplied as they are.
        """
        small = None if is_8bit else self.small_m_experts(m, experts, n, k, weight)
        if small is not None:
            return small
        block_m = average_block_m(m, experts)
        block_k = self.max_block_k
        if not is_8bit:
            block_k = min(self.preferred_block_k(weight), self.max_block_k)
        if block_m <= 64:
            return LaunchConfig(block_m, 64, block_k, 4, 4, group_n=self.grouped_group_n)
        return LaunchConfig(block_m, 128, block_k, 8, 3, group_n=self.grouped_group_n)

    def grouped_gemm(
        self, rows: int, experts: int, weight: WeightTraits, is_gated: bool, dtype: torch.dtype
    ) -> LaunchConfig:
        """The kernel for every kind of weight. A gate has two accumulators, so half the columns."""
        block_m, block_k = average_block_m(rows, experts), self._grouped_block_k(weight, dtype)
        group_n = self.grouped_group_n
        if block_m <= 32:
            block_n, stages = 32 if is_gated else 64, 5 if block_k <= 64 else 4
            return LaunchConfig(block_m, block_n, block_k, 4, stages, group_n=group_n)
        if block_m == 64:
            return LaunchConfig(block_m, 64 if is_gated else 128, block_k, 4, 4, group_n=group_n)
        if dtype == torch.float32:
            return LaunchConfig(64, 64, block_k, 4, 2, group_n=group_n)
        block_k = block_k if weight.is_4bit else min(block_k, 64)
        return LaunchConfig(block_m, 128 if is_gated else 256, block_k, 8, 3, group_n=group_n)

    def _grouped_block_k(self, weight: WeightTraits, dtype: torch.dtype) -> int:
        if weight.dequant == "dense":
            return 32 if dtype == torch.float32 else 64
        return min(self.preferred_block_k(weight), self.max_block_k)

    def grouped_gemm_dense(self, rows: int, experts: int, is_gated: bool) -> LaunchConfig | None:
        """16 bits and enough rows to fill the tensor cores; else None."""
        if rows < self.large_m_rows * experts:
            return None
        return _halve_block_n(self.dense_large_m, is_gated)

    def grouped_gemm_fp8(
        self, rows: int, experts: int, is_gated: bool, is_quantized: bool
    ) -> LaunchConfig | None:
        """FP8 times FP8, scaled every 128 columns of K; None with few rows.

        `is_quantized`: the output is quantized, too. 64 rows a tile where most experts have no
        more, and where a gated output is not quantized: its accumulators would not fit in
        registers.
        """
        if rows < self.large_m_rows * experts:
            return None
        config = _halve_block_n(self.fp8_large_m, is_gated)
        if not is_gated:
            config = replace(config, max_registers=self.fp8_max_registers)
        if 2 * rows <= 3 * self.large_m_rows * experts or (is_gated and not is_quantized):
            config = replace(config, block_m=64)
        return config

    def grouped_gemm_4bit(
        self, rows: int, experts: int, weight: WeightTraits, is_gated: bool
    ) -> LaunchConfig | None:
        """4-bit weights, each dequantized once for up to 128 rows of an expert; else None.

        `block_n` counts rows of the weight, of gate and up together. Triton 3.6 miscompiles 128
        rows with anything but 8 warps and 128 columns, and 256 rows with few steps over K (256
        would be a tenth faster with hundreds of rows).
        """
        if not weight.is_4bit:
            return None
        average = max(1, rows // experts)
        block_k = weight.group_size if weight.scaling == "mainloop" else 128
        if average <= 24:
            return LaunchConfig(16 if average <= 8 else 32, 128, block_k, 4, 4)
        if average <= 96:
            return LaunchConfig(64, 128, block_k, 4 if is_gated else 8, 4)
        return LaunchConfig(128, 128, block_k, 8, 3)

    def grouped_wgrad(self, k: int, dtype: torch.dtype) -> LaunchConfig:
        """`block_m` rows of a step; `block_n` by `block_k` of the output."""
        if dtype == torch.float32:
            return LaunchConfig(32, 64, 64, 4, 2)
        return replace(self.wgrad, block_k=16 if k <= 16 else self.wgrad.block_k)


def average_block_m(rows: int, experts: int) -> int:
    """The power of two from 16 to 128 that fits the rows of an average expert."""
    return min(128, max(16, 1 << (max(1, rows // experts) - 1).bit_length()))


def _halve_block_n(config: LaunchConfig, is_gated: bool) -> LaunchConfig:
    return replace(config, block_n=config.block_n // 2) if is_gated else config
