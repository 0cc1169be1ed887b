"""C++ of pointwise and row kernels: threads share the grid, passes walk the body, SIMD inside.

for each row (shared among threads)
  pass 1: its reductions   →   row values   →   pass 2: what needs them, stores
sums over the grid are kept a thread, and combined at the end
"""

from __future__ import annotations

from collections.abc import Iterator

from ..index import Axis
from ..ir import Expression, Guard, Load
from ..nest import Local, Store
from ..schedule.base import store_axes
from .cpp_expressions import Names, identifier, value_ctype
from .cpp_kernel import SUM_BLOCK, Kernel, accumulator, static_size, wide_sum

FLUSH_ROWS = 64  # rows summed in float before they go to the thread's total


def write_rows(kernel: Kernel) -> None:
    kernel.open()
    if kernel.schedule.split:
        _Split(kernel).write()
    else:
        _Rows(kernel).write()
    kernel.close()


class _Rows:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.nest = kernel.nest
        self.facts = kernel.facts
        self.w = kernel.write
        self.names = Names(identifier)
        locals_ = self.nest.locals.values()
        self.over_grid = [x for x in locals_ if x.role in ("colsum", "scalar")]
        self.colsums = [x for x in self.over_grid if x.role == "colsum"]
        self.scalars = [x for x in self.over_grid if x.role == "scalar"]
        self.kept = set(kernel.schedule.kept)
        self.row_done: set[str] = set()

    # the whole

    def write(self) -> None:
        k, schedule = self.kernel, self.kernel.schedule
        clause = k.parallel(self.nest.grid)
        if self.over_grid:
            self.open_team(clause)
        elif clause and not schedule.inner_parallel and self.nest.grid:
            collapse = f" collapse({len(self.nest.grid)})" if len(self.nest.grid) > 1 else ""
            k.pragma(f"omp parallel for{collapse} schedule(static) {clause}")
        for axis in self.nest.grid:
            k.loop(axis)
        self.rows(clause if schedule.inner_parallel else None)
        if self.colsums:
            self.flush()
        for _ in self.nest.grid:
            self.w("}")
        if self.over_grid:
            self.close_team()

    def rows(self, inner_clause: str | None) -> None:
        """One row: its values and passes, in turn."""
        for name in self.kernel.schedule.kept:
            local = self.nest.locals[name]
            points = static_size(self.nest.body)
            ctype = value_ctype(local.dtype)
            self.w(f"alignas(64) {ctype} {identifier(name)}_row[{points}];  // for the next pass")
        passes = self.kernel.schedule.passes
        for step in range(passes + 1):
            self.row_values(step)
            if step == 0:
                self.look_up()
            if step < passes:
                self.one_pass(step, inner_clause)

    def look_up(self) -> None:
        """Gathered positions that are the same along the row, once a row."""
        roots = [
            root for step in range(self.kernel.schedule.passes) for root in self.pass_roots(step)
        ]
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
        for later in range(step, self.kernel.schedule.passes):
            roots += list(self.pass_roots(later))
        for local in self.kernel.needed(roots):
            ready = self.facts.waits[local.name] <= step and not self.facts.inner[local.name]
            if ready and local.reduction is None and local.name not in self.row_done:
                self.kernel.declare(local, self.names)
                self.row_done.add(local.name)
        for store in stores:
            self.kernel.store(store, self.names)
        for x in sums:
            value = self.names.expression(x.expression)
            self.w(accumulator(x).step.format(f"{identifier(x.name)}_part", value) + ";")

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

    def blocked(self) -> bool:
        """Is the innermost loop too long to sum in one go?"""
        size = static_size(self.nest.body[-1:])
        return size is None or size > 2 * SUM_BLOCK

    def one_pass(self, step: int, inner_clause: str | None) -> None:
        rowsums, colsums, scalars, stores = self.pass_locals(step)
        if not (rowsums or colsums or scalars or stores):
            return
        running = [*rowsums, *scalars]
        many = len(self.nest.body) > 1 or (self.blocked() and any(wide_sum(x) for x in running))
        for x in running:
            start = accumulator(x)
            name = identifier(x.name)
            if many and wide_sum(x):
                self.w(f"double {name}_total = 0;")
            else:
                self.w(f"{start.ctype} {self.running(x)} = {start.start};")
        if not self.nest.body:
            self.point(step, rowsums, colsums, scalars, stores)
        else:
            self.body_loops(step, running, many, inner_clause)
        for x in rowsums:
            name = identifier(x.name)
            if many and wide_sum(x):
                self.w(f"const {value_ctype(x.dtype)} {name} = {name}_total;")
        for x in scalars:
            name = identifier(x.name)
            value = f"{name}_total" if many and wide_sum(x) else self.running(x)
            self.w(accumulator(x).step.format(f"{name}_part", value) + ";")

    def running(self, x: Local) -> str:
        """The accumulator inside a pass."""
        return f"{identifier(x.name)}_row" if x.role == "scalar" else identifier(x.name)

    def body_loops(
        self, step: int, running: list[Local], many: bool, inner_clause: str | None
    ) -> None:
        k = self.kernel
        *outer, vector = self.nest.body
        label = f"pass {step + 1}" if k.schedule.passes > 1 else ""
        for axis in outer:
            k.loop(axis, label)
        wide = [x for x in running if many and wide_sum(x)]
        blocks = bool(wide) and self.blocked()
        size = k.size(vector)
        if blocks:
            self.w(f"for (int64_t block = 0; block < {size}; block += {SUM_BLOCK}) {{")
            self.w.lines[-1] += "  // summed in float, then in double"
        for x in wide:
            self.w(f"{value_ctype(x.dtype)} {self.part(x)} = 0;")
        clauses = ""
        for x in running:
            name = self.part(x) if x in wide else self.running(x)
            clauses += f" reduction({accumulator(x).clause}:{name})"
        if inner_clause:
            k.pragma(f"omp parallel for simd schedule(static) {inner_clause}{clauses}")
        else:
            k.pragma(f"omp simd{clauses}")
        if blocks:
            k.loop(vector, label, "block", f"least({size}, block + {SUM_BLOCK})")
        else:
            k.loop(vector, label)
        self.point(step, *self.pass_locals(step), wide=wide)
        self.w("}")
        for x in wide:
            self.w(f"{identifier(x.name)}_total += {self.part(x)};")
        if blocks:
            self.w("}")
        for _ in outer:
            self.w("}")

    def part(self, x: Local) -> str:
        return f"{identifier(x.name)}_some"

    def point(
        self,
        step: int,
        rowsums: list[Local],
        colsums: list[Local],
        scalars: list[Local],
        stores: list[Store],
        wide: list[Local] | None = None,
    ) -> None:
        """One point of the body."""
        k = self.kernel
        place = self.place()
        for local in self.body_values(step):
            name = identifier(local.name)
            if name in self.kept_before(step):
                self.w(f"const {value_ctype(local.dtype)} {name} = {name}_row[{place}];")
                continue
            k.declare(local, self.names)
            if local.name in self.kept:
                self.w(f"{name}_row[{place}] = {name};")
        for x in (*rowsums, *scalars):
            target = self.part(x) if wide and x in wide else self.running(x)
            value = self.names.expression(x.expression)
            self.w(accumulator(x).step.format(target, value) + ";")
        for x in colsums:
            value = self.names.expression(x.expression)
            self.w(accumulator(x).step.format(f"{identifier(x.name)}_part[{place}]", value) + ";")
        for store in stores:
            k.store(store, self.names)

    def kept_before(self, step: int) -> set[str]:
        found: set[str] = set()
        for earlier in range(step):
            for local in self.kernel.needed(self.pass_roots(earlier)):
                if local.name in self.kept:
                    found.add(identifier(local.name))
        return found

    def body_values(self, step: int) -> list[Local]:
        """Locals that a pass computes at each point, without those only a kept value needed."""
        kept = {n for n in self.kept if identifier(n) in self.kept_before(step)}
        order = self.kernel.needed(self.pass_roots(step))
        wanted: set[str] = set()
        for root in self.pass_roots(step):
            wanted.update(x.name for x in self.nest.references(root))
        for local in reversed(order):
            if local.name in wanted and local.name not in kept and local.reduction is None:
                wanted.update(x.name for x in self.nest.references(local.expression))
        return [
            x
            for x in order
            if x.name in wanted and x.reduction is None and self.facts.inner[x.name]
        ]

    def place(self) -> str:
        """The body point as one number."""
        return place_of(self.nest.body, self.kernel)

    # sums over the grid

    def open_team(self, clause: str | None) -> None:
        k = self.kernel
        body = k.product(self.nest.body)
        self.w(f"const int team = {_team(clause)};")
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
        done: set[str] = set()
        for local in self.kernel.needed([s.value for s in late]):
            if not self.facts.inner[local.name] and local.reduction is None:
                self.kernel.declare(local, self.names)
                done.add(local.name)
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


def held_type(x: Local) -> str:
    """The type of long sums: double for floats, so that millions of addends stay exact enough."""
    return "double" if wide_sum(x) else accumulator(x).ctype


def unguarded(expression: Expression) -> Iterator[Expression]:
    """The parts of an expression that are evaluated at every point."""
    yield expression
    if not isinstance(expression, Guard):
        for part in expression.parts():
            yield from unguarded(part)


def _team(clause: str | None) -> str:
    if clause is None:
        return "1"
    return clause.removeprefix("num_threads(")[:-1]


def place_of(axes: tuple[Axis, ...], kernel: Kernel) -> str:
    text = ""
    for axis in axes:
        text = f"({text}) * ({kernel.size(axis)}) + {axis.name}" if text else axis.name
    return text or "0"


class _Split(_Rows):
    """Few rows: each thread reduces a part of every row, then the parts are combined."""

    def write(self) -> None:
        k = self.kernel
        sums = [x for x in self.nest.locals.values() if x.role == "rowsum"]
        rows = k.product(self.nest.grid)
        first = self.nest.body[0]
        self.w(f"const int team = {_team(k.parallel(self.nest.grid))};")
        for x in sums:
            name, held = identifier(x.name), held_type(x)
            self.w(f"{held}* {name}_parts = ({held}*)malloc(sizeof({held}) * team * ({rows}));")
        k.pragma("omp parallel for num_threads(team) schedule(static)")
        self.w("for (int64_t chunk = 0; chunk < team; ++chunk) {")
        self.w.lines[-1] += "  // a part of every row"
        size = k.size(first)
        self.w(f"const int64_t from = chunk * ({size}) / team, to = (chunk + 1) * ({size}) / team;")
        for axis in self.nest.grid:
            k.loop(axis)
        self.row_values(0)
        self.chunk(sums)
        place = place_of(self.nest.grid, k)
        for x in sums:
            name = identifier(x.name)
            value = f"{name}_total" if wide_sum(x) else name
            self.w(f"{name}_parts[chunk * ({rows}) + {place}] = {value};")
        for _ in self.nest.grid:
            self.w("}")
        self.w("}")
        self.combine(sums, rows, place)

    def chunk(self, sums: list[Local]) -> None:
        k = self.kernel
        for x in sums:
            a, name = accumulator(x), identifier(x.name)
            start = f"double {name}_total = 0;"
            self.w(start if wide_sum(x) else f"{a.ctype} {name} = {a.start};")
        *outer, vector = self.nest.body
        for axis in outer:
            chunked = axis is self.nest.body[0]
            k.loop(axis, "", "from" if chunked else "0", "to" if chunked else None)
        low, high = ("0", k.size(vector)) if outer else ("from", "to")
        wide = [x for x in sums if wide_sum(x)]
        self.w(f"for (int64_t block = {low}; block < {high}; block += {SUM_BLOCK}) {{")
        for x in wide:
            self.w(f"{value_ctype(x.dtype)} {self.part(x)} = 0;")
        clauses = ""
        for x in sums:
            name = self.part(x) if x in wide else identifier(x.name)
            clauses += f" reduction({accumulator(x).clause}:{name})"
        k.pragma(f"omp simd{clauses}")
        k.loop(vector, "", "block", f"least({high}, block + {SUM_BLOCK})")
        self.point(0, sums, [], [], [], wide=wide)
        self.w("}")
        for x in wide:
            self.w(f"{identifier(x.name)}_total += {self.part(x)};")
        self.w("}")
        for _ in outer:
            self.w("}")

    def combine(self, sums: list[Local], rows: str, place: str) -> None:
        k = self.kernel
        for axis in self.nest.grid:
            k.loop(axis, "the parts together")
        for x in sums:
            a, name = accumulator(x), identifier(x.name)
            self.w(f"{held_type(x)} {name}_all = {name}_parts[{place}];")
            step = a.step.format(f"{name}_all", f"{name}_parts[t * ({rows}) + {place}]")
            self.w(f"for (int t = 1; t < team; ++t) {step};")
            self.w(f"const {value_ctype(x.dtype)} {name} = {name}_all;")
        self.row_done = set()
        self.row_values(0)
        self.row_values(1)
        for _ in self.nest.grid:
            self.w("}")
        for x in sums:
            self.w(f"free({identifier(x.name)}_parts);")
