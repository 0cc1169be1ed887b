"""Heuristics of paged attention: sizes of a step in, a `LaunchConfig` out.

`block_m` are rows (query tokens x query heads of one key head), `block_n` keys, `split_k` splits of a
context (split-KV).
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning.config import LaunchConfig


class AttentionHeuristics:
    """Decisions of `kernels/attention`; the numbers are in the device family's table."""

    num_sms: int
    attention_large_key_dim: int  # larger keys need smaller blocks
    attention_split_waves: int  # contexts are split until there are so many programs per SM
    attention_many_waves: int  # programs per SM from which one warp each is best
    attention_min_split_keys: int
    attention_max_splits: int
    attention_max_split_rows: int  # larger tiles are not split
    attention_merge_splits: int  # splits merged in one step
    attention_merge_elements: int  # elements merged in one step
    store_kv_num_warps: int

    def attention_config(
        self, rows: int, key_dim: int, is_float32: bool, programs: int, max_keys: int
    ) -> LaunchConfig:
        """For `rows` rows per sequence and key head, and `programs` of those.

        Contexts are split until every SM has two programs, since a program mostly waits for memory.
        """
        small_blocks = is_float32 or key_dim > self.attention_large_key_dim
        if rows > 16:
            side = 32 if small_blocks else 64
            config = LaunchConfig(block_m=side, block_n=side, num_warps=4, num_stages=2)
        elif programs >= self.attention_many_waves * self.num_sms:
            stages = 2 if small_blocks else 4
            config = LaunchConfig(block_m=16, block_n=32, num_warps=1, num_stages=stages)
        elif programs >= self.attention_split_waves * self.num_sms:
            stages = 2 if small_blocks else 3
            config = LaunchConfig(block_m=16, block_n=32, num_warps=2, num_stages=stages)
        else:
            keys = 32 if small_blocks else 64
            config = LaunchConfig(block_m=16, block_n=keys, num_warps=4, num_stages=2)
        if rows > self.attention_max_split_rows:
            return config
        programs *= cdiv(rows, config.block_m)
        splits = min(
            cdiv(self.attention_split_waves * self.num_sms, max(programs, 1)),
            cdiv(max_keys, self.attention_min_split_keys),
            self.attention_max_splits,
        )
        return replace(config, split_k=max(splits, 1))
