"""C++ of pointwise and row kernels: threads share the grid, passes walk the body, SIMD inside.

for each row (shared among threads)
  pass 1: its reductions   →   row values   →   pass 2: what needs them, stores
large results of a pass are collected in a block and go past the caches; while the dearest pass
works on a row, the next row is fetched. Sums over the grid are kept a thread (`cpp_grid`); few long
rows are shared among threads (`cpp_shared`).
"""

from __future__ import annotations

from fulgurite.fuser.codegen.cpp.expressions import Names, identifier, storage_type, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import SUM_BLOCK, Kernel, accumulator, static_size, wide_sum
from fulgurite.fuser.codegen.cpp.names import BufferNames, divisors
from fulgurite.fuser.ir.expression import NARROW_FLOATS, Expression, Load
from fulgurite.fuser.ir.index import ONE, ZERO, Axis, of_atom
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.cpu.base import store_axes
from fulgurite.fuser.schedule.cpu.memory_traffic import contiguous_loads, unguarded

BLOCK = 512  # elements of a result that are collected before they go past the caches
INVERSE_POINTS = 64  # divisions by one number that are worth its inverse


class Rows:
    """The text of a row kernel, from the outside in."""

    bounds: tuple[str, str] | None = None  # of the first body loop, where threads share it

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.nest = kernel.nest
        self.facts = kernel.facts
        self.schedule = kernel.schedule
        self.w = kernel.write
        self.names = BufferNames(identifier)
        locals_ = self.nest.locals.values()
        self.scalars = [x for x in locals_ if x.role == "scalar"]
        self.kept = set(kernel.schedule.kept)
        self.row_done: set[str] = set()
        self.roots = [self.pass_roots(step) for step in range(self.schedule.passes)]

    def write(self) -> None:
        k = self.kernel
        clause = k.parallel(self.nest.grid)
        if clause and not self.schedule.inner_parallel and self.nest.grid:
            collapse = f" collapse({len(self.nest.grid)})" if len(self.nest.grid) > 1 else ""
            k.pragma(f"omp parallel for{collapse} schedule(static) {clause}")
        self.grid_loops(clause if self.schedule.inner_parallel else None)

    def grid_loops(self, inner_clause: str | None = None) -> None:
        for axis in self.nest.grid:
            self.kernel.loop(axis)
        self.row(inner_clause)
        for _ in self.nest.grid:
            self.w("}")

    def row(self, inner_clause: str | None) -> None:
        """One row: its values and passes, in turn."""
        for name in self.schedule.kept:
            local = self.nest.locals[name]
            points = static_size(self.nest.body)
            ctype = value_ctype(local.dtype)
            self.w(f"alignas(64) {ctype} {identifier(name)}_row[{points}];  // for the next pass")
        for step in range(self.schedule.passes + 1):
            self.row_values(step)
            self.row_inverses(step)
            if step == 0:
                self.look_up()
            if step < self.schedule.passes:
                self.one_pass(step, inner_clause)

    def look_up(self) -> None:
        """Gathered positions that are the same along the row, once a row."""
        roots = [root for step in range(self.schedule.passes) for root in self.pass_roots(step)]
        roots += [x.expression for x in self.kernel.needed(roots) if self.facts.inner[x.name]]
        for part in (part for root in roots for part in unguarded(root)):
            for atom in part.index[0].loaded() if isinstance(part, Load) and part.index else ():
                known = all(x.name in self.row_done for x in self.nest.references(atom.value))
                if known and not atom.value.axes() & set(self.nest.body):
                    if atom not in self.names.gathered:
                        name = f"place{len(self.names.gathered) + 1}_"
                        self.w(f"const int64_t {name} = {self.names.lookup(atom)};")
                        self.names.gathered[atom] = name

    # values of a row

    def row_values(self, step: int) -> None:
        """Row locals and row stores that are ready after `step` passes."""
        stores = [
            s
            for s in self.nest.stores
            if not store_axes(self.nest, s)
            and not self.facts.expression_after(s.value)
            and not self.facts.expression_inner(s.value)
            and self.facts.expression_wait(s.value) == step
        ]
        sums = [x for x in self.scalars if not x.over_body and self.facts.waits[x.name] == step]
        roots: list[Expression] = [s.value for s in stores] + [x.expression for x in sums]
        for later in range(step, self.schedule.passes):
            roots += list(self.pass_roots(later))
        for local in self.kernel.needed(roots):
            ready = self.facts.waits[local.name] <= step and not self.facts.inner[local.name]
            if ready and local.reduction is None and local.name not in self.row_done:
                self.kernel.declare(local, self.names)
                self.row_done.add(local.name)
        self.row_stores(stores)
        for x in sums:
            value = self.names.expression(x.expression)
            self.w(accumulator(x).step.format(f"{identifier(x.name)}_part", value) + ";")

    def row_stores(self, stores: list[Store]) -> None:
        for store in stores:
            self.kernel.store(store, self.names)

    def row_inverses(self, step: int) -> None:
        """Inverses of row values that every point of a later pass is divided by."""
        points = static_size(self.nest.body)
        if points is not None and points < INVERSE_POINTS:
            return
        expressions: list[Expression] = []
        for later in range(step, self.schedule.passes):
            expressions += self.pass_roots(later)
            expressions += [x.expression for x in self.body_values(later)]
        for name in divisors(expressions):
            ready = self.facts.waits[name] <= step and not self.facts.after[name]
            if ready and not self.facts.inner[name] and name not in self.names.inverses:
                text = identifier(name)
                self.w(f"const Inverse {text}_inverse = inverse({text});")
                self.names.inverses[name] = f"{text}_inverse"

    # a pass over the body

    def pass_locals(self, step: int) -> tuple[list[Local], list[Local], list[Local], list[Store]]:
        rowsums, colsums, scalars = [], [], []
        for x in self.nest.locals.values():
            if x.role == "rowsum" and self.facts.waits[x.name] == step + 1:
                rowsums.append(x)
            elif x.role == "colsum" and self.facts.waits[x.name] == step:
                colsums.append(x)
            elif x.role == "scalar" and self.facts.waits[x.name] == step:
                if x.over_body:
                    scalars.append(x)
        stores = [
            s
            for s in self.nest.stores
            if store_axes(self.nest, s)
            and not self.facts.expression_after(s.value)
            and self.facts.expression_wait(s.value) == step
        ]
        return rowsums, colsums, scalars, stores

    def pass_roots(self, step: int) -> list[Expression]:
        rowsums, colsums, scalars, stores = self.pass_locals(step)
        roots = [x.expression for x in (*rowsums, *colsums, *scalars)]
        return roots + [s.value for s in stores]

    def one_pass(self, step: int, inner_clause: str | None = None) -> None:
        rowsums, colsums, scalars, stores = self.pass_locals(step)
        if not (rowsums or colsums or scalars or stores):
            return
        running = [*rowsums, *scalars]
        wide = [x for x in running if wide_sum(x)] if self.in_parts() else []
        for x in running:
            if x in wide:
                self.w(f"double {identifier(x.name)}_total = 0;")
            else:
                self.w(f"{accumulator(x).ctype} {self.running(x)} = {accumulator(x).start};")
        if not self.nest.body:
            self.point(step, [])
        else:
            self.body_loops(step, running, wide, inner_clause)
        for x in rowsums:
            self.finish_rowsum(x, x in wide)
        for x in scalars:
            name = identifier(x.name)
            value = f"{name}_total" if x in wide else self.running(x)
            self.w(accumulator(x).step.format(f"{name}_part", value) + ";")

    def in_parts(self) -> bool:
        """Is the body too long to sum its floats in one go?"""
        size = static_size(self.nest.body[-1:])
        return len(self.nest.body) > 1 or size is None or size > 2 * SUM_BLOCK

    def finish_rowsum(self, x: Local, wide: bool) -> None:
        if wide:
            name = identifier(x.name)
            self.w(f"const {value_ctype(x.dtype)} {name} = {name}_total;")

    def running(self, x: Local) -> str:
        """The accumulator inside a pass."""
        return f"{identifier(x.name)}_row" if x.role == "scalar" else identifier(x.name)

    def part(self, x: Local) -> str:
        return f"{identifier(x.name)}_some"

    def body_loops(
        self, step: int, running: list[Local], wide: list[Local], inner_clause: str | None
    ) -> None:
        k = self.kernel
        *outer, vector = self.nest.body
        label = f"pass {step + 1}" if self.schedule.passes > 1 else ""
        for axis in outer:
            chunked = self.bounds if axis is self.nest.body[0] and self.bounds else ("0", None)
            k.loop(axis, label, *chunked)
        low, high = self.bounds if self.bounds and not outer else ("0", k.size(vector))
        block = self.block_size(step, wide)
        start, end, count = low, high, k.size(vector)
        if block:
            whole = (static_size((vector,)) or 1) % block == 0 and low == "0"
            if inner_clause:
                k.pragma(f"omp parallel for schedule(static) {inner_clause}")
                inner_clause = None
            self.w(f"for (int64_t block = {low}; block < {high}; block += {block}) {{")
            start, end = "block", f"block + {block}" if whole else f"least({high}, block + {block})"
            count = str(block) if whole else f"least({block}, {high} - block)"
        if self.schedule.fetches == step:
            self.fetch(start, count)
        streams = self.streams(step)
        for store in streams:
            ctype = storage_type(store.tensor.dtype)
            length = block or static_size((vector,))
            self.w(f"alignas(64) {ctype} {self.collected(store)}[{length}];")
        for x in wide:
            self.w(f"{value_ctype(x.dtype)} {self.part(x)} = 0;")
        clauses = "".join(
            f" reduction({accumulator(x).clause}:{self.part(x) if x in wide else self.running(x)})"
            for x in running
        )
        shared = f"parallel for simd schedule(static) {inner_clause}" if inner_clause else "simd"
        k.pragma(f"omp {shared}{clauses}")
        k.loop(vector, label, start, end)
        self.point(step, wide, start)
        self.w("}")
        for x in wide:
            self.w(f"{identifier(x.name)}_total += {self.part(x)};")
        for store in streams:
            place = Names(identifier, {vector: start}).index(store.index).removesuffix(" + 0")
            target = f"{k.target(store.tensor.name)} + {place}"
            self.w(f"stream({target}, {self.collected(store)}, {count});")
        for _ in range(len(outer) + bool(block)):
            self.w("}")

    def block_size(self, step: int, wide: list[Local]) -> int | None:
        """Steps of the innermost loop that are done together."""
        size = static_size(self.nest.body[-1:])
        if self.schedule.fetches == step or self.streams(step):
            return BLOCK if size is None or size > BLOCK or self.bounds else None
        return SUM_BLOCK if wide and (size is None or size > 2 * SUM_BLOCK) else None

    def streams(self, step: int) -> list[Store]:
        """Stores of a pass that go past the caches."""
        stores = self.pass_locals(step)[3]
        return [s for s in stores if s.tensor.name in self.schedule.streamed]

    def collected(self, store: Store) -> str:
        return f"{identifier(store.tensor.name)}_block"

    def fetch(self, start: str, count: str) -> None:
        """Asks for the same part of the next row."""
        vector, row = self.nest.body[-1], self.nest.grid[-1]
        found: dict[str, Load] = {}
        for load in contiguous_loads(self.nest, vector, row):
            found.setdefault(load.name, load)
        for name, load in found.items():
            index = load.index[0].substitute({row: of_atom(row) + ONE})
            if start == "0":
                index = index.substitute({vector: ZERO})
            place = Names(identifier, {vector: start}).index(index)
            self.w(f"fetch({identifier(name)} + {place}, {count});  // of the next row")

    # one point

    def point(self, step: int, wide: list[Local], start: str = "0") -> None:
        k = self.kernel
        rowsums, colsums, scalars, stores = self.pass_locals(step)
        place = self.place()
        for local in self.body_values(step):
            name = identifier(local.name)
            if local.name in self.kernel.kept_before(self.roots, step):
                self.w(f"const {value_ctype(local.dtype)} {name} = {name}_row[{place}];")
                continue
            k.declare(local, self.names)
            if local.name in self.kept:
                self.w(f"{name}_row[{place}] = {name};")
        for x in (*rowsums, *scalars):
            target = self.part(x) if x in wide else self.running(x)
            value = self.names.expression(x.expression)
            self.w(accumulator(x).step.format(target, value) + ";")
        for x in colsums:
            value = self.names.expression(x.expression)
            self.w(accumulator(x).step.format(f"{identifier(x.name)}_part[{place}]", value) + ";")
        streams = self.streams(step)
        for store in stores:
            if store in streams:
                self.collect(store, start)
            else:
                k.store(store, self.names)

    def collect(self, store: Store, start: str) -> None:
        """A value for the block that goes past the caches."""
        vector = self.nest.body[-1].name
        place = vector if start == "0" else f"{vector} - {start}"
        value = self.names.expression(store.value)
        if store.tensor.dtype in NARROW_FLOATS:
            where = place if start == "0" else f"({place})"
            self.w(f"store({self.collected(store)} + {where}, {value});")
        else:
            self.w(f"{self.collected(store)}[{place}] = {value};")

    def body_values(self, step: int) -> list[Local]:
        return self.kernel.body_values(self.roots, step)

    def place(self) -> str:
        """The body point as one number."""
        return place_of(self.nest.body, self.kernel)


def held_type(x: Local) -> str:
    """The type of long sums: double for floats, so that millions of addends stay exact enough."""
    return "double" if wide_sum(x) else accumulator(x).ctype


def team_size(clause: str | None) -> str:
    if clause is None:
        return "1"
    return clause.removeprefix("num_threads(")[:-1]


def place_of(axes: tuple[Axis, ...], kernel: Kernel) -> str:
    text = ""
    for axis in axes:
        text = f"({text}) * ({kernel.size(axis)}) + {axis.name}" if text else axis.name
    return text or "0"
