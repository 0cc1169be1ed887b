"""Which rows a program of a grouped matmul takes: worked out once, for all programs.

In: where each expert's rows end, on the device. Out: for each tile of rows its expert, its first row
and where its rows end: [tiles, 4], int32. There are as many tiles as there may have to be; the last
ones may have no rows (their end is not past their first). Matmuls with few rows find their tile
themselves (`find_group`): that takes as long as starting this kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.triton.matmul import find_group


@triton.jit(do_not_specialize=["S", "experts"])
def tile_map_kernel(
    ends_ptr, map_ptr, S, experts, BM: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """map[tile] = expert, first row, end; the rows of no expert are those of one more.

    Tiles have BM rows. With a UNIT they have three units or two, BM is three: as few tiles as there
    can be of an expert, the larger ones first, and only the last may have rows to spare.
    """
    tile = tl.program_id(0)
    expert, start, end = find_group(ends_ptr, experts, tile, S, BM, GROUPS)
    size = BM
    if UNIT > 0:
        begin = tl.load(ends_ptr + expert - 1, expert > 0, 0)
        tiles, units = tl.cdiv(end - begin, BM), tl.cdiv(end - begin, UNIT)
        large = tl.maximum(units - 2 * tiles, 0)
        number = (start - begin) // BM
        size = tl.where(number < large, BM, 2 * UNIT)
        start -= tl.maximum(number - large, 0) * UNIT
    tl.store(map_ptr + tile * 4, expert)
    tl.store(map_ptr + tile * 4 + 1, start)
    tl.store(map_ptr + tile * 4 + 2, tl.minimum(end, start + size))


@triton.jit
def tile_at(map_ptr, tile):
    """A line of the map."""
    line = map_ptr + tile * 4
    return tl.load(line), tl.load(line + 1), tl.load(line + 2)


@triton.jit
def banded(tile, tiles_m, tiles_n, ACROSS: tl.constexpr):
    """Rows and columns of a program: ACROSS tiles of columns share rows of x before the next rows."""
    band = tile // (ACROSS * tiles_m)
    width = tl.minimum(tiles_n - band * ACROSS, ACROSS)
    within = tile - band * ACROSS * tiles_m
    return within // width, band * ACROSS + within % width


def tile_map(offsets: Tensor, count: int, rows: int, unit: int = 0) -> tuple[Tensor, int]:
    """The map of tiles of so many rows (or of three units or two), and how many there may be."""
    experts = offsets.shape[0]
    tiles = triton.cdiv(count, rows) + min(experts, count) + 1  # each one's last may be partial
    made = torch.empty(tiles, 4, dtype=torch.int32, device=offsets.device)
    tile_map_kernel[(tiles,)](
        offsets, made, count, experts, BM=rows, UNIT=unit, GROUPS=triton.next_power_of_2(experts + 1),
        num_warps=1,
    )  # fmt: skip
    return made, tiles


def or_else(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What stands for a tensor that a kernel won't look at: any other."""
    return other if tensor is None else tensor
