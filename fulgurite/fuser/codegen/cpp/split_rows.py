"""C++ of a few long rows: threads split the body, with a barrier after every pass.

each thread
  for each row and pass: its part of the row   →   barrier   →   all partials combined
  row values are computed by every thread, and stored by the first
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.expressions import identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import accumulator, partial_ctype, print_flat_index
from fulgurite.fuser.codegen.cpp.rows import RowWriter
from fulgurite.fuser.ir.loop_nest import Local, Store


class SplitRowWriter(RowWriter):
    bounds = ("begin", "end")

    def write(self) -> None:
        k = self.kernel
        reductions = [x for x in self.nest.locals.values() if x.role == "row_reduction"]
        rows, size = k.print_product(self.nest.grid), k.print_size(self.nest.body[0])
        self.emit(f"const int num_threads = {k.print_num_threads() or '1'};")
        count = "num_threads" if rows == "1" else f"num_threads * {rows}"
        for x in reductions:
            name, held = identifier(x.name), partial_ctype(x)
            self.emit(f"{held}* {name}_partials = ({held}*)malloc(sizeof({held}) * {count});")
        k.emit_pragma("omp parallel num_threads(num_threads)")
        self.emit("{")
        # the system may start fewer threads than it was asked for
        self.emit("const int64_t tid = omp_get_thread_num(), started = omp_get_num_threads();")
        self.emit(
            f"const int64_t begin = tid * {size} / started, end = (tid + 1) * {size} / started;",
            "this thread's part of every row",
        )
        self.grid_loops()
        self.emit("}")
        for x in reductions:
            self.emit(f"free({identifier(x.name)}_partials);")

    def running_name(self, x: Local) -> str:
        return f"{identifier(x.name)}_partial"

    def sums_in_blocks(self) -> bool:
        return True

    def one_pass(self, step: int, simd_threads: str | None = None) -> None:
        super().one_pass(step)
        reductions = self.passes[step].row_reductions
        if reductions:
            self.kernel.emit_pragma("omp barrier")
        for x in reductions:
            name = identifier(x.name)
            self.emit(f"{partial_ctype(x)} {name}_combined = {self.print_partial(x, '0')};")
            update = accumulator(x).update.format(f"{name}_combined", self.print_partial(x, "t"))
            self.emit(f"for (int64_t t = 1; t < started; ++t) {update};")
            self.emit(f"const {value_ctype(x.dtype)} {name} = {name}_combined;")

    def finish_row_reduction(self, x: Local, in_double: bool) -> None:
        value = f"{identifier(x.name)}_total" if in_double else self.running_name(x)
        self.emit(f"{self.print_partial(x, 'tid')} = {value};")

    def print_partial(self, x: Local, thread: str) -> str:
        """A thread's partial of this row."""
        row = print_flat_index(self.nest.grid, self.kernel)
        index = thread if row == "0" else f"({row}) * num_threads + {thread}"
        return f"{identifier(x.name)}_partials[{index}]"

    def row_stores(self, stores: list[Store]) -> None:
        for store in stores:
            self.emit("if (tid == 0) {")
            self.kernel.emit_store(store, self.printer)
            self.emit("}")
