"""Launch configs of the small-M GEMM kernel: one weight, or rows sorted by expert.

In: M, N, K and how the weight is dequantized. Out: a `LaunchConfig` with `small_m` set.

Few warps per program are best: warps wait for each other's loads, so small programs leave more of them to run
meanwhile, and the last wave is short. A large `block_k` is best, too, if K is a multiple of it.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_operands import DequantScheme
from fulgurite.kernels.tuning.config import LaunchConfig

SMALL_M = 16  # rows of x per program of the small-M kernel, at most: one tensor-core tile


class SmallMHeuristics:
    """Small-M GEMM: the weight is read once, at memory speed."""

    small_m_large_n: int  # from this N on, there are enough programs for two warps each
    small_m_rows_per_expert: int  # up to this average the small-M kernel is faster than the grouped GEMM
    small_m_rare_sharing: int  # with so many experts per row, hardly two rows share one
    small_m_programs: int  # programs of two warps that run at once

    def small_m_config(self, m: int, n: int, k: int, weight: DequantScheme) -> LaunchConfig:
        """Up to `SMALL_M` rows of x and one weight."""
        block_m = 1 if m == 1 else 4 if m <= 4 else 8 if m <= 8 else SMALL_M
        num_warps = 2 if n >= self.small_m_large_n else 4
        # dequantized elements of a step must fit in registers
        is_long = weight.is_4bit and block_m <= (4 if weight.dequant == "e2m1" else 1)
        is_wide = block_m > 4 or (weight.is_4bit and n >= self.small_m_large_n)
        block_k = _choose_block_k(k, num_warps, weight, 256 if is_long else 128)
        return _make_config(block_m, 32 if is_wide else 16, block_k, num_warps)

    def expert_small_m_config(
        self, rows: int, experts: int, n: int, k: int, weight: DequantScheme
    ) -> LaunchConfig | None:
        """Rows sorted by expert, N rows of each weight. None: experts have too many rows."""
        if rows > self.small_m_rows_per_expert * experts:
            return None
        if self.small_m_rare_sharing * rows <= experts:
            return self.pair_config(rows, n, k, weight)
        block_m = 4 if rows <= 2 * experts else 8
        return _make_config(block_m, 32, _choose_block_k(k, 2, weight, 128), 2)

    def pair_config(self, pairs: int, n: int, k: int, weight: DequantScheme) -> LaunchConfig:
        """One (token, expert) pair per program; larger blocks once the device is full."""
        block_n = 32 if pairs * n >= 32 * self.small_m_programs else 16
        num_warps = 1 if k % 256 == 0 and k % 512 else 2
        return _make_config(1, block_n, _choose_block_k(k, num_warps, weight, 256), num_warps)

    def expert_down_config(self, warps_per_expert: int, k: int, weight: DequantScheme) -> LaunchConfig:
        """All experts of a token in one program, `warps_per_expert` warps each."""
        return _make_config(1, 16, _choose_block_k(k, warps_per_expert, weight, 256), 8)


def _make_config(block_m: int, block_n: int, block_k: int, num_warps: int) -> LaunchConfig:
    return LaunchConfig(
        block_m, block_n, block_k, num_warps=num_warps, num_stages=3, small_m=True
    )


def _choose_block_k(k: int, num_warps: int, weight: DequantScheme, max_block_k: int) -> int:
    """The largest `block_k` that divides K over the warps: whole groups of integers, or one group if the scale is
    applied in the mainloop."""
    if weight.small_m_scaling == "mainloop":
        return min(weight.group_size, 128)
    smallest = weight.group_size if weight.small_m_scaling == "group" else 64
    candidates = (block for block in (256, 128, 64) if smallest <= block <= max_block_k)
    return next((block for block in candidates if k % (block * num_warps) == 0), 128)
