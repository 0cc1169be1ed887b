"""Which tile for which grouped matmul.

In: how many rows, experts and columns, and the kind of the weight. Out: a `Tile`. The choice depends on
shapes alone, so a row's result does not depend on where other rows went. With few rows the starting
points are published ones for an H200 (16x64x64 with 5 stages for one token); with many they were
measured on one, 8192 tokens of Qwen3-30B-A3B, DeepSeek-V3 and Mixtral-8x7B, and 1024 of them.
`benchmarks/sweep_moe.py` measures others.
"""

from __future__ import annotations

import torch

from fulgurite.kernels.common.triton_operands import Weight
from fulgurite.kernels.tuning.gemm import Tile


def rows_tile(
    count: int,
    experts: int,
    columns: int,
    size: int,
    weight: Weight,
    gated: bool,
    dtype: torch.dtype,
) -> Tile:
    """Rows of x by rows of the weight; a gate has two sums of every tile, so half the columns."""
    rows = min(128, max(16, 1 << (max(1, count // experts) - 1).bit_length()))
    depth = _depth(weight, dtype)
    if rows <= 32:
        return Tile(rows, 32 if gated else 64, depth, warps=4, stages=5 if depth <= 64 else 4)
    if rows == 64:
        return Tile(rows, 64 if gated else 128, depth, warps=4, stages=4)
    if dtype == torch.float32:
        return Tile(64, 64, depth, warps=4, stages=2)
    return Tile(rows, 128 if gated else 256, min(depth, 64) if not weight.nibbles else depth,
                warps=8, stages=3)  # fmt: skip


MANY = 32  # rows an expert from which x has the rows of the tensor cores' tile: H200, DeepSeek-V3


def many_tile(count: int, experts: int, gated: bool) -> Tile | None:
    """16 bits and enough rows to fill the tensor cores: 128 by 256, half of it the gate; else None."""
    if count < MANY * experts:
        return None
    return Tile(128, 128 if gated else 256, 64, warps=8, stages=4)


def fp8_tile(count: int, experts: int, gated: bool, packed: bool) -> Tile | None:
    """FP8 times FP8, each 128 of K scaled: 128 by 256, or by 64 rows where most experts have no more
    or where a gated result is not quantized, whose sums would not fit in registers; else None."""
    if count < MANY * experts:
        return None
    rows = 64 if 2 * count <= 3 * MANY * experts or (gated and not packed) else 128
    return Tile(rows, 128 if gated else 256, 128, warps=8, stages=4)


def packed_tile(count: int, experts: int, weight: Weight, gated: bool) -> Tile | None:
    """4-bit weights and more than a few rows: each weight is decoded once for all rows of an expert,
    up to 128 of them; else None. `columns` are rows of the weight, of gate and up together.

    128 rows are right with 8 warps and 128 columns only: Triton 3.6 makes something else of 4 warps, of 256
    columns, and, with few steps over K, of 256 rows (which would be a tenth faster with hundreds)."""
    if not weight.nibbles:
        return None
    average = max(1, count // experts)
    depth = weight.group if weight.scaling == "step" else 128
    if average <= 24:
        return Tile(16 if average <= 8 else 32, 128, depth, warps=4, stages=4)
    if average <= 96:
        return Tile(64, 128, depth, warps=4 if gated else 8, stages=4)
    return Tile(128, 128, depth, warps=8, stages=3)


def _depth(weight: Weight, dtype: torch.dtype) -> int:
    if weight.decode == "dense":
        return 32 if dtype == torch.float32 else 64
    return min(weight.depth, 128)


def outer_tile(columns: int, depth: int, dtype: torch.dtype) -> Tile:
    """Rows of a step, and the two sides of the result's tile."""
    if dtype == torch.float32:
        return Tile(32, 64, 64, warps=4, stages=2)
    return Tile(64, 128, 16 if depth <= 16 else 128, warps=8, stages=3)
