"""C++ of few long rows: threads share the body, and wait for each other after every pass.

each thread
  for each row, for each pass: its part of the row   →   wait   →   all parts together
  row values are computed by every thread, and stored by the first
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.expressions import identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import accumulator
from fulgurite.fuser.codegen.cpp.rows import Rows, held_type, place_of, team_size
from fulgurite.fuser.ir.loop_nest import Local, Store


class SharedRows(Rows):
    bounds = ("from", "to")

    def write(self) -> None:
        k = self.kernel
        sums = [x for x in self.nest.locals.values() if x.role == "rowsum"]
        rows, size = k.product(self.nest.grid), k.size(self.nest.body[0])
        self.w(f"const int team = {team_size(k.parallel(self.nest.grid))};")
        count = "team" if rows == "1" else f"team * {rows}"
        for x in sums:
            name, held = identifier(x.name), held_type(x)
            self.w(f"{held}* {name}_parts = ({held}*)malloc(sizeof({held}) * {count});")
        k.pragma("omp parallel num_threads(team)")
        self.w("{")
        self.w("const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();")
        self.w(f"const int64_t from = me * {size} / all, to = (me + 1) * {size} / all;")
        self.w.lines[-1] += "  // its part of every row"
        self.grid_loops()
        self.w("}")
        for x in sums:
            self.w(f"free({identifier(x.name)}_parts);")

    def running(self, x: Local) -> str:
        return f"{identifier(x.name)}_mine"

    def in_parts(self) -> bool:
        return True

    def one_pass(self, step: int, inner_clause: str | None = None) -> None:
        super().one_pass(step)
        sums = self.pass_locals(step)[0]
        if sums:
            self.kernel.pragma("omp barrier")
        for x in sums:
            a, name = accumulator(x), identifier(x.name)
            self.w(f"{held_type(x)} {name}_all = {self.parts(x, '0')};")
            together = a.step.format(f"{name}_all", self.parts(x, "t"))
            self.w(f"for (int64_t t = 1; t < all; ++t) {together};")
            self.w(f"const {value_ctype(x.dtype)} {name} = {name}_all;")

    def finish_rowsum(self, x: Local, wide: bool) -> None:
        value = f"{identifier(x.name)}_total" if wide else self.running(x)
        self.w(f"{self.parts(x, 'me')} = {value};")

    def parts(self, x: Local, thread: str) -> str:
        row = place_of(self.nest.grid, self.kernel)
        place = thread if row == "0" else f"({row}) * team + {thread}"
        return f"{identifier(x.name)}_parts[{place}]"

    def row_stores(self, stores: list[Store]) -> None:
        for store in stores:
            self.w("if (me == 0) {")
            self.kernel.store(store, self.names)
            self.w("}")
