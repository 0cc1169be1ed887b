"""Quantize and dequantize kernels: launch configs.

In: sizes of the matrix. Out: a `LaunchConfig`: `block_m` rows by `block_n` columns of a program.
These kernels are bound by memory; the numbers keep enough loads in flight.
"""

from __future__ import annotations

from fulgurite.kernels.integer_math import next_power_of_2
from fulgurite.kernels.tuning.config import LaunchConfig


class QuantizeHeuristics:
    """Casts between floats and quantized formats."""

    max_register_row: int
    """Columns of a row that a program keeps in registers; longer rows are read twice."""
    quantize_elements: int
    """Elements of a program of the per-tensor and 1xB kernels."""
    max_tensor_block_n: int
    """Columns of a program of the per-tensor kernels and of dequantized weights."""
    amax_programs: int
    """Programs of the amax kernels that read one element at a time."""
    amax_bf16x2: LaunchConfig
    """`block_n` 32-bit words of a step of the amax kernel that reads two bfloat16 at a time."""
    amax_bf16x2_programs_per_sm: int
    quantize_128x128: LaunchConfig
    quantize_128x128_bf16x2: LaunchConfig
    store_words: int
    """16-bit words that a thread of the 128x128 kernel stores at once."""
    quantize_transposed: LaunchConfig
    quantize_transposed_bf16x2: LaunchConfig
    """`block_m` rows and `block_n` words of the matrix before it is transposed."""
    column_amax: LaunchConfig
    column_amax_bf16x2: LaunchConfig
    column_amax_bf16x2_rows: int
    """Rows of a program, `block_m` at a time."""
    quantize_4bit_warp_elements: int
    quantize_4bit_num_warps: int
    quantize_nvfp4_num_warps: int
    """NVFP4 does the most work a block; programs of one warp don't wait for each other."""
    store_bytes: int
    """Bytes that a thread of the 4-bit kernel stores at once, having read four times as many."""
    gguf_block_n: int

    def quantize_rows(self, columns: int) -> LaunchConfig:
        """One scale a row: whole rows where they fit in registers."""
        block_n = min(next_power_of_2(columns), self.max_register_row)
        block_m = max(1, min(2048 // block_n, 16))
        return LaunchConfig(block_m, block_n, num_warps=max(4, min(16, block_m * block_n // 1024)))

    def quantize_blocks(self, width: int) -> LaunchConfig:
        """`block_m` blocks of `width` columns, a byte a code."""
        return LaunchConfig(self.quantize_elements // width, width, num_warps=4)

    def quantize_tensor(self, columns: int) -> LaunchConfig:
        """One scale a matrix: amax and cast."""
        block_n = min(next_power_of_2(columns), self.max_tensor_block_n)
        return LaunchConfig(max(1, self.quantize_elements // block_n), block_n, num_warps=4)

    def quantize_4bit(self, format_family: str, width: int) -> LaunchConfig:
        """`block_m` blocks of `width` columns."""
        is_nvfp4 = format_family == "nvfp4"
        warps = self.quantize_nvfp4_num_warps if is_nvfp4 else self.quantize_4bit_num_warps
        blocks = self.quantize_4bit_warp_elements * warps // width
        return LaunchConfig(blocks, width, num_warps=warps)

    def dequantize_weight(self, columns: int) -> LaunchConfig:
        """A stretch of a row a program."""
        block_n = min(next_power_of_2(columns), self.max_tensor_block_n)
        return LaunchConfig(1, block_n, num_warps=4)

    def gguf_gemm(self, m: int) -> LaunchConfig:
        """x times a weight in GGUF blocks."""
        block_m = 16 if m <= 16 else 32 if m <= 32 else 64
        return LaunchConfig(block_m, self.gguf_block_n, num_warps=4)
