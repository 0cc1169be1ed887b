"""C++ of column kernels with few grid points and only reductions: threads split the body.

each thread: some blocks of the body, a block of lanes at a time; the partial result of every block
then, a block of lanes at a time: the partial results combined in order, and the row values
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.columns import ColumnWriter
from fulgurite.fuser.codegen.cpp.expressions import identifier
from fulgurite.fuser.codegen.cpp.kernel import accumulator, print_flat_index, total_ctype
from fulgurite.kernels.tuning import fuser_cpu as tuning


def write_split_columns(columns: ColumnWriter) -> None:
    """Writes the body of the function."""
    kernel, block = columns.kernel, tuning.REDUCTION_BLOCK
    first, *inner = columns.nest.body
    size = kernel.print_size(first)
    blocks = size if inner else f"({size} + {block - 1}) / {block}"
    columns.emit(f"const int num_threads = {kernel.print_num_threads() or '1'};")
    columns.emit(f"const int64_t blocks = {blocks};", "of a reduction")
    _allocate_partials(columns)
    _write_partials(columns)
    _combine_partials(columns)
    for x in columns.find_reductions(0):
        columns.emit(f"free({identifier(x.name)}_partials);")


def _allocate_partials(columns: ColumnWriter) -> None:
    points = columns.kernel.print_product(columns.nest.grid)
    for x in columns.find_reductions(0):
        name, ctype = identifier(x.name), accumulator(x).ctype
        size = f"sizeof({ctype}) * blocks * ({points})"
        columns.emit(f"{ctype}* {name}_partials = ({ctype}*)malloc({size});")


def _write_partials(columns: ColumnWriter) -> None:
    kernel, nest, emit = columns.kernel, columns.nest, columns.emit
    kernel.open_parallel_for("num_threads")
    emit("for (int64_t chunk = 0; chunk < blocks; ++chunk) {", "one block of the body")
    first, *inner = nest.body
    block = tuning.REDUCTION_BLOCK
    bounds = (
        "begin = chunk, end = chunk + 1"
        if inner
        else f"begin = chunk * {block}, end = min_i64(begin + {block}, {kernel.print_size(first)})"
    )
    emit(f"const int64_t {bounds};")
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
        columns.declare_array(x, "_total", total_ctype(x))
        columns.row_locals.add(x.name)
    columns.reset(reductions, "_total")
    emit("for (int64_t chunk = 0; chunk < blocks; ++chunk) {", "combine the partial results")
    columns.open_lanes()
    for x in reductions:
        name = identifier(x.name)
        partial = f"{name}_partials[chunk * ({points}) + {index}]"
        emit(accumulator(x).update.format(f"{name}_total[lane]", partial) + ";")
    emit("}")
    emit("}")
    columns.open_lanes()
    for x in reductions:
        emit(f"{identifier(x.name)}[lane] = {identifier(x.name)}_total[lane];")
    emit("}")
    columns.row_values(1)
    columns.close_loops()
