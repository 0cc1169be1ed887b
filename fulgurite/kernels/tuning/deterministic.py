"""Launch configs of deterministic mode: the order of additions is the same for every number of rows.

In: the table of a device family. Out: the same table, in which nothing that the order of additions
depends on is chosen by rows of x, sequences or lengths. One kernel family multiplies few rows and
many, and no library is called. K and contexts are added in parts of a fixed size, each from its
start: several programs may share the parts, or one program may have them all. MLA never expands keys
(`mla_expands_keys`), and linear attention runs token by token.

GEMMs compute out.T, so rows of x are the columns of an MMA. They may be 16 or 128 in a tile: every
column is the sum of the same products in the same order. At least 64 rows of the weight are in a
tile, or the MMA would be another instruction. `block_k` is the same for all rows.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning.base import Heuristics
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.gemm import TABLE_SMS, GemmEntry, find_entry, num_tiles
from fulgurite.kernels.tuning.grouped_gemm import average_block_m
from fulgurite.kernels.tuning.weight_traits import WeightTraits

BLOCK_ROWS = 64  # rows of x (queries of attention) in a program
MANY_ROWS = 4096  # more than any config of few rows takes
ANY_M = sys.maxsize
MAX_PARTS = 8  # of K, about: a long K has longer parts
PART_K = 1024  # columns of K in a part, at least
PART_KEYS = 256  # keys in a part of a context; later parts have more (`find_part_start`)

# ---- GEMM: H200, the linear layers of Llama-3.1-8B, 1 to 2048 rows
WIDE_N = 16384
FEW_ROWS = (
    GemmEntry(16, LaunchConfig(16, 64, num_warps=4, num_stages=4, group_n=8), 396),
    GemmEntry(32, LaunchConfig(32, 64, num_warps=4, num_stages=4, group_n=8), 396),
)
MANY_ROWS_TILE = LaunchConfig(128, 128, num_warps=8, num_stages=4, group_n=8)
NARROW_TABLE = (
    *FEW_ROWS,
    GemmEntry(256, LaunchConfig(64, 64, num_warps=4, num_stages=4, group_n=8), 264),
    GemmEntry(ANY_M, MANY_ROWS_TILE, 132),
)
WIDE_TABLE = (
    *FEW_ROWS,
    GemmEntry(64, LaunchConfig(64, 128, num_warps=8, num_stages=3, group_n=8), 264),
    GemmEntry(256, LaunchConfig(128, 64, num_warps=4, num_stages=4, group_n=8), 264),
    GemmEntry(ANY_M, MANY_ROWS_TILE, 132),
)
TABLE_4BIT = (  # a weight is dequantized once for each tile of rows
    *FEW_ROWS,
    GemmEntry(64, LaunchConfig(64, 128, num_warps=8, num_stages=3, group_n=8), 264),
    GemmEntry(ANY_M, replace(MANY_ROWS_TILE, num_stages=3), 132),
)


class DeterministicHeuristics(Heuristics):
    """Overrides of a device family's table; it stands before the table in the class."""

    max_small_batch = 0
    fused_linear_max_rows = 0
    rope_small_batch = 0
    mla_expands_keys = False
    delta_rule_chunks_prompts = False

    def dense_gemm(self, m: int, n: int, k: int) -> LaunchConfig:
        """16 bits times 16 bits."""
        return self._gemm(WIDE_TABLE if n >= WIDE_N else NARROW_TABLE, m, n, k, block_k=64)

    def invariant_gemm(self, dtype: torch.dtype) -> LaunchConfig:
        """Any strides, stacks of matrices, float32 (by multiply-adds without tensor cores)."""
        if dtype == torch.float32:
            return LaunchConfig(BLOCK_ROWS, 64, 32, num_warps=4, num_stages=2)
        return LaunchConfig(BLOCK_ROWS, 64, 64, num_warps=4, num_stages=3)

    def weight_only_gemm(self, m: int, n: int, k: int, weight: WeightTraits) -> LaunchConfig:
        return self.dequantized_gemm(m, n, k, weight)

    def dequantized_gemm(self, m: int, n: int, k: int, weight: WeightTraits) -> LaunchConfig:
        block_k = min(self.preferred_block_k(weight), self.max_block_k)
        table = NARROW_TABLE if n < WIDE_N else WIDE_TABLE
        return self._gemm(TABLE_4BIT if weight.is_4bit else table, m, n, k, block_k)

    def scaled_gemm(self, m: int, n: int, k: int, scaling: str) -> LaunchConfig:
        table = WIDE_TABLE if n >= WIDE_N else NARROW_TABLE
        return self._gemm(table, m, n, k, block_k=128)

    def _gemm(
        self, table: tuple[GemmEntry, ...], m: int, n: int, k: int, block_k: int
    ) -> LaunchConfig:
        """Programs share the parts of K until there are `split_k_programs` of them.

        Parts depend on K alone: weights that are merged, or sharded along N, give the same bits.
        """
        entry = find_entry(table, m)
        part_k = PART_K * next_power_of_2(cdiv(k, MAX_PARTS * PART_K))
        programs = entry.split_k_programs * self.num_sms // TABLE_SMS
        splits = min(programs // num_tiles(entry.config, m, n), cdiv(k, part_k))
        return replace(entry.config, block_k=block_k, split_k=max(splits, 1), part_k=part_k)

    def prefers_library_scaled_mm(self, block: tuple[int, int], m: int, n: int, k: int) -> bool:
        return False

    def small_m_experts(
        self, rows: int, experts: int, n: int, k: int, weight: WeightTraits
    ) -> None:
        return None

    def expert_gemm(
        self, m: int, n: int, k: int, experts: int, weight: WeightTraits, is_8bit: bool
    ) -> LaunchConfig:
        config = (
            self.scaled_gemm(m, n, k, "") if is_8bit else self.dequantized_gemm(m, n, k, weight)
        )
        tile = self._expert_tile(m, experts, config.block_k)
        return replace(tile, part_k=config.part_k)

    def grouped_gemm(
        self, rows: int, experts: int, weight: WeightTraits, is_gated: bool, dtype: torch.dtype
    ) -> LaunchConfig:
        block_k = self._grouped_block_k(weight, dtype)
        if dtype == torch.float32:  # not by tensor cores
            return LaunchConfig(BLOCK_ROWS, 64, block_k, 4, 3, group_n=self.grouped_group_n)
        return self._expert_tile(rows, experts, block_k)

    def _expert_tile(self, rows: int, experts: int, block_k: int) -> LaunchConfig:
        """For the rows of an average expert."""
        block_m = average_block_m(rows, experts)
        if block_m <= 64:
            return LaunchConfig(block_m, 64, block_k, 4, 4, group_n=self.grouped_group_n)
        return LaunchConfig(block_m, 128, block_k, 8, 3, group_n=self.grouped_group_n)

    def grouped_gemm_dense(self, rows: int, experts: int, is_gated: bool) -> None:
        return None

    def grouped_gemm_fp8(self, rows: int, experts: int, is_gated: bool, is_quantized: bool) -> None:
        return None

    def grouped_gemm_4bit(
        self, rows: int, experts: int, weight: WeightTraits, is_gated: bool
    ) -> None:
        return None

    def route_tokens(self, tokens: int, experts: int, dtype: torch.dtype) -> LaunchConfig:
        return super().route_tokens(1, experts, dtype)

    def gguf_gemm(self, m: int) -> LaunchConfig:
        return super().gguf_gemm(BLOCK_ROWS)

    def attention_config(
        self, rows: int, key_dim: int, is_float32: bool, programs: int, max_keys: int
    ) -> LaunchConfig:
        side = 32 if is_float32 or key_dim > self.attention_large_key_dim else BLOCK_ROWS
        programs *= cdiv(rows, side)
        splits = self.attention_split_waves * self.num_sms // max(programs, 1)
        stages = 3 if rows <= side and key_dim <= 128 and not is_float32 else 2
        config = LaunchConfig(block_m=side, block_n=side, num_warps=4, num_stages=stages)
        return replace(config, split_k=max(splits, 1), part_k=PART_KEYS)

    def mla_decode_config(
        self, rows: int, is_float32: bool, is_fp8: bool, sequences: int, max_keys: int
    ) -> LaunchConfig:
        config = super().mla_decode_config(MANY_ROWS, is_float32, is_fp8, sequences, max_keys)
        splits = self.num_sms // max(sequences * cdiv(rows, config.block_m), 1)
        return replace(config, split_k=max(splits, 1), part_k=PART_KEYS)
