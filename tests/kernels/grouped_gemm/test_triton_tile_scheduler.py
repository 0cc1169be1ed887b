"""The tile map of grouped GEMMs: every row once, as few tiles as possible, experts in order."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import build_tile_map
from tests.kernels.triton_support import DEVICE, INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize("block_m, unit", [(32, 0), (48, 16), (32, 16)])
@pytest.mark.parametrize("offsets", [[0, 0], [3, 40], [33, 33], [0, 100], [49, 98]])
def test_every_row_is_in_one_tile(offsets: list[int], block_m: int, unit: int) -> None:
    """Tiles of `block_m` rows, or also of `unit` less: then an expert has as few as possible."""
    tile_map, tiles = build_tile_map(
        torch.tensor(offsets, dtype=torch.int32, device=DEVICE), 100, block_m, unit
    )
    owners: dict[int, int] = {}
    used, capacity = [0, 0, 0], [0, 0, 0]
    for expert, start, end, *_ in tile_map.cpu().tolist():
        for row in range(start, end):
            assert row not in owners and end - start <= block_m
            owners[row] = expert
        used[expert] += end > start
        size = block_m if end - start > block_m - unit else block_m - unit
        capacity[expert] += (end > start) * size
    counts = [offsets[0], offsets[1] - offsets[0], 100 - offsets[1]]
    assert owners == {row: sum(row >= end for end in offsets) for row in range(100)}
    assert len(tile_map) == tiles and used == [-(-count // block_m) for count in counts]
    if unit:
        small = block_m - unit
        spare = [c - count for c, count in zip(capacity, counts, strict=True) if count > small]
        assert all(0 <= rows < unit for rows in spare)


def test_programs_take_one_expert_after_the_other() -> None:
    """Each tile of rows by each tile of columns, once; an expert's rows before its next columns."""
    offsets = torch.tensor([40, 45, 45, 141], dtype=torch.int32, device=DEVICE)
    tile_map, tiles = build_tile_map(offsets, 150, 32)
    columns, order = 3, []
    for program in range(tiles * columns):
        info = tile_map[program // columns].tolist()
        within = program - info[3] * columns
        order.append((info[3] + within % info[4], within // info[4]))
    assert sorted(order) == [(tile, column) for tile in range(tiles) for column in range(columns)]
    assert order[:6] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]  # 40 rows: two tiles
    experts = [tile_map[tile, 0].item() for tile, _ in order]
    assert experts == sorted(tile_map[:, 0].repeat(3).tolist())
