"""C++ of transposing kernels: square tiles, turned inputs through a buffer.

for each tile (shared among threads), neighbours along what is read one after the other
  each turned input: ask for the next tile, read this one along its contiguous axis into a buffer
  every point of the tile, SIMD along the output
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.expressions import Names, identifier, storage_type
from fulgurite.fuser.codegen.cpp.kernel import Kernel
from fulgurite.fuser.codegen.cpp.names import BufferNames
from fulgurite.fuser.ir.expression import NARROW_FLOATS
from fulgurite.fuser.ir.index import Index, of, of_atom
from fulgurite.fuser.ir.loop_nest import Store
from fulgurite.fuser.schedule.cpu.transpose import turned_loads

PADDING = 16  # columns more than the tile has: its rows don't share cache sets and stay aligned


def write_transpose(kernel: Kernel) -> None:
    kernel.open()
    nest, w = kernel.nest, kernel.write
    other, vector = nest.body
    clause = kernel.parallel(nest.grid)
    if clause:
        kernel.pragma(f"omp parallel for collapse({len(nest.grid) + 2}) schedule(static) {clause}")
    for axis in nest.grid:
        kernel.loop(axis)
    block = kernel.schedule.block
    for axis in (vector, other):
        size = kernel.size(axis)
        w(f"for (int64_t {axis.name}0 = 0; {axis.name}0 < {size}; {axis.name}0 += {block}) {{")
    w.lines[-1] += "  // tiles"
    for axis in (other, vector):
        size = kernel.size(axis)
        w(f"const int64_t {axis.name}1 = least({axis.name}0 + {block}, {size});")
    names = BufferNames(identifier)
    turn_inputs(kernel, names)
    write_tile(kernel, names)
    for _ in range(len(nest.grid) + 2):
        w("}")
    kernel.close()


def turn_inputs(kernel: Kernel, names: BufferNames) -> None:
    """The tiles of turned inputs, in buffers."""
    (other, vector), w, block = kernel.nest.body, kernel.write, kernel.schedule.block
    u, v = other.name, vector.name
    for number, load in enumerate(turned_loads(kernel.nest, vector, other)):
        ctype = storage_type(load.dtype)
        tile = f"{identifier(load.name)}_tile{number or ''}"
        w(f"alignas(64) {ctype} {tile}[{block}][{block + PADDING}];")
        step = kernel.plain.index(load.index[0].coefficient(vector) or Index(0))
        corner = Names(identifier, {other: f"{u}0", vector: f"{v}0"})
        next_index = load.index[0].substitute({other: of_atom(other) + of(block)})
        source = identifier(load.name)
        w(f"fetch_rows({source} + {corner.index(next_index)}, {step}, {block}, {v}1 - {v}0);")
        w.lines[-1] += "  // the next tile"
        shape = f"{block + PADDING}, {u}1 - {u}0, {v}1 - {v}0"
        w(f"turn({source} + {corner.index(load.index[0])}, {step}, &{tile}[0][0], {shape});")
        names.buffers[load] = f"{tile}[{u} - {u}0][{v} - {v}0]"


def write_tile(kernel: Kernel, names: BufferNames) -> None:
    """Every point of a tile."""
    nest, w, block = kernel.nest, kernel.write, kernel.schedule.block
    other, vector = nest.body
    u, v = other.name, vector.name
    streams = [s for s in nest.stores if s.tensor.name in kernel.schedule.streamed]
    kernel.loop(other, "", f"{u}0", f"{u}1")
    for store in streams:
        w(f"alignas(64) {storage_type(store.tensor.dtype)} {_collected(store)}[{block}];")
    kernel.pragma("omp simd")
    kernel.loop(vector, "", f"{v}0", f"{v}1")
    for local in kernel.needed([store.value for store in nest.stores]):
        kernel.declare(local, names)
    for store in nest.stores:
        if store not in streams:
            kernel.store(store, names)
        elif store.tensor.dtype in NARROW_FLOATS:
            w(f"store({_collected(store)} + ({v} - {v}0), {names.expression(store.value)});")
        else:
            w(f"{_collected(store)}[{v} - {v}0] = {names.expression(store.value)};")
    w("}")
    for store in streams:
        place = Names(identifier, {vector: f"{v}0"}).index(store.index)
        target = f"{kernel.target(store.tensor.name)} + {place}"
        w(f"stream({target}, {_collected(store)}, {v}1 - {v}0);")
    w("}")


def _collected(store: Store) -> str:
    return f"{identifier(store.tensor.name)}_block"
