"""C++ of a few long rows: threads split the body, with a barrier after every pass.

each thread
  for each row and pass: its blocks of the row   →   barrier   →   all blocks combined, in order
  row values are computed by every thread, and stored by the first
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.expressions import identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import (
    accumulator,
    is_ordered,
    print_flat_index,
    total_ctype,
)
from fulgurite.fuser.codegen.cpp.rows import RowWriter
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.kernels.tuning import fuser_cpu as tuning


class SplitRowWriter(RowWriter):
    bounds = ("begin", "end")

    def write(self) -> None:
        k, block, chunk = self.kernel, tuning.REDUCTION_BLOCK, tuning.REDUCTION_CHUNK
        reductions = [x for x in self.nest.locals.values() if x.role == "row_reduction"]
        *outer, inner = self.nest.body
        self.emit(f"const int num_threads = {k.print_num_threads() or '1'};")
        last = f"({k.print_size(inner)} + {block - 1}) / {block}"
        blocks = f"({k.print_product(tuple(outer))}) * ({last})" if outer else last
        self.emit(f"const int64_t blocks = {blocks};", "of a row")
        rows = k.print_product(self.nest.grid)
        for x in reductions:
            ctype, name = accumulator(x).ctype, identifier(x.name)
            count = f"({rows}) * {'blocks' if is_ordered(x) else 'num_threads'}"
            self.emit(f"{ctype}* {name}_partials = ({ctype}*)malloc(sizeof({ctype}) * {count});")
        k.emit_pragma("omp parallel num_threads(num_threads)")
        self.emit("{")
        # the system may start fewer threads than it was asked for
        self.emit("const int64_t tid = omp_get_thread_num(), started = omp_get_num_threads();")
        size = k.print_size(self.nest.body[0])
        if outer:
            bounds = f"begin = tid * ({size}) / started, end = (tid + 1) * ({size}) / started"
        else:
            self.emit(f"const int64_t chunks = ({size} + {chunk - 1}) / {chunk};")
            bounds = (
                f"begin = tid * chunks / started * {chunk}, "
                f"end = min_i64((tid + 1) * chunks / started * {chunk}, {size})"
            )
        self.emit(f"const int64_t {bounds};", "this thread's part of every row")
        self.grid_loops()
        self.emit("}")
        for x in reductions:
            self.emit(f"free({identifier(x.name)}_partials);")

    def running_name(self, x: Local) -> str:
        return f"{identifier(x.name)}_partial"

    def declare_total(self, x: Local) -> None:
        if not is_ordered(x):
            super().declare_total(x)

    def finish_chunk(self, x: Local, values: str, count: str) -> None:
        *outer, last = self.nest.body
        block, size = tuning.REDUCTION_BLOCK, self.kernel.print_size(last)
        number = f"block / {block}"
        if outer:
            row = print_flat_index(tuple(outer), self.kernel)
            number = f"({row}) * (({size} + {block - 1}) / {block}) + {number}"
        results = f"&{self.print_partial(x, 'blocks', number)}"
        self.emit(f"reduce_blocks<{accumulator(x).functor}>({values}, {count}, {results});")

    def one_pass(self, step: int, simd_threads: str | None = None) -> None:
        super().one_pass(step)
        reductions = self.passes[step].row_reductions
        if reductions:
            self.kernel.emit_pragma("omp barrier")
        for x in reductions:
            name, a = identifier(x.name), accumulator(x)
            self.emit(f"{total_ctype(x)} {name}_combined = {a.initial};")
            count, stride = ("blocks",) * 2 if is_ordered(x) else ("started", "num_threads")
            update = a.update.format(f"{name}_combined", self.print_partial(x, stride, "t"))
            self.emit(f"for (int64_t t = 0; t < {count}; ++t) {update};")
            self.emit(f"const {value_ctype(x.dtype)} {name} = {name}_combined;")

    def finish_row_reduction(self, x: Local) -> None:
        if not is_ordered(x):
            self.emit(f"{self.print_partial(x, 'num_threads', 'tid')} = {self.running_name(x)};")

    def print_partial(self, x: Local, stride: str, number: str) -> str:
        """A partial result of this row."""
        row = print_flat_index(self.nest.grid, self.kernel)
        index = number if row == "0" else f"({row}) * {stride} + {number}"
        return f"{identifier(x.name)}_partials[{index}]"

    def row_stores(self, stores: list[Store]) -> None:
        for store in stores:
            self.emit("if (tid == 0) {")
            self.kernel.emit_store(store, self.printer)
            self.emit("}")
