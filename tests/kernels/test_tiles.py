"""The rules that choose tiles of `scaled_mm`: what they choose fits a GPU, and no program is idle."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton")

from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics

SHARED_BYTES = 227 << 10
SHAPES = [(2048, 7168), (4096, 4096), (4096, 14336), (6144, 4096), (7168, 2048), (7168, 18432),
          (14336, 4096), (18432, 7168), (16, 128), (100, 200), (1, 16)]  # fmt: skip


@pytest.mark.parametrize("scaling", ["mainloop", "epilogue"])
@pytest.mark.parametrize("n, k", SHAPES)
def test_tiles_fit(n, k, scaling):
    for m in (1, 16, 17, 33, 64, 65, 128, 257, 512, 513, 8192):
        tile = Sm90Heuristics().scaled_mm_config(m, n, k, scaling)
        assert (tile.block_m + tile.block_n) * tile.block_k * tile.num_stages <= SHARED_BYTES
        steps = -(-k // tile.block_k)
        assert (tile.split_k - 1) * -(-steps // tile.split_k) < steps, "a part without steps"
        assert tile.block_n == 64 or tile.num_warps == 8


def test_parts_have_steps_enough():
    """At the sizes they were measured at, few rows with scales of blocks share K as was fastest."""
    splits = {(2048, 7168): 8, (4096, 4096): 4, (4096, 14336): 8, (7168, 2048): 2, (14336, 4096): 2}
    for (n, k), split in splits.items():
        assert Sm90Heuristics().scaled_mm_config(1, n, k, "mainloop").split_k == split


@pytest.mark.parametrize("block", [(1, 0), (128, 128)])
@pytest.mark.parametrize("n, k", SHAPES)
def test_the_library_wins_from_some_number_of_rows_on(n, k, block):
    wins = [
        Sm90Heuristics().prefers_library_scaled_mm(block, m, n, k)
        for m in (1, 16, 32, 64, 128, 256, 512, 8192)
    ]
    assert wins == sorted(wins) and not wins[0] and wins[-1]
    assert Sm90Heuristics().prefers_library_scaled_mm((0, 0), 1, n, k)
