"""Launch configs of the GEMM kernels with quantized operands.

In: M, N, K and how the weight is dequantized. Out: a `LaunchConfig`, or None where the library is faster. The numbers
are in the tables of the device families; `fulgurite bench quant --device cuda` shows what they are worth.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.kernels.common.triton_operands import DequantScheme
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.small_m import SMALL_M, SmallMHeuristics


class GemmHeuristics(SmallMHeuristics):
    """GEMM: x [M, K] times a weight [N, K]."""

    num_sms: int
    gemm_dequantize_first_m: int  # from this M on, dequantizing the weight for the library is faster
    gemm_table_sms: int  # SMs of the device on which program counts were measured
    gemm_small_programs: int  # programs that split-K aims for, blocks of 32 rows
    gemm_programs: int  # the same, larger blocks
    scaled_mm_large_m: int  # above, blocks of 128 x 256 fill the device
    scaled_mm_deep_k: int  # from this K on, more programs share K
    scaled_mm_deep_k_many_blocks: tuple[int, int]  # the same with more than so many blocks
    library_row_scales: tuple[tuple[int, int, int], ...]  # (N above, K from, M above which it wins)
    library_block_scales: tuple[tuple[int, int], ...]  # (N above, M above which it wins)

    def weight_only_config(self, m: int, n: int, k: int, weight: DequantScheme) -> LaunchConfig | None:
        """16-bit x and a quantized weight. None: dequantize the weight, then call the library."""
        return None if m >= self.gemm_dequantize_first_m else self.mixed_gemm_config(m, n, k, weight)

    def mixed_gemm_config(self, m: int, n: int, k: int, weight: DequantScheme) -> LaunchConfig:
        """16-bit x: a small M reads the weight at memory speed, a larger one fills the tensor cores."""
        if m <= SMALL_M:
            return self.small_m_config(m, n, k, weight)
        block_m = 32 if m <= 32 else 64 if m < self.gemm_dequantize_first_m else 128
        config = LaunchConfig(block_m, 128, min(weight.block_k, 128), num_warps=8, num_stages=3)
        programs = self.gemm_small_programs if block_m == 32 else self.gemm_programs
        return self._with_split_k(config, m, n, k, programs)

    def scaled_mm_config(self, m: int, n: int, k: int, scaling: str) -> LaunchConfig:
        """8-bit x and weight. Scales in the mainloop need a second accumulator, so smaller blocks."""
        if scaling == "mainloop" and m <= 64:
            config = LaunchConfig(16 if m <= 16 else 32, 64, 128, num_stages=4)
            return self._with_split_k(config, m, n, k, 600, min_steps=7)
        if scaling == "mainloop":
            config = LaunchConfig(64, 128, 128, num_warps=8, num_stages=4)
            return self._with_split_k(config, m, n, k, 264, min_steps=14)
        if m > self.scaled_mm_large_m:
            return LaunchConfig(128, 256, 128, num_warps=8, num_stages=3)
        config = LaunchConfig(16 if m <= 16 else 32 if m <= 32 else 64, 64, 128, num_stages=6)
        blocks = cdiv(n, 64) * cdiv(m, config.block_m)
        if config.block_m == 64 and blocks > 2 * self.num_sms:
            return replace(config, num_stages=4)  # three programs per SM instead of two
        other_k, many_blocks = self.scaled_mm_deep_k_many_blocks
        is_deep = k >= self.scaled_mm_deep_k or (k >= other_k and blocks > many_blocks)
        return self._with_split_k(config, m, n, k, 264 if is_deep else 132)

    def expert_gemm_config(
        self, m: int, n: int, k: int, experts: int, weight: DequantScheme, is_8bit: bool
    ) -> LaunchConfig:
        """Rows of several experts: the block fits the rows of an average expert."""
        small_m = None if is_8bit else self.expert_small_m_config(m, experts, n, k, weight)
        if small_m is not None:
            return small_m
        block_m = min(128, max(16, next_power_of_2(max(1, m // experts))))
        block_k = 128 if is_8bit else min(weight.block_k, 128)
        if block_m <= 64:
            return LaunchConfig(block_m, 64, block_k, num_warps=4, num_stages=4)
        return LaunchConfig(block_m, 128, block_k, num_warps=8, num_stages=3)

    def _with_split_k(
        self, config: LaunchConfig, m: int, n: int, k: int, programs: int, min_steps: int = 2
    ) -> LaunchConfig:
        """Split K while there are fewer than `programs` programs and each has `min_steps` steps left."""
        blocks = cdiv(n, config.block_n) * cdiv(m, config.block_m)
        max_programs = programs * self.num_sms // self.gemm_table_sms
        split_k = 1
        while blocks * split_k * 2 <= max_programs and split_k * 2 * min_steps * config.block_k <= k:
            split_k *= 2
        return replace(config, split_k=split_k)

    def prefers_library_scaled_mm(self, block: tuple[int, int], m: int, n: int, k: int) -> bool:
        """Whether torch's scaled_mm was faster than our kernel, by the weight's scale block.

        One scale per tensor goes to cuBLAS, which is good at any size. Its kernels for row and block scales have
        blocks of 128 rows: the fewer of them there are, the longer ours stay ahead.
        """
        if block == (0, 0):
            return True
        if block[1] == 0:
            table = self.library_row_scales
            return m > next(limit for above_n, from_k, limit in table if n > above_n or k >= from_k)
        return m > next(limit for above_n, limit in self.library_block_scales if n > above_n)
