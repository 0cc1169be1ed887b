"""Heuristics of fused elementwise kernels: how rows and heads are divided among programs."""

from __future__ import annotations

from fulgurite.kernels.integer_math import next_power_of_2
from fulgurite.kernels.tuning.config import LaunchConfig


class ElementwiseHeuristics:
    """Decisions of `kernels/elementwise`; the numbers are in the device family's table."""

    elementwise: LaunchConfig  # `block_n` columns of a binary kernel's program, at most
    cross_entropy: LaunchConfig  # `block_n` logits that a row's program has in flight
    rms_norm_min_elements: int  # of a program; short rows (heads) share one
    rms_norm_elements_per_warp: int
    rms_norm_max_row: int  # elements of a row that a program holds in registers
    rope_small_batch: (
        int  # tokens up to which a program takes one head, so that there are many programs
    )
    rope_max_heads: int  # of a program
    rope_elements: int  # of a program, at most, where it takes several heads

    def rms_norm_launch(self, size: int) -> tuple[int, int]:
        """Rows of a program and its warps, for rows of `size`."""
        block = next_power_of_2(size)
        rows = max(1, self.rms_norm_min_elements // block)
        num_warps = max(1, min(16, block * rows // self.rms_norm_elements_per_warp))
        return rows, num_warps

    def rope_num_warps(self, heads: int) -> int:
        """Warps of a program with `heads` heads."""
        return 4 if heads > 1 else 1

    def rope_heads(self, tokens: int, head_size: int) -> int:
        """Heads of a program of `qk_norm_rope_kernel`."""
        if tokens <= self.rope_small_batch:
            return 1
        return max(1, min(self.rope_max_heads, self.rope_elements // head_size))
