"""C++ of row kernels that also reduce over the grid: partials of chunks of rows, combined at the end.

each thread takes some chunks of rows
  partials of the chunk: accumulated in float
  its rows, as `rows.py` writes them
the partials of all chunks combined in order, in double, and what is computed from them

The rows of a chunk depend on the number of rows alone, so results do not depend on the threads.
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.expressions import identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import KernelWriter, accumulator, total_ctype
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
        num_threads = self.kernel.print_num_threads() or "1"
        self.allocate()
        self.open_chunks(num_threads)
        self.row(None)
        self.close_chunks()
        self.combine()

    def allocate(self) -> None:
        """The partials of every chunk."""
        k = self.kernel
        low, high = tuning.MIN_GRID_SUM_ROWS, tuning.MAX_GRID_SUM_ROWS
        self.emit(f"const int64_t rows = {k.print_product(self.nest.grid)};")
        share = f"rows / {tuning.GRID_SUM_CHUNKS}"
        bounded = f"{share} < {low} ? {low} : min_i64({share}, {high})"
        self.emit(f"const int64_t chunk_rows = {bounded};")
        self.emit("const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;")
        body = k.print_product(self.nest.body)
        for x in self.grid_reductions:
            ctype = self.partial_ctype(x)
            count = f"chunks * ({body})" if x.role == "column_reduction" else "chunks"
            memory = f"({ctype}*)malloc(sizeof({ctype}) * ({count} + 1))"
            self.emit(f"{ctype}* {identifier(x.name)}_partials = {memory};")

    def partial_ctype(self, x: Local) -> str:
        return accumulator(x).ctype if x.role == "column_reduction" else total_ctype(x)

    def open_chunks(self, num_threads: str) -> None:
        k, grid = self.kernel, self.nest.grid
        body = k.print_product(self.nest.body)
        k.open_parallel_for(num_threads)
        self.emit("for (int64_t chunk = 0; chunk < chunks; ++chunk) {")
        for x in self.grid_reductions:
            name, a, ctype = identifier(x.name), accumulator(x), self.partial_ctype(x)
            if x.role == "full_reduction":
                self.emit(f"{ctype} {name}_partial = {a.initial};")
                continue
            start = f"{name}_partials + chunk * ({body})"
            self.emit(f"{ctype}* __restrict {name}_acc = {start};")
            self.emit(f"for (int64_t c = 0; c < {body}; ++c) {name}_acc[c] = {a.initial};")
        self.emit("const int64_t rows_end = min_i64(rows, (chunk + 1) * chunk_rows);")
        row = grid[-1].name if len(grid) == 1 else "row"
        loop = f"for (int64_t {row} = chunk * chunk_rows; {row} < rows_end; ++{row}) {{"
        self.emit(loop)
        if len(grid) > 1:
            self.emit("int64_t rest = row;")
            for axis in reversed(grid[1:]):
                self.emit(f"const int64_t {axis.name} = rest % ({k.print_size(axis)});")
                self.emit(f"rest /= {k.print_size(axis)};")
            self.emit(f"const int64_t {grid[0].name} = rest;")

    def close_chunks(self) -> None:
        self.emit("}")
        for x in self.grid_reductions:
            if x.role == "full_reduction":
                name = identifier(x.name)
                self.emit(f"{name}_partials[chunk] = {name}_partial;")
        self.emit("}")

    def combine(self) -> None:
        stores = [s for s in self.nest.stores if self.analysis.is_after_grid(s.value)]
        self.combine_scalars(stores)
        body_stores = [s for s in stores if is_body_store(self.nest, s)]
        if body_stores:
            self.combine_columns(body_stores)
        for x in self.grid_reductions:
            self.emit(f"free({identifier(x.name)}_partials);")

    def combine_scalars(self, stores: list[Store]) -> None:
        for x in self.full_reductions:
            name, a = identifier(x.name), accumulator(x)
            self.emit(f"{total_ctype(x)} {name}_total = {a.initial};")
            update = a.update.format(f"{name}_total", f"{name}_partials[chunk]")
            self.emit(f"for (int64_t chunk = 0; chunk < chunks; ++chunk) {update};")
            self.emit(f"const {value_ctype(x.dtype)} {name} = {name}_total;")
        for local in self.kernel.find_required_locals([s.value for s in stores]):
            if not self.analysis.in_body[local.name] and local.reduction is None:
                self.kernel.declare_local(local, self.printer)
        for store in stores:
            if not is_body_store(self.nest, store):
                self.kernel.emit_store(store, self.printer)

    def combine_columns(self, stores: list[Store]) -> None:
        k = self.kernel
        body = k.print_product(self.nest.body)
        required = k.find_required_locals([s.value for s in stores])
        columns = [x for x in required if x.role == "column_reduction"]
        for x in columns:
            name, a, ctype = identifier(x.name), accumulator(x), total_ctype(x)
            memory = f"({ctype}*)malloc(sizeof({ctype}) * ({body} + 1))"
            self.emit(f"{ctype}* __restrict {name}_totals = {memory};")
            self.emit(f"for (int64_t c = 0; c < {body}; ++c) {name}_totals[c] = {a.initial};")
            self.emit("for (int64_t chunk = 0; chunk < chunks; ++chunk) {")
            k.emit_pragma("omp simd")
            self.emit(f"for (int64_t c = 0; c < {body}; ++c) {{")
            partial = f"{name}_partials[chunk * ({body}) + c]"
            self.emit(a.update.format(f"{name}_totals[c]", partial) + ";")
            self.emit("}")
            self.emit("}")
        for axis in self.nest.body:
            k.open_loop(axis)
        index = self.body_index()
        for x in columns:
            name = identifier(x.name)
            self.emit(f"const {value_ctype(x.dtype)} {name} = {name}_totals[{index}];")
        for x in required:
            if x.reduction is None and self.analysis.in_body[x.name]:
                k.declare_local(x, self.printer)
        for store in stores:
            k.emit_store(store, self.printer)
        for _ in self.nest.body:
            self.emit("}")
        for x in columns:
            self.emit(f"free({identifier(x.name)}_totals);")
