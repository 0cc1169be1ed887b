"""C++ of column kernels: a block of neighbouring grid points at once, each lane its own reduction.

for each block of lanes (shared among threads)
  for each body point: every lane takes in its element   (contiguous across lanes)
  row values a lane, then the next pass
"""

from __future__ import annotations

from ..index import Axis
from ..ir import Expression
from ..nest import Local, Store
from ..schedule.base import store_axes
from .cpp_expressions import Names, identifier, value_ctype
from .cpp_kernel import Kernel, accumulator, static_size, wide_sum

FLUSH = 128  # addends of one lane summed before they go to its total


def write_columns(kernel: Kernel) -> None:
    kernel.open()
    _Columns(kernel).write()
    kernel.close()


class _Columns:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.nest = kernel.nest
        self.facts = kernel.facts
        self.w = kernel.write
        self.vector: Axis = self.nest.grid[-1]
        self.row_locals: set[str] = set()
        self.names = Names(self.local)
        self.done: set[str] = set()

    def local(self, name: str) -> str:
        """Row values live in arrays over the lanes."""
        text = identifier(name)
        return f"{text}[lane]" if name in self.row_locals else text

    def write(self) -> None:
        if self.kernel.schedule.split:
            self.write_split()
            return
        k = self.kernel
        self.open_blocks(k.parallel(self.nest.grid))
        passes = k.schedule.passes
        for step in range(passes + 1):
            self.row_values(step)
            if step < passes:
                self.one_pass(step)
        self.close_blocks()

    def open_blocks(self, clause: str | None) -> None:
        k = self.kernel
        outer = self.nest.grid[:-1]
        if clause:
            collapse = f" collapse({len(outer) + 1})" if outer else ""
            k.pragma(f"omp parallel for{collapse} schedule(static) {clause}")
        self.open_loops()

    def open_loops(self) -> None:
        k = self.kernel
        for axis in self.nest.grid[:-1]:
            k.loop(axis)
        block, size = k.schedule.block, k.size(self.vector)
        self.w(f"for (int64_t first = 0; first < {size}; first += {block}) {{")
        self.w.lines[-1] += "  // neighbours"
        self.w(f"const int64_t lanes = least({block}, {size} - first);")

    def close_blocks(self) -> None:
        for _ in self.nest.grid:
            self.w("}")

    def lanes(self, comment: str = "") -> None:
        self.kernel.pragma("omp simd")
        self.w("for (int64_t lane = 0; lane < lanes; ++lane) {")
        if comment:
            self.w.lines[-1] += f"  // {comment}"
        self.w(f"const int64_t {self.vector.name} = first + lane;")

    # values a lane

    def row_stores(self, step: int) -> list[Store]:
        return [
            s
            for s in self.nest.stores
            if not store_axes(self.nest, s) and self.facts.expression_wait(s.value) == step
        ]

    def later_roots(self, step: int) -> list[Expression]:
        roots: list[Expression] = [s.value for s in self.row_stores(step)]
        for later in range(step, self.kernel.schedule.passes):
            roots += self.pass_roots(later)
        return roots

    def row_values(self, step: int) -> None:
        stores = self.row_stores(step)
        ready = [
            x
            for x in self.kernel.needed(self.later_roots(step))
            if self.facts.waits[x.name] <= step
            and not self.facts.inner[x.name]
            and x.reduction is None
            and x.name not in self.done
        ]
        if not ready and not stores:
            return
        for x in ready:
            self.array(x)
            self.done.add(x.name)
        self.lanes()
        for x in ready:
            self.row_locals.add(x.name)
            self.w(f"{self.local(x.name)} = {self.names.expression(x.expression)};")
        for store in stores:
            self.kernel.store(store, self.names)
        self.w("}")

    def array(self, x: Local, suffix: str = "", ctype: str | None = None) -> None:
        block = self.kernel.schedule.block
        ctype = ctype or value_ctype(x.dtype)
        self.w(f"alignas(64) {ctype} {identifier(x.name)}{suffix}[{block}];")

    # a pass over the body

    def pass_sums(self, step: int) -> list[Local]:
        return [
            x
            for x in self.nest.locals.values()
            if x.role == "rowsum" and self.facts.waits[x.name] == step + 1
        ]

    def pass_stores(self, step: int) -> list[Store]:
        return [
            s
            for s in self.nest.stores
            if store_axes(self.nest, s) and self.facts.expression_wait(s.value) == step
        ]

    def pass_roots(self, step: int) -> list[Expression]:
        sums: list[Expression] = [x.expression for x in self.pass_sums(step)]
        return sums + [s.value for s in self.pass_stores(step)]

    def one_pass(self, step: int, bounds: tuple[str, str] | None = None) -> None:
        sums, stores = self.pass_sums(step), self.pass_stores(step)
        if not sums and not stores:
            return
        k = self.kernel
        for x in sums:
            self.array(x, "", accumulator(x).ctype)
            self.row_locals.add(x.name)
        last = self.nest.body[-1]
        size = static_size((last,))
        flushed = [x for x in sums if wide_sum(x) and (size is None or size > 2 * FLUSH)]
        for x in flushed:
            self.array(x, "_part")
            self.array(x, "_total", "double")
        self.reset([x for x in sums if x not in flushed], "")
        self.reset(flushed, "_total")
        *outer, _ = self.nest.body
        for axis in outer:
            chunked = bounds is not None and axis is self.nest.body[0]
            k.loop(axis, "", *(bounds if chunked and bounds else ("0", None)))
        low, high = bounds if bounds and not outer else ("0", k.size(last))
        if flushed:
            self.w(f"for (int64_t block = {low}; block < {high}; block += {FLUSH}) {{")
            self.reset(flushed, "_part")
            low, high = "block", f"least({high}, block + {FLUSH})"
        k.loop(last, f"pass {step + 1}" if k.schedule.passes > 1 else "", low, high)
        self.lanes()
        self.point(step, sums, stores, flushed)
        self.w("}")
        self.w("}")
        if flushed:
            self.lanes("short sums into long ones")
            for x in flushed:
                self.w(f"{identifier(x.name)}_total[lane] += {identifier(x.name)}_part[lane];")
            self.w("}")
            self.w("}")
        for _ in outer:
            self.w("}")
        if flushed:
            self.lanes()
            for x in flushed:
                self.w(f"{identifier(x.name)}[lane] = {identifier(x.name)}_total[lane];")
            self.w("}")

    def reset(self, sums: list[Local], suffix: str) -> None:
        if not sums:
            return
        self.kernel.pragma("omp simd")
        self.w("for (int64_t lane = 0; lane < lanes; ++lane) {")
        for x in sums:
            self.w(f"{identifier(x.name)}{suffix}[lane] = {accumulator(x).start};")
        self.w("}")

    def point(
        self, step: int, sums: list[Local], stores: list[Store], flushed: list[Local]
    ) -> None:
        for local in self.kernel.needed(self.pass_roots(step)):
            if local.reduction is None and self.facts.inner[local.name]:
                self.kernel.declare(local, self.names)
        for x in sums:
            name = identifier(x.name)
            target = f"{name}_part[lane]" if x in flushed else f"{name}[lane]"
            value = self.names.expression(x.expression)
            self.w(accumulator(x).step.format(target, value) + ";")
        for store in stores:
            self.kernel.store(store, self.names)

    # few grid points

    def write_split(self) -> None:
        k = self.kernel
        sums = self.pass_sums(0)
        rows, size = k.product(self.nest.grid), k.size(self.nest.body[0])
        clause = k.parallel(self.nest.grid)
        team = "1" if clause is None else clause.removeprefix("num_threads(")[:-1]
        self.w(f"const int team = {team};")
        for x in sums:
            name, ctype = identifier(x.name), accumulator(x).ctype
            self.w(f"{ctype}* {name}_parts = ({ctype}*)malloc(sizeof({ctype}) * team * ({rows}));")
        k.pragma("omp parallel for num_threads(team) schedule(static)")
        self.w("for (int64_t chunk = 0; chunk < team; ++chunk) {")
        self.w.lines[-1] += "  // a part of the body"
        self.w(f"const int64_t from = chunk * ({size}) / team, to = (chunk + 1) * ({size}) / team;")
        self.open_loops()
        self.row_values(0)
        self.one_pass(0, ("from", "to"))
        place = self.place()
        self.lanes()
        for x in sums:
            name = identifier(x.name)
            self.w(f"{name}_parts[chunk * ({rows}) + {place}] = {name}[lane];")
        self.w("}")
        self.close_blocks()
        self.w("}")
        self.open_loops()
        self.row_locals, self.done = set(), set()
        self.row_values(0)
        for x in sums:
            self.array(x, "", accumulator(x).ctype)
            self.row_locals.add(x.name)
        self.lanes("the parts together")
        for x in sums:
            a, name = accumulator(x), identifier(x.name)
            self.w(f"{name}[lane] = {name}_parts[{place}];")
            step = a.step.format(f"{name}[lane]", f"{name}_parts[t * ({rows}) + {place}]")
            self.w(f"for (int t = 1; t < team; ++t) {step};")
        self.w("}")
        self.row_values(1)
        self.close_blocks()
        for x in sums:
            self.w(f"free({identifier(x.name)}_parts);")

    def place(self) -> str:
        text = ""
        for axis in self.nest.grid:
            text = f"({text}) * ({self.kernel.size(axis)}) + {axis.name}" if text else axis.name
        return text
