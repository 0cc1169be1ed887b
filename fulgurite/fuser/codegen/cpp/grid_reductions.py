"""C++ of row kernels that also reduce over the grid: partials of each thread, combined at the end.

each thread
  its partials: accumulated in float, every so many rows added to doubles
  its rows, as `rows.py` writes them
the partials of all threads combined, and what is computed from them
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.expressions import identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import KernelWriter, accumulator, partial_ctype
from fulgurite.fuser.codegen.cpp.rows import RowWriter
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.analysis import is_body_store
from fulgurite.kernels.tuning import fuser_cpu as tuning


class GridReductionWriter(RowWriter):
    def __init__(self, kernel: KernelWriter) -> None:
        super().__init__(kernel)
        locals_ = self.nest.locals.values()
        self.column_reductions = [x for x in locals_ if x.role == "column_reduction"]
        self.grid_reductions: list[Local] = [
            x for x in locals_ if x.role in ("column_reduction", "full_reduction")
        ]

    def write(self) -> None:
        self.open_threads(self.kernel.print_num_threads() or "1")
        self.grid_loops()
        self.close_threads()

    def row(self, simd_threads: str | None) -> None:
        super().row(simd_threads)
        if self.column_reductions:
            self.emit(f"if (++rows_done % {tuning.GRID_SUM_ROWS} == 0) {{")
            self.flush_accumulators()
            self.emit("}")

    def open_threads(self, num_threads: str) -> None:
        k = self.kernel
        body = k.print_product(self.nest.body)
        self.emit(f"const int num_threads = {num_threads};")
        for x in self.grid_reductions:
            name, a, held = identifier(x.name), accumulator(x), partial_ctype(x)
            is_column = x.role == "column_reduction"
            count = f"num_threads * ({body})" if is_column else "num_threads"
            self.emit(f"{held}* {name}_partials = ({held}*)malloc(sizeof({held}) * {count});")
            # for every thread that was asked for: the system may start fewer
            fill = f"{name}_partials[c] = {a.initial};"
            self.emit(f"for (int64_t c = 0; c < {count}; ++c) {fill}")
            if is_column:
                self.emit(
                    f"{a.ctype}* {name}_accs = ({a.ctype}*)malloc(sizeof({a.ctype}) * {count});"
                )
        k.emit_pragma("omp parallel num_threads(num_threads)")
        self.emit("{")
        self.emit("const int tid = omp_get_thread_num();")
        for x in self.grid_reductions:
            name, a, held = identifier(x.name), accumulator(x), partial_ctype(x)
            if x.role == "full_reduction":
                self.emit(f"{held} {name}_partial = {a.initial};")
                continue
            self.emit(f"{a.ctype}* __restrict {name}_acc = {name}_accs + tid * ({body});")
            self.emit(f"{held}* __restrict {name}_partial = {name}_partials + tid * ({body});")
            self.emit(f"for (int64_t c = 0; c < {body}; ++c) {name}_acc[c] = {a.initial};")
        if self.column_reductions:
            self.emit("int64_t rows_done = 0;")
        collapse = f" collapse({len(self.nest.grid)})" if len(self.nest.grid) > 1 else ""
        k.emit_pragma(f"omp for{collapse} schedule(static)")

    def flush_accumulators(self) -> None:
        """Adds the float accumulators of some rows to the thread's partials in double."""
        body = self.kernel.print_product(self.nest.body)
        for x in self.column_reductions:
            a, name = accumulator(x), identifier(x.name)
            self.kernel.emit_pragma("omp simd")
            self.emit(f"for (int64_t c = 0; c < {body}; ++c) {{")
            self.emit(a.update.format(f"{name}_partial[c]", f"{name}_acc[c]") + ";")
            self.emit(f"{name}_acc[c] = {a.initial};")
            self.emit("}")

    def close_threads(self) -> None:
        if self.column_reductions:
            self.flush_accumulators()
        for x in self.full_reductions:
            self.emit(f"{identifier(x.name)}_partials[tid] = {identifier(x.name)}_partial;")
        self.emit("}")
        self.printer.reciprocals = {}  # those of row values end here
        stores = [s for s in self.nest.stores if self.analysis.is_after_grid(s.value)]
        self.combine_scalars(stores)
        body_stores = [s for s in stores if is_body_store(self.nest, s)]
        if body_stores:
            self.combine_columns(body_stores)
        for x in self.grid_reductions:
            self.emit(f"free({identifier(x.name)}_partials);")
        for x in self.column_reductions:
            self.emit(f"free({identifier(x.name)}_accs);")

    def combine_partials(self, x: Local, first: str, partial: str) -> None:
        """Declares a reduction over the grid; `partial` is that of thread t."""
        name = identifier(x.name)
        self.emit(f"{partial_ctype(x)} {name}_total = {first};")
        update = accumulator(x).update.format(f"{name}_total", partial)
        self.emit(f"for (int t = 1; t < num_threads; ++t) {update};")
        self.emit(f"const {value_ctype(x.dtype)} {name} = {name}_total;")

    def combine_scalars(self, stores: list[Store]) -> None:
        for x in self.full_reductions:
            partials = f"{identifier(x.name)}_partials"
            self.combine_partials(x, f"{partials}[0]", f"{partials}[t]")
        for local in self.kernel.find_required_locals([s.value for s in stores]):
            if not self.analysis.in_body[local.name] and local.reduction is None:
                self.kernel.declare_local(local, self.printer)
        for store in stores:
            if not is_body_store(self.nest, store):
                self.kernel.emit_store(store, self.printer)

    def combine_columns(self, stores: list[Store]) -> None:
        k = self.kernel
        body = k.print_product(self.nest.body)
        for axis in self.nest.body:
            k.open_loop(axis, "combine the partials of all threads")
        index = self.body_index()
        required = k.find_required_locals([s.value for s in stores])
        for x in required:
            if x.role == "column_reduction":
                partials = f"{identifier(x.name)}_partials"
                self.combine_partials(
                    x, f"{partials}[{index}]", f"{partials}[t * ({body}) + {index}]"
                )
        for x in required:
            if x.reduction is None and self.analysis.in_body[x.name]:
                k.declare_local(x, self.printer)
        for store in stores:
            k.emit_store(store, self.printer)
        for _ in self.nest.body:
            self.emit("}")
