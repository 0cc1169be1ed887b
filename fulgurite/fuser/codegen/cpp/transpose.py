"""C++ of transposing kernels: square tiles, transposed inputs through a buffer.

for each tile (split among threads), neighbours along the axis that is read contiguously
  each transposed input: prefetch the next tile, load this one along its contiguous axis
  every point of the tile, SIMD along the output
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.buffered_printer import BufferedPrinter
from fulgurite.fuser.codegen.cpp.expressions import ExpressionPrinter, identifier, storage_type
from fulgurite.fuser.codegen.cpp.kernel import KernelWriter
from fulgurite.fuser.codegen.cpp.rows import staging_name
from fulgurite.fuser.ir.expression import NARROW_FLOATS
from fulgurite.fuser.ir.index import Index, as_index, from_atom
from fulgurite.fuser.schedule.loop_order import find_transposed_loads
from fulgurite.kernels.tuning import fuser_cpu as tuning


def write_transpose(kernel: KernelWriter) -> None:
    kernel.open_function()
    nest, emit = kernel.nest, kernel.emit
    other, inner = nest.body
    num_threads = kernel.print_num_threads()
    if num_threads:
        kernel.open_parallel_for(num_threads, len(nest.grid) + 2)
    for axis in nest.grid:
        kernel.open_loop(axis)
    block = kernel.schedule.block
    for axis, comment in ((inner, ""), (other, "tiles")):
        n, size = axis.name, kernel.print_size(axis)
        emit(f"for (int64_t {n}0 = 0; {n}0 < {size}; {n}0 += {block}) {{", comment)
    for axis in (other, inner):
        n, size = axis.name, kernel.print_size(axis)
        emit(f"const int64_t {n}1 = min_i64({n}0 + {block}, {size});")
    printer = BufferedPrinter(identifier)
    transpose_inputs(kernel, printer)
    write_tile(kernel, printer)
    for _ in range(len(nest.grid) + 2):
        emit("}")
    kernel.close_function()


def transpose_inputs(kernel: KernelWriter, printer: BufferedPrinter) -> None:
    """Loads the tiles of transposed inputs into buffers."""
    (other, inner), emit, block = kernel.nest.body, kernel.emit, kernel.schedule.block
    u, v = other.name, inner.name
    padded = block + tuning.TRANSPOSE_PADDING
    for number, load in enumerate(find_transposed_loads(kernel.nest, inner, other)):
        ctype, source = storage_type(load.dtype), identifier(load.name)
        tile = f"{source}_tile{number or ''}"
        emit(f"alignas(64) {ctype} {tile}[{block}][{padded}];")
        stride = kernel.printer.print_index(load.index[0].coefficient(inner) or Index(0))
        corner = ExpressionPrinter(identifier, {other: f"{u}0", inner: f"{v}0"})
        start = corner.print_index(load.index[0])
        next_tile = load.index[0].substitute({other: from_atom(other) + as_index(block)})
        next_start = corner.print_index(next_tile)
        emit(
            f"prefetch_rows({source} + {next_start}, {stride}, {block}, {v}1 - {v}0);", "next tile"
        )
        shape = f"{padded}, {u}1 - {u}0, {v}1 - {v}0"
        emit(f"transpose_tile({source} + {start}, {stride}, &{tile}[0][0], {shape});")
        printer.buffers[load] = f"{tile}[{u} - {u}0][{v} - {v}0]"


def write_tile(kernel: KernelWriter, printer: BufferedPrinter) -> None:
    """Every point of a tile."""
    nest, emit, block = kernel.nest, kernel.emit, kernel.schedule.block
    other, inner = nest.body
    u, v = other.name, inner.name
    staged = [s for s in nest.stores if s.tensor.name in kernel.schedule.nontemporal_stores]
    kernel.open_loop(other, "", f"{u}0", f"{u}1")
    for store in staged:
        emit(f"alignas(64) {storage_type(store.tensor.dtype)} {staging_name(store)}[{block}];")
    kernel.emit_pragma("omp simd")
    kernel.open_loop(inner, "", f"{v}0", f"{v}1")
    for local in kernel.find_required_locals([store.value for store in nest.stores]):
        kernel.declare_local(local, printer)
    for store in nest.stores:
        if store not in staged:
            kernel.emit_store(store, printer)
            continue
        value = printer.print_expression(store.value)
        if store.tensor.dtype in NARROW_FLOATS:
            emit(f"store({staging_name(store)} + ({v} - {v}0), {value});")
        else:
            emit(f"{staging_name(store)}[{v} - {v}0] = {value};")
    emit("}")
    for store in staged:
        at_start = ExpressionPrinter(identifier, {inner: f"{v}0"})
        target = f"{kernel.output_name(store.tensor.name)} + {at_start.print_index(store.index)}"
        emit(f"store_nontemporal({target}, {staging_name(store)}, {v}1 - {v}0);")
    emit("}")
