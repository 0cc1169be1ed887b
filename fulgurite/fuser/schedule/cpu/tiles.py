"""Column kernels of rows in memory: tiles are transposed, so that every row is a SIMD lane.

In: the nest of a column kernel. Out: which accesses go through tiles.

    short rows (a softmax of 13)       a row fills no vector, and each sum ends across the lanes of a vector
    results across the rows            norm(x).transpose(1, 2): each element would be on a cache line of its own
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.fuser.ir.cost import count_elements
from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.loop_nest import LoopNest, Store
from fulgurite.fuser.schedule.analysis import is_body_store
from fulgurite.fuser.schedule.loop_order import find_transposed_loads
from fulgurite.kernels.tuning import fuser_cpu as tuning


@dataclass(frozen=True)
class Tiles:
    """The accesses of a nest that go through transposed tiles."""

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of all tiles for a lane and a body point."""
        loads = sum(load.dtype.itemsize for load in self.loads)
        return loads + sum(store.tensor.itemsize for store in self.stores)


NO_TILES = Tiles()


def find_tiles(nest: LoopNest) -> Tiles:
    """Accesses along the last body loop whose lanes (the last grid loop) are apart; none if others are too."""
    body = nest.body
    if not nest.grid or not body or not all(axis.size.is_constant for axis in body):
        return NO_TILES
    lane, inner = nest.grid[-1], body[-1]
    accesses = [access for access in nest.accesses() if access[1].axes() & set(body)]
    stored = {store.tensor.name for store in nest.stores}
    if any(store.combine is not None for store in nest.stores):
        return NO_TILES
    if any(not is_store and tensor.name in stored for tensor, _, is_store in nest.accesses()):
        return NO_TILES
    loads = find_transposed_loads(nest, lane, inner)
    stores = [s for s in nest.stores if is_body_store(nest, s) and _is_across(s.index, nest)]
    tiled = {(x.name, x.index[0]) for x in loads} | {(s.tensor.name, s.index) for s in stores}
    for tensor, index, _ in accesses:
        stride = index.coefficient(lane)
        is_along = stride is not None and (stride == 0 or stride == 1)
        if not is_along and (tensor.name, index) not in tiled:
            return NO_TILES
    tiles = Tiles(tuple(loads), tuple(stores))
    points = count_elements(tuple(axis.size for axis in body))
    return tiles if points * tiles.row_bytes <= tuning.MAX_TILED_ROW_BYTES else NO_TILES


def _is_across(index: Index, nest: LoopNest) -> bool:
    """Is an access contiguous along the last body loop, with lanes apart?"""
    stride, along = index.coefficient(nest.grid[-1]), index.coefficient(nest.body[-1])
    if stride is None or along is None:
        return False
    return along == 1 and stride != 0 and stride != 1
