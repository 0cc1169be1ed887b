"""Which kernel and which tile for which matmul, chosen from what was measured.

In: the sizes of a matmul and the kind of its weight. Out: a `Tile`, a `FewTile`, or the library. The
numbers come from sweeps on an H200 (torch 2.11, triton 3.6) over the linear layers of Llama-8B and
DeepSeek-V3, M from 1 to 8192; `fulgurite bench quant --device cuda` shows what they are worth.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from fulgurite.kernels.common.triton_operands import Weight
from fulgurite.kernels.tuning.small_m import FEW, FewTile, few_experts_tile, few_tile


@dataclass(frozen=True)
class Tile:
    """Rows of x, rows of the weight and columns of a step; programs that share K; warps, stages."""

    rows: int
    columns: int
    depth: int
    split: int = 1
    warps: int = 4
    stages: int = 4


DECODE_FIRST = 192  # rows of x from which decoding the whole weight first is faster


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; an H200's where there is none (the interpreter)."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def for_weight_only(
    m: int, n: int, k: int, weight: Weight, device: torch.device
) -> Tile | FewTile | None:
    """x in 16 bits and a packed weight; None: decode the weight first and leave it to the library."""
    return None if m >= DECODE_FIRST else for_decoded(m, n, k, weight, device)


def for_decoded(m: int, n: int, k: int, weight: Weight, device: torch.device) -> Tile | FewTile:
    """x in 16 bits: few rows read the weight at memory speed, more fill the tensor cores."""
    if m <= FEW:
        return few_tile(m, n, k, weight)
    rows = 32 if m <= 32 else 64 if m < DECODE_FIRST else 128
    depth, programs = min(weight.depth, 128), 256 if rows == 32 else 132
    return _split(Tile(rows, 128, depth, warps=8, stages=3), m, n, k, programs, device)


def for_scaled(m: int, n: int, k: int, scaling: str, device: torch.device) -> Tile:
    """8 bits times 8 bits; scales of 128 columns ask for sums of their own, so for smaller tiles."""
    if scaling == "step" and m <= 64:
        tile = Tile(16 if m <= 16 else 32, 64, 128, stages=4)
        return _split(tile, m, n, k, 600, device, steps=7)
    if scaling == "step":
        return _split(Tile(64, 128, 128, warps=8, stages=4), m, n, k, 264, device, steps=14)
    if m > 512:
        return Tile(128, 256, 128, warps=8, stages=3)
    tile = Tile(16 if m <= 16 else 32 if m <= 32 else 64, 64, 128, stages=6)
    tiles = -(-n // 64) * -(-m // tile.rows)
    if tile.rows == 64 and tiles > 2 * processors(device):
        return replace(tile, stages=4)  # three of them on a processor instead of two
    deep = k >= 8192 or (k >= 7168 and tiles > 66)
    return _split(tile, m, n, k, 264 if deep else 132, device)


def for_experts(m: int, n: int, k: int, experts: int, weight: Weight, same: bool) -> Tile | FewTile:
    """Rows of several experts: the tile fits the rows of an average one."""
    few = None if same else few_experts_tile(m, experts, n, k, weight)
    if few is not None:
        return few
    rows = min(128, max(16, 1 << (max(1, m // experts) - 1).bit_length()))
    depth = 128 if same else min(weight.depth, 128)
    if rows <= 64:
        return Tile(rows, 64, depth, warps=4, stages=4)
    return Tile(rows, 128, depth, warps=8, stages=3)


def _split(
    tile: Tile, m: int, n: int, k: int, programs: int, device: torch.device, steps: int = 2
) -> Tile:
    """K shared among programs while there are fewer than `programs` (for 132 processors), each with
    some steps to go."""
    tiles = -(-n // tile.columns) * -(-m // tile.rows)
    most = programs * processors(device) // 132
    split = 1
    while tiles * split * 2 <= most and split * 2 * steps * tile.depth <= k:
        split *= 2
    return replace(tile, split=split)


def library_wins(block: tuple[int, int], m: int, n: int, k: int) -> bool:
    """Whether torch's scaled_mm was measured faster than our kernel, by the weight's blocks.

    One scale goes to cuBLAS, which is good at any size. Its kernels for rows and blocks start with
    tiles of 128 rows, so the fewer of those there are, the longer ours stay ahead.
    """
    if block == (0, 0):
        return True
    if block[1] == 0:
        return m > (64 if n > 7168 or k > 14336 else 128 if n > 4096 or k >= 8192 else 256)
    if m <= 32:
        return False
    return m > (32 if n > 4096 else 128 if n <= 2560 else 64)
