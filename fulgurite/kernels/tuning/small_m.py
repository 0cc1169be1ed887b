"""Which tile of `few_rows_kernel` for which sizes, chosen from what was measured.

In: rows of x, sizes of the weight and its kind. Out: a `FewTile`. The numbers come from sweeps on an
H200 (torch 2.11, triton 3.6) over the linear layers of Llama-8B and DeepSeek-V3 and the experts of
Qwen3-30B-A3B, DeepSeek-V3 and Mixtral-8x7B.

Few warps a program are best: they wait for each other's loads, so small programs leave more of them to
run meanwhile, and a last round of programs is short. Long steps are best too, if K is a multiple.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.kernels.common.triton_operands import Weight

FEW = 16  # rows of x that a program of `few_rows_kernel` takes at most
MANY_ROWS = 8192  # of a weight: programs enough for two warps each
FEW_OF_AN_EXPERT = 4  # rows of an average expert up to which `few_rows_kernel` is the faster one
SELDOM_SHARED = 4  # experts a row from which hardly two rows have the same one
PROGRAMS = 1024  # of two warps: about what an H200 runs at once


@dataclass(frozen=True)
class FewTile:
    """A program of `few_rows_kernel`: rows of the weight, columns of a warp's step, warps, stages;
    rows of x."""

    columns: int
    depth: int
    warps: int
    stages: int
    rows: int = FEW


def few_tile(m: int, n: int, k: int, weight: Weight) -> FewTile:
    """Up to 16 rows of x and one weight."""
    rows = 1 if m == 1 else 4 if m <= 4 else 8 if m <= 8 else FEW
    warps = 2 if n >= MANY_ROWS else 4
    # steps: what is decoded fills the registers
    long = weight.nibbles and rows <= (4 if weight.decode == "e2m1" else 1)
    columns = 32 if rows > 4 or (weight.nibbles and n >= MANY_ROWS) else 16
    return FewTile(columns, _depth(k, warps, weight, 256 if long else 128), warps, 3, rows)


def few_experts_tile(count: int, experts: int, n: int, k: int, weight: Weight) -> FewTile | None:
    """Rows sorted by expert, n rows of each weight; None where experts have many."""
    if count > FEW_OF_AN_EXPERT * experts:
        return None
    if SELDOM_SHARED * count <= experts:
        return few_pairs_tile(count, n, k, weight)
    return FewTile(32, _depth(k, 2, weight, 128), 2, 3, rows=4 if count <= 2 * experts else 8)


def few_pairs_tile(count: int, n: int, k: int, weight: Weight) -> FewTile:
    """One row of x a program; as many programs as there can run at once, and then larger ones."""
    columns = 32 if count * n >= 32 * PROGRAMS else 16
    warps = 1 if k % 256 == 0 and k % 512 else 2
    return FewTile(columns, _depth(k, warps, weight, 256), warps, 3, rows=1)


def few_down_tile(share: int, k: int, weight: Weight) -> FewTile:
    """All experts of a token side by side, `share` warps each."""
    return FewTile(16, _depth(k, share, weight, 256), 8, 3, rows=1)


def _depth(k: int, warps: int, weight: Weight, most: int) -> int:
    """The longest step up to `most` that K is a multiple of; whole groups of integers, or one group
    where a step has one scale."""
    if weight.few_scaling == "step":
        return min(weight.group, 128)
    least = weight.group if weight.few_scaling == "groups" else 64
    steps = (depth for depth in (256, 128, 64) if least <= depth <= most)
    return next((depth for depth in steps if k % (depth * warps) == 0), 128)
