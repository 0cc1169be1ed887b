"""C++ of column kernels with few grid points and only reductions: threads split the body.

each thread: partials of its chunk of the body, a block of lanes at a time
then, a block of lanes at a time: the partials of all threads combined, and the row values
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.columns import ColumnWriter
from fulgurite.fuser.codegen.cpp.expressions import identifier
from fulgurite.fuser.codegen.cpp.kernel import accumulator, print_flat_index, static_size
from fulgurite.kernels.tuning import fuser_cpu as tuning


def write_split_columns(columns: ColumnWriter) -> None:
    """Writes the body of the function."""
    columns.emit(f"const int num_threads = {columns.kernel.print_num_threads() or '1'};")
    _allocate_partials(columns)
    _write_partials(columns)
    _combine_partials(columns)
    for x in columns.find_reductions(0):
        columns.emit(f"free({identifier(x.name)}_partials);")


def _allocate_partials(columns: ColumnWriter) -> None:
    points = columns.kernel.print_product(columns.nest.grid)
    for x in columns.find_reductions(0):
        name, ctype = identifier(x.name), accumulator(x).ctype
        size = f"sizeof({ctype}) * num_threads * ({points})"
        columns.emit(f"{ctype}* {name}_partials = ({ctype}*)malloc({size});")


def _write_partials(columns: ColumnWriter) -> None:
    kernel, nest, emit = columns.kernel, columns.nest, columns.emit
    kernel.open_parallel_for("num_threads")
    emit("for (int64_t chunk = 0; chunk < num_threads; ++chunk) {", "one chunk of the body")
    size, unroll = static_size(nest.body[:1]), tuning.COLUMN_UNROLL
    if size is not None and size % unroll == 0 and len(nest.body) == 1:
        share = f"{size // unroll} / num_threads * {unroll}"
    else:
        share = f"{kernel.print_size(nest.body[0])} / num_threads"
    emit(f"const int64_t begin = chunk * {share}, end = (chunk + 1) * {share};")
    columns.open_loops()
    columns.row_values(0)
    columns.one_pass(0, ("begin", "end"))
    points, index = kernel.print_product(nest.grid), print_flat_index(nest.grid, kernel)
    columns.open_lanes()
    for x in columns.find_reductions(0):
        name = identifier(x.name)
        emit(f"{name}_partials[chunk * ({points}) + {index}] = {name}[lane];")
    emit("}")
    columns.close_loops()
    emit("}")


def _combine_partials(columns: ColumnWriter) -> None:
    kernel, nest, emit = columns.kernel, columns.nest, columns.emit
    points, index = kernel.print_product(nest.grid), print_flat_index(nest.grid, kernel)
    reductions = columns.find_reductions(0)
    columns.open_loops()
    columns.row_locals, columns.declared = set(), set()
    columns.row_values(0)
    for x in reductions:
        columns.declare_array(x, "", accumulator(x).ctype)
        columns.row_locals.add(x.name)
    columns.open_lanes("combine the partials of all threads")
    for x in reductions:
        name = identifier(x.name)
        emit(f"{name}[lane] = {name}_partials[{index}];")
        partial = f"{name}_partials[t * ({points}) + {index}]"
        update = accumulator(x).update.format(f"{name}[lane]", partial)
        emit(f"for (int t = 1; t < num_threads; ++t) {update};")
    emit("}")
    columns.row_values(1)
    columns.close_loops()
