"""The small-M GEMM kernel: a few rows of x, of one weight or of experts.

In: rows of x, sizes and traits of the weight. Out: a `LaunchConfig` with `small_m`. Few warps a
program are best: they wait for each other's loads, so small programs leave more of them to run
meanwhile, and the last wave of programs is short. A large `block_k` is best too, if K is a
multiple.
"""

from __future__ import annotations

from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.weight_traits import WeightTraits


class SmallMHeuristics:
    """Configs of `small_m_gemm_kernel`; every warp has `block_k` columns of a step."""

    max_small_m: int
    """Rows of x that a program takes at most."""
    max_unquantized_m: int
    """Rows of x up to which a cast to 8 bits costs more than it saves."""
    large_n: int
    """Rows of a weight from which there are programs enough for two warps each."""
    max_rows_per_expert: int
    """Rows of an average expert up to which the small-M kernel is the faster one."""
    min_experts_per_row: int
    """Experts a row from which hardly two rows share an expert."""
    resident_programs: int
    """Programs of two warps that the GPU runs at once."""

    def small_m_gemm(self, m: int, n: int, k: int, weight: WeightTraits) -> LaunchConfig:
        """One weight and up to `max_small_m` rows of x."""
        block_m = 1 if m == 1 else 4 if m <= 4 else 8 if m <= 8 else self.max_small_m
        num_warps = 2 if n >= self.large_n else 4
        # what is dequantized in a step fills the registers
        has_long_steps = weight.is_4bit and block_m <= (4 if weight.dequant == "e2m1" else 1)
        block_n = 32 if block_m > 4 or (weight.is_4bit and n >= self.large_n) else 16
        block_k = self._small_m_block_k(k, num_warps, weight, 256 if has_long_steps else 128)
        return _small_m(block_m, block_n, block_k, num_warps)

    def small_m_experts(
        self, rows: int, experts: int, n: int, k: int, weight: WeightTraits
    ) -> LaunchConfig | None:
        """Rows sorted by expert, n rows of each weight. None where experts have many rows."""
        if rows > self.max_rows_per_expert * experts:
            return None
        if self.min_experts_per_row * rows <= experts:
            return self.small_m_pairs(rows, n, k, weight)
        block_m = 4 if rows <= 2 * experts else 8
        return _small_m(block_m, 32, self._small_m_block_k(k, 2, weight, 128), 2)

    def small_m_pairs(self, pairs: int, n: int, k: int, weight: WeightTraits) -> LaunchConfig:
        """One row of x a program: as many programs as can run at once, and then larger ones."""
        block_n = 32 if pairs * n >= 32 * self.resident_programs else 16
        num_warps = 1 if k % 256 == 0 and k % 512 else 2
        return _small_m(1, block_n, self._small_m_block_k(k, num_warps, weight, 256), num_warps)

    def small_m_down(self, warps_per_expert: int, k: int, weight: WeightTraits) -> LaunchConfig:
        """All experts of a token side by side."""
        block_k = self._small_m_block_k(k, warps_per_expert, weight, 256)
        return _small_m(1, 16, block_k, warps_per_expert)

    def _small_m_block_k(self, k: int, num_warps: int, weight: WeightTraits, longest: int) -> int:
        """The longest step up to `longest` that divides K: whole groups of integers, or one group
        where a step has one scale."""
        if weight.small_m_scaling == "mainloop":
            return min(weight.group_size, 128)
        shortest = weight.group_size if weight.small_m_scaling == "group" else 64
        steps = (step for step in (256, 128, 64) if shortest <= step <= longest)
        return next((step for step in steps if k % (step * num_warps) == 0), 128)


def _small_m(block_m: int, block_n: int, block_k: int, num_warps: int) -> LaunchConfig:
    return LaunchConfig(block_m, block_n, block_k, num_warps, num_stages=3, small_m=True)
