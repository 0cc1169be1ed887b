"""C++ of scan kernels: one pass along the body with running accumulators.

along the row      for each row (split among threads): accumulate, store, accumulate, store …
across the rows    for each block of lanes: the body outside, the lanes inside, SIMD
few rows           each thread reduces its chunk   →   prefixes   →   scans its chunk
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.fuser.codegen.cpp.expressions import ExpressionPrinter, identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import KernelWriter
from fulgurite.fuser.ir.expression import Expression
from fulgurite.fuser.ir.loop_nest import Local
from fulgurite.fuser.schedule.analysis import find_required_locals
from fulgurite.fuser.schedule.cpu.scan import are_scans_independent, find_scans

OMP_OPERATORS = {"sum": "+", "prod": "*", "max": "nan_max", "min": "nan_min"}


@dataclass(frozen=True)
class ScanAccumulator:
    """How a scan's accumulator is written; floats accumulate in double, as torch's scans do."""

    local: Local

    @property
    def name(self) -> str:
        return identifier(self.local.name)

    @property
    def ctype(self) -> str:
        kinds = ("sum", "prod", "logsumexp")
        in_double = self.local.dtype.is_floating_point and self.local.reduction in kinds
        return "double" if in_double else value_ctype(self.local.dtype)

    @property
    def initial(self) -> str:
        neutral = {"sum": "0", "prod": "1"}
        limit = "highest" if self.local.reduction == "min" else "lowest"
        return neutral.get(str(self.local.reduction), f"{limit}<{self.ctype}>()")

    def update(self, total: str, value: str) -> str:
        kind = self.local.reduction
        if kind in ("sum", "prod"):
            return f"{total} {'+' if kind == 'sum' else '*'}= {value};"
        function = {"max": "nan_max", "min": "nan_min", "logsumexp": "log_add_exp"}[str(kind)]
        return f"{total} = {function}({total}, ({self.ctype}){value});"


def write_scan(kernel: KernelWriter) -> None:
    kernel.open_function()
    if kernel.schedule.splits_body:
        _SplitScanWriter(kernel).write()
    elif kernel.schedule.block:
        _ColumnScanWriter(kernel).write()
    else:
        _RowScanWriter(kernel).write()
    kernel.close_function()


class _ScanWriter:
    """What all scan kernels share."""

    def __init__(self, kernel: KernelWriter) -> None:
        self.kernel, self.nest, self.emit = kernel, kernel.nest, kernel.emit
        self.printer = ExpressionPrinter(identifier)
        self.scans = [ScanAccumulator(local) for local in find_scans(self.nest)]
        (self.body,) = self.nest.body

    def running_name(self, scan: ScanAccumulator) -> str:
        """The accumulator at a point."""
        return f"{scan.name}_running"

    def declare_locals(self, roots: list[Expression], declared: set[str]) -> None:
        """Declares the locals that expressions need, without scans."""
        for local in find_required_locals(self.nest, roots):
            if local.role != "scan" and local.name not in declared:
                self.kernel.declare_local(local, self.printer)
                declared.add(local.name)

    def accumulate(self, scan: ScanAccumulator, declared: set[str]) -> None:
        self.declare_locals([scan.local.expression], declared)
        value = self.printer.print_expression(scan.local.expression)
        self.emit(scan.update(self.running_name(scan), value))

    def declare_result(self, scan: ScanAccumulator) -> None:
        """Declares the value of the scan at this point."""
        ctype = value_ctype(scan.local.dtype)
        self.emit(f"const {ctype} {scan.name} = ({ctype}){self.running_name(scan)};")

    def emit_stores(self, declared: set[str]) -> None:
        self.declare_locals([store.value for store in self.nest.stores], declared)
        for store in self.nest.stores:
            self.kernel.emit_store(store, self.printer)

    def point(self) -> None:
        """One point: every scan takes a step, in order, then results are stored."""
        declared: set[str] = set()
        for scan in self.scans:
            self.accumulate(scan, declared)
            self.declare_result(scan)
        self.emit_stores(declared)

    def declare_running(self, scan: ScanAccumulator) -> None:
        self.emit(f"{scan.ctype} {self.running_name(scan)} = {scan.initial};")

    def row_loop(self, low: str = "0", high: str | None = None) -> None:
        """The loop along a row: SIMD where no scan reads another and OpenMP has its operator."""
        k = self.kernel
        operators = [OMP_OPERATORS.get(str(scan.local.reduction)) for scan in self.scans]
        if not (are_scans_independent(self.nest) and all(operators)):
            k.open_loop(self.body, "", low, high)
            self.point()
            self.emit("}")
            return
        names = [self.running_name(scan) for scan in self.scans]
        pairs = zip(operators, names, strict=True)
        clauses = " ".join(f"reduction(inscan, {operator}:{name})" for operator, name in pairs)
        k.emit_pragma(f"omp simd {clauses}")
        k.open_loop(self.body, "", low, high)
        declared: set[str] = set()
        for scan in self.scans:
            self.accumulate(scan, declared)
        k.emit_pragma(f"omp scan inclusive({', '.join(names)})")
        for scan in self.scans:
            self.declare_result(scan)
        self.emit_stores(set())
        self.emit("}")


class _RowScanWriter(_ScanWriter):
    def write(self) -> None:
        k, grid = self.kernel, self.nest.grid
        num_threads = k.print_num_threads()
        if num_threads and grid:
            k.open_parallel_for(num_threads, len(grid))
        for axis in grid:
            k.open_loop(axis)
        for scan in self.scans:
            self.declare_running(scan)
        self.row_loop()
        for _ in grid:
            self.emit("}")


class _ColumnScanWriter(_ScanWriter):
    def running_name(self, scan: ScanAccumulator) -> str:
        name = self.nest.grid[-1].name
        return f"{scan.name}_running[{name} - {name}0]"

    def write(self) -> None:
        k, block = self.kernel, self.kernel.schedule.block
        *outer, lane = self.nest.grid
        n, size = lane.name, k.print_size(lane)
        num_threads = k.print_num_threads()
        if num_threads:
            k.open_parallel_for(num_threads, len(outer) + 1)
        for axis in outer:
            k.open_loop(axis)
        loop = f"for (int64_t {n}0 = 0; {n}0 < {size}; {n}0 += {block}) {{"
        self.emit(loop, "block of lanes")
        self.emit(f"const int64_t {n}1 = min_i64({n}0 + {block}, {size});")
        for scan in self.scans:
            array = f"{scan.name}_running"
            self.emit(f"alignas(64) {scan.ctype} {array}[{block}];")
            self.emit(f"for (int64_t c = 0; c < {block}; ++c) {array}[c] = {scan.initial};")
        k.open_loop(self.body, "scan")
        k.emit_pragma("omp simd")
        k.open_loop(lane, "", f"{n}0", f"{n}1")
        self.point()
        for _ in range(len(outer) + 3):
            self.emit("}")


class _SplitScanWriter(_ScanWriter):
    def write(self) -> None:
        k, grid = self.kernel, self.nest.grid
        self.emit("const int64_t num_threads = max_threads;")
        for scan in self.scans:
            size = f"sizeof({scan.ctype}) * num_threads"
            self.emit(f"{scan.ctype}* {scan.name}_partials = ({scan.ctype}*)malloc({size});")
        for axis in grid:
            k.open_loop(axis)
        self.open_chunks("each thread reduces its chunk")
        for scan in self.scans:
            self.declare_running(scan)
        clauses = self.print_reduction_clauses()
        if clauses is not None:
            k.emit_pragma(f"omp simd {clauses}")
        k.open_loop(self.body, "", "begin", "end")
        declared: set[str] = set()
        for scan in self.scans:
            self.accumulate(scan, declared)
        self.emit("}")
        for scan in self.scans:
            self.emit(f"{scan.name}_partials[chunk] = {self.running_name(scan)};")
        self.emit("}")
        self.partials_to_prefixes()
        self.open_chunks("and scans it, starting from its prefix")
        for scan in self.scans:
            self.emit(f"{scan.ctype} {self.running_name(scan)} = {scan.name}_partials[chunk];")
        self.row_loop("begin", "end")
        self.emit("}")
        for _ in grid:
            self.emit("}")
        for scan in self.scans:
            self.emit(f"free({scan.name}_partials);")

    def print_reduction_clauses(self) -> str | None:
        """Of the SIMD loop that reduces a chunk; None where OpenMP lacks one of the operators."""
        clauses = []
        for scan in self.scans:
            operator = OMP_OPERATORS.get(str(scan.local.reduction))
            if operator is None:
                return None
            clauses.append(f"reduction({operator}:{self.running_name(scan)})")
        return " ".join(clauses)

    def open_chunks(self, comment: str) -> None:
        size = self.kernel.print_size(self.body)
        self.kernel.open_parallel_for("num_threads")
        self.emit("for (int64_t chunk = 0; chunk < num_threads; ++chunk) {", comment)
        begin, end = (f"{c} * ({size}) / num_threads" for c in ("chunk", "(chunk + 1)"))
        self.emit(f"const int64_t begin = {begin}, end = {end};")

    def partials_to_prefixes(self) -> None:
        """Replaces the reduction of each chunk by the reduction of all chunks before it."""
        for scan in self.scans:
            name = scan.name
            self.emit(f"{scan.ctype} {name}_prefix = {scan.initial};")
            self.emit("for (int64_t chunk = 0; chunk < num_threads; ++chunk) {")
            self.emit(f"const {scan.ctype} {name}_partial = {name}_partials[chunk];")
            self.emit(f"{name}_partials[chunk] = {name}_prefix;")
            self.emit(scan.update(f"{name}_prefix", f"{name}_partial"))
            self.emit("}")
