"""Heuristics of multi-head latent attention (MLA): sizes of a step in, decisions and a `LaunchConfig` out.

`block_m` are rows (query tokens x heads), `block_n` keys, `split_k` splits of a context (split-KV).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning.config import LaunchConfig

# Query tokens of a sequence from which its keys may be expanded. Fewer fill less than a tile of a head; they
# are always absorbed. CPU kernels (include/mla_absorbed.h) and GPU kernels use the same number.
MLA_MIN_EXPANDED_QUERIES = 32
MAX_PADDING = 1.25  # rows of large tiles over those of small ones, up to which large ones are used


class MlaHeuristics:
    """Decisions of `kernels/mla`; the numbers are in the device family's table."""

    num_sms: int
    shared_memory_bytes: int
    mla_full_shared_memory: int  # bytes that the large blocks need
    mla_max_expanded_keys: int  # the keys of a step are expanded in chunks of so many
    mla_min_split_keys: int
    mla_max_splits: int
    mla_program_cost: int  # of a program's start, in keys
    mla_merge_cost: int  # of merging a split, in keys
    mla_gather: LaunchConfig  # `block_m` latents that a program copies out of the cache
    mla_absorb: LaunchConfig  # `block_m` rows whose rotary part a program rotates
    mla_absorb_fp8: LaunchConfig  # the same, and quantizes them
    mla_merge_num_warps: int
    mla_fp8_block_m: int  # rows of a program with many rows and FP8 latents
    mla_warp_rank: int
    mla_expands_keys = True  # whether keys of long prompts are expanded (`should_expand`)

    def mla_decode_config(
        self, rows: int, is_float32: bool, is_fp8: bool, sequences: int, max_keys: int
    ) -> LaunchConfig:
        """For `rows` rows per sequence. GPUs with less shared memory than Hopper get small blocks."""
        programs_per_sm = 1
        if is_float32:
            config = LaunchConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
            programs_per_sm = 2
        elif self.shared_memory_bytes < self.mla_full_shared_memory:
            config = LaunchConfig(block_m=16, block_n=32, num_warps=4, num_stages=2)
        elif rows <= 16 and is_fp8:
            config = LaunchConfig(block_m=16, block_n=32, num_warps=4, num_stages=4)
            programs_per_sm = 2
        elif rows <= 16:
            config = LaunchConfig(block_m=16, block_n=64, num_warps=4, num_stages=3)
        elif rows <= 32:
            config = LaunchConfig(block_m=32, block_n=32, num_warps=4, num_stages=3)
        elif is_fp8:
            config = LaunchConfig(self.mla_fp8_block_m, block_n=32, num_warps=8, num_stages=3)
        else:
            config = LaunchConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)
        programs = sequences * cdiv(rows, config.block_m)
        splits = self.mla_num_splits(programs, programs_per_sm * self.num_sms, max_keys)
        return replace(config, split_k=splits)

    def mla_num_splits(self, programs: int, resident: int, max_keys: int) -> int:
        """Splits of a context, where `resident` programs run at once: the fewest keys in sequence.

        The cost model counts in keys: a wave costs its longest program, a program its start and its keys.
        """

        def cost(splits: int) -> int:
            waves = cdiv(programs * splits, resident)
            merge = self.mla_merge_cost * splits if splits > 1 else 0
            return waves * (cdiv(max_keys, splits) + self.mla_program_cost) + merge

        most = min(max_keys // self.mla_min_split_keys, self.mla_max_splits)
        return min(range(1, max(most, 1) + 1), key=cost)

    def mla_store_num_warps(self, rank: int) -> int:
        """Warps of the program that stores one token's latent of `rank` columns."""
        return 4 if rank >= self.mla_warp_rank else 1

    def mla_prefill_block_m(self, query_lens: Sequence[int]) -> int:
        """Tokens of an attention tile of expanded sequences: 128, or 64 if that pads much less.

        A tile of 128 rows reads a key half as often, but it also computes its padding rows.
        """
        rows = {size: sum(cdiv(count, size) * size for count in query_lens) for size in (64, 128)}
        return 128 if rows[128] <= MAX_PADDING * rows[64] else 64

    def mla_prefill_config(self, block_m: int, is_float32: bool) -> LaunchConfig:
        """Attention of tiles of `block_m` query tokens to a chunk of expanded keys.

        The block may be smaller than the tile: a tile is then several programs.
        """
        if is_float32:
            return LaunchConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)
        num_warps = 4 if block_m <= 64 else 8
        return LaunchConfig(block_m=block_m, block_n=64, num_warps=num_warps, num_stages=3)


def should_expand(
    queries: int, keys: int, rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> bool:
    """Whether expanding a sequence's keys takes fewer multiply-adds than absorbing its queries.

    The sequence has `keys` tokens, the last `queries` of them new.
    """
    pairs = queries * (2 * keys - queries + 1) // 2
    expansion = rank * (nope_dim + value_dim)  # of one key or query and head
    absorbed = queries * expansion + pairs * (2 * rank + rope_dim)
    expanded = keys * expansion + pairs * (nope_dim + rope_dim + value_dim)
    return queries >= MLA_MIN_EXPANDED_QUERIES and expanded < absorbed
