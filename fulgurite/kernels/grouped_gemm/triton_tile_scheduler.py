# mypy: allow-untyped-defs, allow-incomplete-defs
"""Tile scheduler of grouped GEMMs: which rows a program takes, computed once for all programs.

In: the end of each expert's rows, on the device. Out: the tile map, int32 [tiles, 8]: for each tile
of rows its expert, its first row, its end, the first tile of its expert, and the expert's number of
tiles.

The number of tiles depends on shapes alone, so the last ones may have no rows (their end is not
past their first row). GEMMs with few rows find their tile themselves (`find_expert_tile`): that
takes as long as starting this kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.gemm.triton_gemm import find_expert_tile
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning.heuristics import heuristics_for

TILE_INFO_WIDTH = tl.constexpr(8)  # numbers of a tile, of which five are used


@cached_launch(do_not_specialize=["S", "experts"])
def build_tile_map_kernel(
    offsets_ptr, map_ptr, S, experts,
    BLOCK_M: tl.constexpr, UNIT: tl.constexpr, EXPERTS_POW2: tl.constexpr,
):  # fmt: skip
    """map[tile] = expert, first row, end, the expert's first tile, the expert's number of tiles.

    Rows without an expert are those of one more expert. A tile without rows is alone.

    Tiles have BLOCK_M rows. With a UNIT, some have UNIT rows less: an expert has as few tiles as
    possible, and as many of them as possible are small, the large ones first. Only the last one may
    be partial.
    """
    tile = tl.program_id(0)
    expert, start, end = find_expert_tile(offsets_ptr, experts, tile, S, BLOCK_M, EXPERTS_POW2)
    size = BLOCK_M
    begin = tl.load(offsets_ptr + expert - 1, expert > 0, 0)
    tiles, index = tl.cdiv(end - begin, BLOCK_M), (start - begin) // BLOCK_M
    info = map_ptr + tile * TILE_INFO_WIDTH
    tl.store(info + 3, tl.where(start < end, tile - index, tile))
    tl.store(info + 4, tl.where(start < end, tiles, 1))
    if UNIT > 0:
        large = tl.cdiv(tl.maximum(end - begin - tiles * (BLOCK_M - UNIT), 0), UNIT)
        size = tl.where(index < large, BLOCK_M, BLOCK_M - UNIT)
        start -= tl.maximum(index - large, 0) * UNIT
    tl.store(info, expert)
    tl.store(info + 1, start)
    tl.store(info + 2, tl.minimum(end, start + size))


@triton.jit
def load_tile_info(map_ptr, tile):
    """Expert, first row and end of a tile."""
    info = map_ptr + tile * TILE_INFO_WIDTH
    return tl.load(info), tl.load(info + 1), tl.load(info + 2)


@triton.jit
def swizzle_tile(tile, tiles_m, tiles_n, GROUP_N: tl.constexpr):
    """tile_m, tile_n of a program: GROUP_N tiles of N share rows of x in L2 before the next
    rows."""
    band = tile // (GROUP_N * tiles_m)
    width = tl.minimum(tiles_n - band * GROUP_N, GROUP_N)
    within = tile - band * GROUP_N * tiles_m
    return within // width, band * GROUP_N + within % width


@triton.jit
def expert_major_tile(map_ptr, tile, tiles_n):
    """tile_m, tile_n of a program: one expert after the other, all rows by some columns at a time.

    So an expert's rows stay in L2, and its weight is read once.
    """
    info = map_ptr + tile // tiles_n * TILE_INFO_WIDTH
    first, tiles = tl.load(info + 3), tl.load(info + 4)
    within = tile - first * tiles_n
    return first + within % tiles, within // tiles


def build_tile_map(offsets: Tensor, rows: int, block_m: int, unit: int = 0) -> tuple[Tensor, int]:
    """The map of tiles of `block_m` rows (or `unit` less), and their number."""
    experts = offsets.shape[0]
    tiles = cdiv(rows, block_m) + min(experts, rows) + 1  # the last tile of each may be partial
    tile_map = torch.empty(tiles, TILE_INFO_WIDTH.value, dtype=torch.int32, device=offsets.device)
    build_tile_map_kernel[(tiles,)](
        offsets, tile_map, rows, experts, BLOCK_M=block_m, UNIT=unit,
        EXPERTS_POW2=next_power_of_2(experts + 1),
        num_warps=heuristics_for(offsets.device).tile_map_num_warps,
    )  # fmt: skip
    return tile_map, tiles


def or_placeholder(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Any tensor for one that a kernel won't read."""
    return placeholder if tensor is None else tensor
