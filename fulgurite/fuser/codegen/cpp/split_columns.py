"""C++ of column kernels with few grid points and only sums: threads share the body.

each thread: sums of its part of the body, a block of lanes at a time
then, a block of lanes at a time: the threads' parts together, and the row values made of them
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.columns import GROUP, Columns
from fulgurite.fuser.codegen.cpp.expressions import identifier
from fulgurite.fuser.codegen.cpp.kernel import accumulator, static_size
from fulgurite.fuser.codegen.cpp.rows import place_of, team_size


def write_split(columns: Columns) -> None:
    """The kernel's text below its head."""
    columns.w(f"const int team = {team_size(columns.kernel.parallel(columns.nest.grid))};")
    _allocate(columns)
    _sum_parts(columns)
    _combine_parts(columns)
    for x in columns.pass_sums(0):
        columns.w(f"free({identifier(x.name)}_parts);")


def _allocate(columns: Columns) -> None:
    """Room for the sums of every thread."""
    rows = columns.kernel.product(columns.nest.grid)
    for x in columns.pass_sums(0):
        name, ctype = identifier(x.name), accumulator(x).ctype
        columns.w(f"{ctype}* {name}_parts = ({ctype}*)malloc(sizeof({ctype}) * team * ({rows}));")


def _sum_parts(columns: Columns) -> None:
    kernel, nest = columns.kernel, columns.nest
    kernel.pragma("omp parallel for num_threads(team) schedule(static)")
    columns.w("for (int64_t chunk = 0; chunk < team; ++chunk) {")
    columns.w.lines[-1] += "  // a part of the body"
    points = static_size(nest.body[:1])
    if points is not None and points % GROUP == 0 and len(nest.body) == 1:
        share = f"{points // GROUP} / team * {GROUP}"
    else:
        share = f"{kernel.size(nest.body[0])} / team"
    columns.w(f"const int64_t from = chunk * {share}, to = (chunk + 1) * {share};")
    columns.open_loops()
    columns.row_values(0)
    columns.one_pass(0, ("from", "to"))
    rows, place = kernel.product(nest.grid), place_of(nest.grid, kernel)
    columns.lanes()
    for x in columns.pass_sums(0):
        name = identifier(x.name)
        columns.w(f"{name}_parts[chunk * ({rows}) + {place}] = {name}[lane];")
    columns.w("}")
    columns.close_blocks()
    columns.w("}")


def _combine_parts(columns: Columns) -> None:
    kernel, nest = columns.kernel, columns.nest
    rows, place = kernel.product(nest.grid), place_of(nest.grid, kernel)
    sums = columns.pass_sums(0)
    columns.open_loops()
    columns.row_locals, columns.done = set(), set()
    columns.row_values(0)
    for x in sums:
        columns.array(x, "", accumulator(x).ctype)
        columns.row_locals.add(x.name)
    columns.lanes("the parts together")
    for x in sums:
        a, name = accumulator(x), identifier(x.name)
        columns.w(f"{name}[lane] = {name}_parts[{place}];")
        step = a.step.format(f"{name}[lane]", f"{name}_parts[t * ({rows}) + {place}]")
        columns.w(f"for (int t = 1; t < team; ++t) {step};")
    columns.w("}")
    columns.row_values(1)
    columns.close_blocks()
