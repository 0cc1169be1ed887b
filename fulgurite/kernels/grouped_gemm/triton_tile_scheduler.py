# mypy: allow-untyped-defs, allow-incomplete-defs
"""Which rows a program of a grouped matmul takes: worked out once, for all programs.

In: where each expert's rows end, on the device. Out: for each tile of rows its expert, its first row,
where its rows end, the first tile of its expert, and how many that has: [tiles, 8], int32. There are as
many tiles as there may have to be; the last ones may have no rows (their end is not past their first).
Matmuls with few rows find their tile themselves (`find_expert_tile`): that takes as long as starting this
kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.gemm.triton_gemm import find_expert_tile

TILE_INFO_WIDTH = tl.constexpr(8)  # numbers of a tile, of which five are used


@triton.jit(do_not_specialize=["S", "experts"])
def build_tile_map_kernel(
    ends_ptr, map_ptr, S, experts, BM: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """map[tile] = expert, first row, end, the expert's first tile and how many it has; the rows of no
    expert are those of one more, and a tile without rows is alone.

    Tiles have BM rows, or, with a UNIT, some have a unit less: as few tiles as there can be of an
    expert, and as many of them as can be smaller, the larger ones first. Only the last may have rows
    to spare.
    """
    tile = tl.program_id(0)
    expert, start, end = find_expert_tile(ends_ptr, experts, tile, S, BM, GROUPS)
    size = BM
    begin = tl.load(ends_ptr + expert - 1, expert > 0, 0)
    tiles, number = tl.cdiv(end - begin, BM), (start - begin) // BM
    line = map_ptr + tile * TILE_INFO_WIDTH
    tl.store(line + 3, tl.where(start < end, tile - number, tile))
    tl.store(line + 4, tl.where(start < end, tiles, 1))
    if UNIT > 0:
        large = tl.cdiv(tl.maximum(end - begin - tiles * (BM - UNIT), 0), UNIT)
        size = tl.where(number < large, BM, BM - UNIT)
        start -= tl.maximum(number - large, 0) * UNIT
    tl.store(line, expert)
    tl.store(line + 1, start)
    tl.store(line + 2, tl.minimum(end, start + size))


@triton.jit
def load_tile_info(map_ptr, tile):
    """A line of the map."""
    line = map_ptr + tile * TILE_INFO_WIDTH
    return tl.load(line), tl.load(line + 1), tl.load(line + 2)


@triton.jit
def swizzle_tile(tile, tiles_m, tiles_n, ACROSS: tl.constexpr):
    """Rows and columns of a program: ACROSS tiles of columns share rows of x before the next rows."""
    band = tile // (ACROSS * tiles_m)
    width = tl.minimum(tiles_n - band * ACROSS, ACROSS)
    within = tile - band * ACROSS * tiles_m
    return within // width, band * ACROSS + within % width


@triton.jit
def expert_major_tile(map_ptr, tile, tiles_n):
    """Rows and columns of a program: one expert after the other, and of an expert all rows by some
    columns before the next columns. So its rows stay in the cache, and its weight is read once."""
    line = map_ptr + tile // tiles_n * TILE_INFO_WIDTH
    first, tiles = tl.load(line + 3), tl.load(line + 4)
    within = tile - first * tiles_n
    return first + within % tiles, within // tiles


def build_tile_map(offsets: Tensor, count: int, rows: int, unit: int = 0) -> tuple[Tensor, int]:
    """The map of tiles of so many rows (or of a unit less), and how many there may be."""
    experts = offsets.shape[0]
    tiles = triton.cdiv(count, rows) + min(experts, count) + 1  # each one's last may be partial
    made = torch.empty(tiles, TILE_INFO_WIDTH.value, dtype=torch.int32, device=offsets.device)
    build_tile_map_kernel[(tiles,)](
        offsets, made, count, experts, BM=rows, UNIT=unit, GROUPS=triton.next_power_of_2(experts + 1),
        num_warps=1,
    )  # fmt: skip
    return made, tiles


def or_placeholder(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What stands for a tensor that a kernel won't look at: any other."""
    return other if tensor is None else tensor
