"""C++ of transposing kernels: square tiles, turned inputs through a buffer.

for each tile (shared among threads)
  each turned input: read along its contiguous axis into a buffer
  every point of the tile, SIMD along the output
"""

from __future__ import annotations

from ..index import Index
from ..ir import Load
from ..schedule.transpose import turned_loads
from .cpp_expressions import Names, identifier, storage_type
from .cpp_kernel import Kernel

PADDING = 16  # columns more than the tile has: its rows don't share cache sets and stay aligned


class TileNames(Names):
    """Turned loads come from their buffers."""

    tiles: dict[Load, str]

    def load(self, load: Load) -> str:
        found = self.tiles.get(load)
        return super().load(load) if found is None else self.widened(load, found)


def write_transpose(kernel: Kernel) -> None:
    kernel.open()
    nest, w = kernel.nest, kernel.write
    other, vector = nest.body
    block = kernel.schedule.block
    names = TileNames(identifier)
    names.tiles = {}
    u, v = other.name, vector.name
    clause = kernel.parallel(nest.grid)
    if clause:
        kernel.pragma(f"omp parallel for collapse({len(nest.grid) + 2}) schedule(static) {clause}")
    for axis in nest.grid:
        kernel.loop(axis)
    for axis in (other, vector):
        size = kernel.size(axis)
        w(f"for (int64_t {axis.name}0 = 0; {axis.name}0 < {size}; {axis.name}0 += {block}) {{")
    w.lines[-1] += "  // tiles"
    for axis in (other, vector):
        size = kernel.size(axis)
        w(f"const int64_t {axis.name}1 = least({axis.name}0 + {block}, {size});")
    for number, load in enumerate(turned_loads(nest, vector, other)):
        ctype = storage_type(load.dtype)
        tile = f"{identifier(load.name)}_tile{number or ''}"
        w(f"alignas(64) {ctype} {tile}[{block}][{block + PADDING}];")
        step = kernel.plain.index(load.index[0].coefficient(vector) or Index(0))
        corner = {other: f"{u}0", vector: f"{v}0"}
        first = Names(identifier, corner).index(load.index[0])
        shape = f"{block + PADDING}, {u}1 - {u}0, {v}1 - {v}0"
        w(f"turn({identifier(load.name)} + {first}, {step}, &{tile}[0][0], {shape});")
        names.tiles[load] = f"{tile}[{u} - {u}0][{v} - {v}0]"
    kernel.loop(other, "", f"{u}0", f"{u}1")
    kernel.pragma("omp simd")
    kernel.loop(vector, "", f"{v}0", f"{v}1")
    for local in kernel.needed([store.value for store in nest.stores]):
        kernel.declare(local, names)
    for store in nest.stores:
        kernel.store(store, names)
    for _ in range(len(nest.grid) + 4):
        w("}")
    kernel.close()
