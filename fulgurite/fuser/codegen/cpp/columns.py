"""C++ of column kernels: a block of neighbouring grid points at once, each lane its own reduction.

for each block of lanes (shared among threads)
  for each body point: every lane takes in its element   (contiguous across lanes)
  row values a lane, then the next pass, which finds what it reads again in a buffer
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.expressions import Names, identifier, storage_type, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import Kernel, accumulator, static_size, wide_sum
from fulgurite.fuser.codegen.cpp.names import BufferNames
from fulgurite.fuser.codegen.cpp.rows import place_of
from fulgurite.fuser.ir.expression import NARROW_FLOATS, Expression
from fulgurite.fuser.ir.index import Axis, of, of_atom
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.cpu.base import store_axes
from fulgurite.fuser.schedule.cpu.columns import kept_loads

FLUSH = 128  # addends of one lane summed before they go to its total
GROUP = 4  # body points at once: so many streams keep memory busier than one
AHEAD = 16  # body points between what is fetched and what is computed


class Columns:
    """The text of one kernel; row values are arrays over the lanes."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.nest = kernel.nest
        self.facts = kernel.facts
        self.w = kernel.write
        self.vector: Axis = self.nest.grid[-1]
        self.row_locals: set[str] = set()
        self.names = BufferNames(self.local)
        self.done: set[str] = set()
        self.block = kernel.schedule.block
        self.roots = [self.pass_roots(step) for step in range(kernel.schedule.passes)]
        loads = kept_loads(self.nest, self.roots, kernel.schedule.kept)
        self.packed = loads if kernel.schedule.packed else []

    def local(self, name: str) -> str:
        """Row values live in arrays over the lanes."""
        text = identifier(name)
        return f"{text}[lane]" if name in self.row_locals else text

    def write(self) -> None:
        k = self.kernel
        self.open_blocks(k.parallel(self.nest.grid))
        self.open_buffers()
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
        block, size = self.block, k.size(self.vector)
        self.w(f"for (int64_t first = 0; first < {size}; first += {block}) {{")
        self.w.lines[-1] += "  // neighbours"
        whole = (static_size((self.vector,)) or 1) % block == 0
        self.w(f"const int64_t lanes = {block if whole else f'least({block}, {size} - first)'};")

    def open_buffers(self) -> None:
        """Room for what the next pass finds again."""
        points = static_size(self.nest.body)
        for load in self.packed:
            ctype = storage_type(load.dtype)
            self.w(f"alignas(64) {ctype} {self.buffer(load.name)}[{points}][{self.block}];")
        for name in self.kernel.schedule.kept:
            ctype = value_ctype(self.nest.locals[name].dtype)
            self.w(f"alignas(64) {ctype} {self.buffer(name)}[{points}][{self.block}];")

    def buffer(self, name: str) -> str:
        return f"{identifier(name)}_kept"

    def kept_at(self) -> str:
        return f"[{place_of(self.nest.body, self.kernel)}][lane]"

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
        ctype = ctype or value_ctype(x.dtype)
        self.w(f"alignas(64) {ctype} {identifier(x.name)}{suffix}[{self.block}];")

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
        if bounds and size is not None and size % GROUP == 0 and not outer:
            self.grouped(step, sums, flushed, low, high)
        else:
            k.loop(last, f"pass {step + 1}" if k.schedule.passes > 1 else "", low, high)
            self.fetch(step)
            self.open_streams(stores)
            self.lanes()
            self.point(step, sums, stores, flushed)
            self.w("}")
            self.close_streams(stores)
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

    def grouped(
        self, step: int, sums: list[Local], flushed: list[Local], low: str, high: str
    ) -> None:
        """The innermost body loop, a few points at once."""
        self.w(f"for (int64_t group = {low}; group < {high}; group += {GROUP}) {{")
        self.lanes()
        self.kernel.pragma(f"GCC unroll {GROUP}")
        self.kernel.loop(self.nest.body[-1], "", "group", f"group + {GROUP}")
        self.point(step, sums, [], flushed)
        for _ in range(3):
            self.w("}")

    def fetch(self, step: int) -> None:
        """Asks for what the first pass reads a few body points later."""
        if step == 0 and self.packed:
            ahead = {self.nest.body[-1]: of_atom(self.nest.body[-1]) + of(AHEAD)}
            for load in self.packed:
                index = load.index[0].substitute(ahead)
                place = Names(identifier, {self.vector: "first"}).index(index)
                self.w(f"fetch({identifier(load.name)} + {place}, lanes);")

    # results that go past the caches

    def streams(self, stores: list[Store]) -> list[Store]:
        return [s for s in stores if s.tensor.name in self.kernel.schedule.streamed]

    def open_streams(self, stores: list[Store]) -> None:
        for store in self.streams(stores):
            ctype = storage_type(store.tensor.dtype)
            self.w(f"alignas(64) {ctype} {identifier(store.tensor.name)}_block[{self.block}];")

    def close_streams(self, stores: list[Store]) -> None:
        for store in self.streams(stores):
            name = identifier(store.tensor.name)
            place = Names(identifier, {self.vector: "first"}).index(store.index)
            target = self.kernel.target(store.tensor.name)
            self.w(f"stream({target} + {place}, {name}_block, lanes);")

    def collect(self, store: Store) -> None:
        name, value = f"{identifier(store.tensor.name)}_block", self.names.expression(store.value)
        narrow = store.tensor.dtype in NARROW_FLOATS
        self.w(f"store({name} + lane, {value});" if narrow else f"{name}[lane] = {value};")

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
        self.pack(step)
        before = self.kernel.kept_before(self.roots, step)
        for local in self.kernel.body_values(self.roots, step):
            buffer, name = self.buffer(local.name) + self.kept_at(), identifier(local.name)
            if local.name in before:
                self.w(f"const {value_ctype(local.dtype)} {name} = {buffer};")
                continue
            self.kernel.declare(local, self.names)
            if local.name in self.kernel.schedule.kept:
                self.w(f"{buffer} = {name};")
        for x in sums:
            name = identifier(x.name)
            target = f"{name}_part[lane]" if x in flushed else f"{name}[lane]"
            value = self.names.expression(x.expression)
            self.w(accumulator(x).step.format(target, value) + ";")
        for store in stores:
            if store in self.streams(stores):
                self.collect(store)
            else:
                self.kernel.store(store, self.names)

    def pack(self, step: int) -> None:
        """The first pass puts what it reads where the next ones find it."""
        for load in self.packed if step == 0 else ():
            place = self.buffer(load.name) + self.kept_at()
            memory = f"{identifier(load.name)}[{self.names.index(load.index[0])}]"
            self.w(f"{place} = {memory};")
            self.names.buffers[load] = place
