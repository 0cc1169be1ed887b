"""Mixture of experts: routing, sorting and the kernels for small batches.

In: tokens, experts and sizes. Out: a `LaunchConfig`: `block_m` tokens by `block_n` experts or
columns.
"""

from __future__ import annotations

import torch

from fulgurite.kernels.integer_math import next_power_of_2
from fulgurite.kernels.tuning.config import LaunchConfig


class MoeHeuristics:
    """Everything of a layer of experts but its grouped GEMMs."""

    max_small_batch: int
    """Tokens up to which kernels without sorting are faster."""
    small_batch_gate_up: LaunchConfig
    small_batch_num_warps: int
    """Warps that share the experts of a token in the quantized down projection."""
    max_experts_per_token: int
    """Experts of a token that the quantized small-batch kernel takes: a warp each."""
    router_register_elements: int
    """Elements of the router's weight in a program: 32 registers of each of 256 threads."""
    router_max_hidden_size: int
    router_max_experts: int
    """What the small-batch router takes: columns of a row, and experts that one program
    compares."""
    route: LaunchConfig
    sort_chunk_pairs: int
    """Pairs of token and expert that one program sorts."""
    sort_small: LaunchConfig
    sort_count: LaunchConfig
    sort_scan: LaunchConfig
    sort_scatter: LaunchConfig
    """`block_m`: pairs compared at once; chunks whose counts `sort_scan` adds at once."""
    combine: LaunchConfig
    """`block_n`: columns of a program, at most."""

    def small_batch_down(self, top_k: int) -> LaunchConfig:
        """Dense down projection, all experts of a token in a program."""
        return LaunchConfig(1, 4 if top_k > 4 else 8, 256, num_warps=8, num_stages=3)

    def warps_per_expert(self, top_k: int) -> int:
        """`small_batch_num_warps` in all, or one for each expert of a token."""
        return max(1, self.small_batch_num_warps // next_power_of_2(top_k))

    def small_batch_router(self, experts: int, hidden_size: int) -> LaunchConfig:
        """`block_n` experts of a program, whole rows; `block_m` experts compared at once at the
        end."""
        width, power = next_power_of_2(hidden_size), next_power_of_2(experts)
        held = self.router_register_elements
        return LaunchConfig(
            block_m=min(power, max(16, held // power)),
            block_n=min(8, max(1, held // width)),
            block_k=width,
            num_warps=8,
        )

    def route_tokens(self, tokens: int, experts: int, dtype: torch.dtype) -> LaunchConfig:
        """The router's GEMM with the choice of experts in its epilogue."""
        block_n = 16 if tokens <= 64 else min(64, max(16, next_power_of_2(experts)))
        block_k = 64 if dtype == torch.float32 else 128
        return LaunchConfig(16 if tokens <= 1024 else 32, block_n, block_k, 4, 3)
