"""Which tile a product with an epilogue is computed in.

In: the epilogue's nest over rows and columns, and the accumulators. Out: a `Tile`; `neighbours` are the others that a
search tries. What large products are best computed in was measured on an H200 (`docs/fuser-gpu.md`).
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.device import Device
from fulgurite.fuser.cost import number
from fulgurite.fuser.gemm.schedule import Accumulator, Tile, columns_of, fits
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.gpu.base import power_above

# for large products first; the share of the best one's rate that each reaches
ONE = {
    Tile(128, 256, 64, 8, 3): 1.0,
    Tile(128, 128, 64, 8, 4): 0.9,
    Tile(64, 128, 64, 4, 4): 0.7,
    Tile(64, 64, 64, 4, 5): 0.5,
    Tile(64, 32, 64, 4, 5): 0.3,
}
SEVERAL = {
    Tile(128, 128, 64, 8, 3, loop="plain"): 1.0,
    Tile(128, 64, 64, 4, 3, walking=False): 0.8,
    Tile(64, 64, 64, 4, 4, walking=False): 0.6,
    Tile(64, 32, 64, 4, 4, walking=False): 0.4,
}
MOST_ACCUMULATED = 1 << 15  # elements of all accumulators: 128 registers of eight warps


def best_tile(nest: Nest, accumulators: tuple[Accumulator, ...], device: Device) -> Tile:
    """The tile with which all multiprocessors together should be done first."""
    return candidates(nest, accumulators, device)[0]


def candidates(nest: Nest, accumulators: tuple[Accumulator, ...], device: Device) -> list[Tile]:
    """Tiles worth a try, the one that should be best first."""
    rows, columns = number(nest.grid[0].size), columns_of(nest)
    count = len(accumulators)
    known = ONE if count == 1 else SEVERAL
    if nest.body:  # a tile has one block of columns
        known = _of_blocks(number(nest.axes[-1].size))
    rates = {t: rate for t, rate in known.items() if fits(t, count)}
    rates = {t: r for t, r in rates.items() if t.rows * t.columns * count <= MOST_ACCUMULATED}

    def seconds(tile: Tile) -> float:
        """In units of an element's time at full rate."""
        total = -(-rows // tile.rows) * -(-columns // tile.columns)
        return -(-total // device.threads) * tile.rows * tile.columns / rates[tile]

    smallest = replace(next(reversed(known)), rows=64, stages=2)
    narrow = [t for t in rates if nest.body or t.columns <= max(32, power_above(columns))]
    return sorted(narrow, key=seconds) or [smallest]


def _of_blocks(columns: int) -> dict[Tile, float]:
    """Tiles whose columns are one block that is reduced."""
    rows = 256 if columns <= 128 else 128
    return {
        Tile(rows, columns, 64, 8, 3): 1.0,
        Tile(128, columns, 64, 4, 4): 0.95,
        Tile(64, columns, 64, 4, 4): 0.7,
    }


def neighbours(
    nest: Nest, accumulators: tuple[Accumulator, ...], device: Device, specialize: bool
) -> list[Tile]:
    """What a search tries: the likely tiles, each in a few ways; with warps apart where that may be."""
    found: dict[Tile, None] = {}
    count = len(accumulators)
    for tile in candidates(nest, accumulators, device)[:3]:
        near = [tile, replace(tile, walking=True, loop="plain"), replace(tile, walking=False)]
        near += [replace(tile, stages=tile.stages + 1), replace(tile, stores=True)]
        if specialize:
            near.append(replace(tile, warps=4, walking=True, loop="warp_specialize"))
        found |= dict.fromkeys(t for t in near if fits(t, count))
    return list(found)
