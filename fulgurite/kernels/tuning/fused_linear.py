"""Heuristics of fused linears (`gemm/triton_fused_linear.py`): shapes in, a `LaunchConfig` out.

`block_m` are rows of x, `block_n` rows of the weight, `block_k` columns of a step (of each warp's step in the
small-M kernel), `split_k` programs that share K, `prefetch_blocks` steps of the weight that are loaded before
the previous kernel is done (PDL).
"""

from __future__ import annotations

from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning.config import LaunchConfig

SMALL_M = 16  # rows of x of the small-M kernel: one tensor core tile


class FusedLinearHeuristics:
    """Decisions of fused linears; the numbers are in the device family's table."""

    num_sms: int
    fused_linear_max_rows: (
        int  # up to which the fused kernels beat the library and separate kernels
    )
    fused_linear_max_gemv_k: int  # columns of a weight that the GEMV kernel loads all at once
    fused_linear_pipeline_bytes: int  # of shared memory that a pipeline's stages may fill
    fused_linear_prefetch_bytes: int  # of a weight that a warp holds in registers
    fused_linear_max_prefetch: int  # steps

    def fused_gemv_config(self, n: int, k: int, is_gated: bool) -> LaunchConfig:
        """One row of x: few rows of the weight per program, and as much of them as registers hold."""
        columns = 8 if not is_gated and n >= 6 * self.num_sms else 4
        depth = min(1024, next_power_of_2(k))
        prefetch = min(self.fused_linear_max_prefetch, cdiv(k, depth))
        return LaunchConfig(
            block_n=columns, block_k=depth, num_warps=4, num_stages=3, prefetch_blocks=prefetch
        )

    def fused_small_m_config(
        self, m: int, n: int, k: int, is_gated: bool, itemsize: int
    ) -> LaunchConfig:
        """Up to 16 rows of x: programs for every SM first; then all of a program's weight at once, or as
        much of K as fits."""
        block_n = 8 if cdiv(n, 16) < 3 * self.num_sms // 2 else 16
        programs = cdiv(n, block_n)
        num_warps = 8
        if programs >= 4 * self.num_sms:
            num_warps = 2
        elif programs >= 2 * self.num_sms or k <= 1024:
            num_warps = 4
        block_k, num_stages = 128 if k >= 128 * num_warps else 64, 3 if is_gated else 4
        block_m = small_m_rows(m)
        weight_rows = block_n * (1 + is_gated)
        steps = cdiv(k, num_warps * block_k)
        fitting = self.fused_linear_prefetch_bytes // (weight_rows * block_k * itemsize)
        if steps <= min(self.fused_linear_max_prefetch, fitting):
            return LaunchConfig(
                block_m, block_n, block_k, num_warps, num_stages, prefetch_blocks=steps
            )
        stage_rows = num_warps * (block_m + weight_rows) * itemsize * num_stages
        while block_k * stage_rows > self.fused_linear_pipeline_bytes and block_k > 32:
            block_k //= 2
        return LaunchConfig(block_m, block_n, block_k, num_warps, num_stages, prefetch_blocks=1)

    def fused_gemm_config(
        self, m: int, n: int, k: int, is_gated: bool, itemsize: int
    ) -> LaunchConfig:
        """More rows of x: K is split while SMs are idle and each program keeps at least four steps."""
        block_m = 32 if m <= 32 else 64 if m <= 64 else 128
        is_narrow = is_gated and cdiv(n, 64) < self.num_sms
        block_n, block_k = (32, 128) if is_narrow else (64, 64 if is_gated else 128)
        num_stages, split_k = 4 if block_m < 128 else 3, 1
        stage_rows = (block_m + block_n * (1 + is_gated)) * itemsize * num_stages
        while stage_rows * block_k > self.fused_linear_pipeline_bytes and block_k > 32:
            block_k //= 2
        tiles = cdiv(n, block_n)
        while tiles * split_k * 2 <= 2 * self.num_sms and split_k * 8 * block_k <= k:
            split_k *= 2
        lines = 4 if k * itemsize >= 4 * 128 else 0
        return LaunchConfig(block_m, block_n, block_k, 4, num_stages, split_k, prefetch_lines=lines)


def small_m_rows(m: int) -> int:
    """Rows of x that a program of the small-M kernel reads."""
    return SMALL_M if m > 4 else 4 if m > 1 else 1
