"""C++ of row kernels that also reduce over the grid: sums a thread, combined when all rows are done.

each thread: its own sums over rows (in float, every so many rows into doubles)
  its rows, as `cpp_rows` writes them
the threads' sums together, and what is computed from them
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.expressions import identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import Kernel, accumulator
from fulgurite.fuser.codegen.cpp.rows import Rows, held_type, team_size
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.cpu.base import store_axes

FLUSH_ROWS = 64  # rows summed in float before they go to the thread's total


class GridSums(Rows):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.colsums = [x for x in self.nest.locals.values() if x.role == "colsum"]
        self.over_grid: list[Local] = [
            x for x in self.nest.locals.values() if x.role in ("colsum", "scalar")
        ]

    def write(self) -> None:
        self.open_team(self.kernel.parallel(self.nest.grid))
        self.grid_loops()
        self.close_team()

    def row(self, inner_clause: str | None) -> None:
        super().row(inner_clause)
        if self.colsums:
            self.flush()

    def open_team(self, clause: str | None) -> None:
        k = self.kernel
        body = k.product(self.nest.body)
        self.w(f"const int team = {team_size(clause)};")
        for x in self.over_grid:
            name, ctype, held = identifier(x.name), accumulator(x).ctype, held_type(x)
            count = f"team * ({body})" if x.role == "colsum" else "team"
            self.w(f"{held}* {name}_parts = ({held}*)malloc(sizeof({held}) * {count});")
            # for every thread that was asked for: the system may give fewer
            fill = f"{name}_parts[c] = {accumulator(x).start};"
            self.w(f"for (int64_t c = 0; c < {count}; ++c) {fill}")
            if x.role == "colsum":
                self.w(f"{ctype}* {name}_rows = ({ctype}*)malloc(sizeof({ctype}) * {count});")
        k.pragma("omp parallel num_threads(team)")
        self.w("{")
        self.w("const int me = omp_get_thread_num();")
        for x in self.over_grid:
            a, name, held = accumulator(x), identifier(x.name), held_type(x)
            if x.role == "scalar":
                self.w(f"{held} {name}_part = {a.start};")
                continue
            self.w(f"{a.ctype}* __restrict {name}_part = {name}_rows + me * ({body});")
            self.w(f"{held}* __restrict {name}_long = {name}_parts + me * ({body});")
            self.w(f"for (int64_t c = 0; c < {body}; ++c) {name}_part[c] = {a.start};")
        if self.colsums:
            self.w("int64_t rows_done = 0;")
        collapse = f" collapse({len(self.nest.grid)})" if len(self.nest.grid) > 1 else ""
        k.pragma(f"omp for{collapse} schedule(static)")

    def flush(self) -> None:
        """Every so many rows a thread's short sums are added to its long ones."""
        self.w(f"if (++rows_done % {FLUSH_ROWS} == 0) {{")
        self.add_up()
        self.w("}")

    def add_up(self) -> None:
        body = self.kernel.product(self.nest.body)
        for x in self.colsums:
            a, name = accumulator(x), identifier(x.name)
            self.kernel.pragma("omp simd")
            self.w(f"for (int64_t c = 0; c < {body}; ++c) {{")
            self.w(a.step.format(f"{name}_long[c]", f"{name}_part[c]") + ";")
            self.w(f"{name}_part[c] = {a.start};")
            self.w("}")

    def close_team(self) -> None:
        if self.colsums:
            self.add_up()
        for x in self.scalars:
            self.w(f"{identifier(x.name)}_parts[me] = {identifier(x.name)}_part;")
        self.w("}")
        self.names.inverses = {}  # of rows; they end here
        self.finish_scalars()
        late = [s for s in self.nest.stores if self.facts.expression_after(s.value)]
        points = [s for s in late if store_axes(self.nest, s)]
        if points:
            self.finish_columns(points)
        for x in self.over_grid:
            self.w(f"free({identifier(x.name)}_parts);")
        for x in self.colsums:
            self.w(f"free({identifier(x.name)}_rows);")

    def finish_scalars(self) -> None:
        for x in self.scalars:
            a, name, held = accumulator(x), identifier(x.name), held_type(x)
            self.w(f"{held} {name}_all = {name}_parts[0];")
            step = a.step.format(f"{name}_all", f"{name}_parts[t]")
            self.w(f"for (int t = 1; t < team; ++t) {step};")
            self.w(f"const {value_ctype(x.dtype)} {name} = {name}_all;")
        late = [s for s in self.nest.stores if self.facts.expression_after(s.value)]
        single = [s for s in late if not store_axes(self.nest, s)]
        for local in self.kernel.needed([s.value for s in late]):
            if not self.facts.inner[local.name] and local.reduction is None:
                self.kernel.declare(local, self.names)
        for store in single:
            self.kernel.store(store, self.names)

    def finish_columns(self, stores: list[Store]) -> None:
        k = self.kernel
        body = k.product(self.nest.body)
        for axis in self.nest.body:
            k.loop(axis, "the threads' sums together")
        place = self.place()
        roots = [s.value for s in stores]
        needed = k.needed(roots)
        for x in needed:
            if x.role == "colsum":
                a, name = accumulator(x), identifier(x.name)
                self.w(f"{held_type(x)} {name}_all = {name}_parts[{place}];")
                other = f"{name}_parts[t * ({body}) + {place}]"
                step = a.step.format(f"{name}_all", other)
                self.w(f"for (int t = 1; t < team; ++t) {step};")
                self.w(f"const {value_ctype(x.dtype)} {name} = {name}_all;")
        for x in needed:
            if x.reduction is None and self.facts.inner[x.name]:
                k.declare(x, self.names)
        for store in stores:
            k.store(store, self.names)
        for _ in self.nest.body:
            self.w("}")
