"""C++ of scanning kernels: one walk along the body, accumulators that run with it.

along the row       for each row (shared among threads): accumulate, store, accumulate, store …
across the rows     for each block of neighbours: the body outside, the block inside, SIMD
few rows            each thread collects its part of a row   →   what came before   →   scans its part
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.fuser.codegen.cpp.expressions import Names, identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import Kernel
from fulgurite.fuser.ir.loop_nest import Local
from fulgurite.fuser.schedule.cpu.base import needed
from fulgurite.fuser.schedule.cpu.scan import independent, scans_of

CLAUSES = {"sum": "+", "prod": "*", "max": "nan_max", "min": "nan_min"}


@dataclass(frozen=True)
class Running:
    """How a scan's accumulator is written; floats run in double, as torch's do."""

    local: Local

    @property
    def ctype(self) -> str:
        kinds = ("sum", "prod", "logsumexp")
        floating = self.local.dtype.is_floating_point and self.local.reduction in kinds
        return "double" if floating else value_ctype(self.local.dtype)

    @property
    def start(self) -> str:
        fixed = {"sum": "0", "prod": "1"}
        least = "highest" if self.local.reduction == "min" else "lowest"
        return fixed.get(str(self.local.reduction), f"{least}<{self.ctype}>()")

    def step(self, total: str, value: str) -> str:
        kind = self.local.reduction
        if kind in ("sum", "prod"):
            return f"{total} {'+' if kind == 'sum' else '*'}= {value};"
        function = {"max": "nan_max", "min": "nan_min", "logsumexp": "log_add_exp"}[str(kind)]
        return f"{total} = {function}({total}, ({self.ctype}){value});"


def write_scan(kernel: Kernel) -> None:
    kernel.open()
    if kernel.schedule.split:
        _Parts(kernel).write()
    elif kernel.schedule.block:
        _Across(kernel).write()
    else:
        _Along(kernel).write()
    kernel.close()


class _Scan:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.nest, self.w = kernel, kernel.nest, kernel.write
        self.names = Names(identifier)
        self.scans = [Running(local) for local in scans_of(self.nest)]
        (self.body,) = self.nest.body

    def total(self, scan: Running) -> str:
        """The accumulator at a point."""
        return f"{identifier(scan.local.name)}_all"

    def values(self, roots: list, done: set[str]) -> None:  # type: ignore[type-arg]
        """Declares the locals that expressions need, scans aside."""
        for local in needed(self.nest, roots):
            if local.role != "scan" and local.name not in done:
                self.kernel.declare(local, self.names)
                done.add(local.name)

    def accumulate(self, scan: Running, done: set[str]) -> None:
        self.values([scan.local.expression], done)
        value = self.names.expression(scan.local.expression)
        self.w(scan.step(self.total(scan), value))

    def publish(self, scan: Running) -> None:
        """The value of the scan at this point."""
        ctype, name = value_ctype(scan.local.dtype), identifier(scan.local.name)
        self.w(f"const {ctype} {name} = ({ctype}){self.total(scan)};")

    def stores(self, done: set[str]) -> None:
        self.values([store.value for store in self.nest.stores], done)
        for store in self.nest.stores:
            self.kernel.store(store, self.names)

    def point(self) -> None:
        """One point: every scan takes a step, in order, then results are stored."""
        done: set[str] = set()
        for scan in self.scans:
            self.accumulate(scan, done)
            self.publish(scan)
        self.stores(done)

    def start(self, scan: Running) -> None:
        self.w(f"{scan.ctype} {self.total(scan)} = {scan.start};")

    def walk(self, low: str = "0", high: str | None = None) -> None:
        """The whole walk along a row, as SIMD where no scan needs another and OpenMP has its operation."""
        k = self.kernel
        clauses = [CLAUSES.get(str(scan.local.reduction)) for scan in self.scans]
        if not (independent(self.nest) and all(clauses)):
            k.loop(self.body, "", low, high)
            self.point()
            self.w("}")
            return
        totals = ", ".join(self.total(scan) for scan in self.scans)
        each = [f"reduction(inscan, {c}:{self.total(s)})" for c, s in zip(clauses, self.scans)]
        k.pragma(f"omp simd {' '.join(each)}")
        k.loop(self.body, "", low, high)
        done: set[str] = set()
        for scan in self.scans:
            self.accumulate(scan, done)
        k.pragma(f"omp scan inclusive({totals})")
        for scan in self.scans:
            self.publish(scan)
        self.stores(set())
        self.w("}")


class _Along(_Scan):
    def write(self) -> None:
        k, grid = self.kernel, self.nest.grid
        clause = k.parallel(grid)
        if clause and grid:
            collapse = f" collapse({len(grid)})" if len(grid) > 1 else ""
            k.pragma(f"omp parallel for{collapse} schedule(static) {clause}")
        for axis in grid:
            k.loop(axis)
        for scan in self.scans:
            self.start(scan)
        self.walk()
        for _ in grid:
            self.w("}")


class _Across(_Scan):
    def total(self, scan: Running) -> str:
        name = self.nest.grid[-1].name
        return f"{identifier(scan.local.name)}_all[{name} - {name}0]"

    def write(self) -> None:
        k, block = self.kernel, self.kernel.schedule.block
        *outer, lane = self.nest.grid
        n, size = lane.name, k.size(lane)
        clause = k.parallel(self.nest.grid)
        if clause:
            collapse = f" collapse({len(outer) + 1})" if outer else ""
            k.pragma(f"omp parallel for{collapse} schedule(static) {clause}")
        for axis in outer:
            k.loop(axis)
        self.w(f"for (int64_t {n}0 = 0; {n}0 < {size}; {n}0 += {block}) {{")
        self.w.lines[-1] += "  // neighbours side by side"
        self.w(f"const int64_t {n}1 = least({n}0 + {block}, {size});")
        for scan in self.scans:
            name = identifier(scan.local.name)
            self.w(f"alignas(64) {scan.ctype} {name}_all[{block}];")
            self.w(f"for (int64_t c = 0; c < {block}; ++c) {name}_all[c] = {scan.start};")
        k.loop(self.body, "the scan")
        k.pragma("omp simd")
        k.loop(lane, "", f"{n}0", f"{n}1")
        self.point()
        for _ in range(len(outer) + 3):
            self.w("}")


class _Parts(_Scan):
    def write(self) -> None:
        k, grid = self.kernel, self.nest.grid
        size = k.size(self.body)
        self.w("const int64_t team = threads;")
        for scan in self.scans:
            name = identifier(scan.local.name)
            self.w(
                f"{scan.ctype}* {name}_parts = ({scan.ctype}*)malloc(sizeof({scan.ctype}) * team);"
            )
        for axis in grid:
            k.loop(axis)
        self.each_part("each thread collects its part", size)
        for scan in self.scans:
            self.start(scan)
        clauses = self.clauses()
        if clauses is not None:
            k.pragma(f"omp simd {clauses}")
        k.loop(self.body, "", "from", "to")
        done: set[str] = set()
        for scan in self.scans:
            self.accumulate(scan, done)
        self.w("}")
        for scan in self.scans:
            self.w(f"{self.part(scan, 'chunk')} = {self.total(scan)};")
        self.w("}")
        self.before_each()
        self.each_part("and scans it from what came before", size)
        for scan in self.scans:
            self.w(f"{scan.ctype} {self.total(scan)} = {self.part(scan, 'chunk')};")
        self.walk("from", "to")
        self.w("}")
        for _ in grid:
            self.w("}")
        for scan in self.scans:
            self.w(f"free({identifier(scan.local.name)}_parts);")

    def clauses(self) -> str | None:
        """Of the SIMD loop that collects; None where OpenMP lacks one of the operations."""
        found = [(CLAUSES.get(str(s.local.reduction)), self.total(s)) for s in self.scans]
        if any(clause is None for clause, _ in found):
            return None
        return " ".join(f"reduction({clause}:{total})" for clause, total in found)

    def part(self, scan: Running, which: str) -> str:
        return f"{identifier(scan.local.name)}_parts[{which}]"

    def each_part(self, comment: str, size: str) -> None:
        self.kernel.pragma("omp parallel for num_threads(team) schedule(static)")
        self.w("for (int64_t chunk = 0; chunk < team; ++chunk) {")
        self.w.lines[-1] += f"  // {comment}"
        self.w(f"const int64_t from = chunk * ({size}) / team, to = (chunk + 1) * ({size}) / team;")

    def before_each(self) -> None:
        """What a part has collected becomes what all parts before it have."""
        for scan in self.scans:
            name = identifier(scan.local.name)
            self.w(f"{scan.ctype} {name}_before = {scan.start};")
            self.w("for (int64_t chunk = 0; chunk < team; ++chunk) {")
            self.w(f"const {scan.ctype} {name}_mine = {self.part(scan, 'chunk')};")
            self.w(f"{self.part(scan, 'chunk')} = {name}_before;")
            self.w(scan.step(f"{name}_before", f"{name}_mine"))
            self.w("}")
