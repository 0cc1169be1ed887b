"""C++ of scan kernels: one pass along the body with running accumulators.

along the row      for each row (split among threads): accumulate, store, accumulate, store …
across the rows    for each block of lanes: the body outside, the lanes inside, SIMD
few rows           each chunk is reduced   →   prefixes   →   each chunk is scanned

Sums and products of floats have one order of operations, whatever loop computes them. A group of 8
elements is scanned from the identity, and each result is combined with what is before the group. Chunks
of 8192 elements start from the combined totals of the chunks before.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.fuser.codegen.cpp.expressions import ExpressionPrinter, identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import KernelWriter, is_ordered, static_size
from fulgurite.fuser.ir.expression import Expression
from fulgurite.fuser.ir.loop_nest import Local
from fulgurite.fuser.schedule.analysis import find_required_locals
from fulgurite.fuser.schedule.cpu.scan import are_scans_independent, find_scans
from fulgurite.kernels.tuning import fuser_cpu as tuning

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

    @property
    def is_grouped(self) -> bool:
        """Whether results depend on the order of operations, and are computed in groups."""
        return is_ordered(self.local) and self.local.reduction in ("sum", "prod")

    def combine(self, a: str, b: str) -> str:
        return f"{a} {'*' if self.local.reduction == 'prod' else '+'} {b}"

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
        self.grouped = [scan for scan in self.scans if scan.is_grouped]
        (self.body,) = self.nest.body

    def accumulator(self, scan: ScanAccumulator, suffix: str) -> str:
        """An accumulator at a point: `running`, and of grouped scans `group`, `chunk` and `prefix`."""
        return f"{scan.name}_{suffix}"

    def declare_locals(self, roots: list[Expression], declared: set[str]) -> None:
        """Declares the locals that expressions need, without scans."""
        for local in find_required_locals(self.nest, roots):
            if local.role != "scan" and local.name not in declared:
                self.kernel.declare_local(local, self.printer)
                declared.add(local.name)

    def accumulate(self, scan: ScanAccumulator, declared: set[str]) -> None:
        self.declare_locals([scan.local.expression], declared)
        value = self.printer.print_expression(scan.local.expression)
        total = self.accumulator(scan, "group" if scan.is_grouped else "running")
        self.emit(scan.update(total, value))

    def declare_result(self, scan: ScanAccumulator) -> None:
        """Declares the value of the scan at this point."""
        ctype = value_ctype(scan.local.dtype)
        value = self.accumulator(scan, "running")
        if scan.is_grouped:
            value = f"({scan.combine(value, self.accumulator(scan, 'group'))})"
        self.emit(f"const {ctype} {scan.name} = ({ctype}){value};")

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

    # accumulators, of one row or of the lanes

    def declare_accumulators(
        self, suffixes: tuple[str, ...] = ("running", "chunk", "prefix")
    ) -> None:
        for scan in self.scans:
            for suffix in suffixes if scan.is_grouped else suffixes[:1]:
                self.declare_accumulator(scan, suffix)

    def declare_accumulator(self, scan: ScanAccumulator, suffix: str) -> None:
        self.emit(f"{scan.ctype} {self.accumulator(scan, suffix)} = {scan.initial};")

    def open_lanes(self) -> None:
        """The loop over the lanes, where there are some."""

    def close_lanes(self) -> None:
        pass

    def has_chunks(self) -> bool:
        size = static_size(self.nest.body)
        return size is None or size > tuning.SCAN_CHUNK

    def open_group(self, start: str, end: str) -> str:
        """The loops over chunks and groups; returns the end of a group."""
        group, chunk = tuning.SCAN_GROUP, tuning.SCAN_CHUNK
        if self.has_chunks():
            loop = f"for (int64_t chunk0 = {start}; chunk0 < {end}; chunk0 += {chunk}) {{"
            self.emit(loop, "chunks")
            start, end = "chunk0", f"min_i64({end}, chunk0 + {chunk})"
        self.emit(f"for (int64_t block = {start}; block < {end}; block += {group}) {{", "groups")
        size = static_size(self.nest.body)
        for scan in self.grouped:
            self.declare_accumulator(scan, "group")
        is_even = size is not None and size % group == 0
        return f"block + {group}" if is_even else f"min_i64({end}, block + {group})"

    def close_group(self) -> None:
        self.open_lanes()
        for scan in self.grouped:
            for total in ("running", "chunk"):
                group = self.accumulator(scan, "group")
                self.emit(scan.update(self.accumulator(scan, total), group))
        self.close_lanes()
        self.emit("}")
        if not self.has_chunks():
            return
        self.open_lanes()
        for scan in self.grouped:
            running, chunk, prefix = (
                self.accumulator(scan, suffix) for suffix in ("running", "chunk", "prefix")
            )
            self.emit(scan.update(prefix, chunk))
            self.emit(f"{running} = {prefix};")
            self.emit(f"{chunk} = {scan.initial};")
        self.close_lanes()
        self.emit("}")

    def row_loop(self, low: str = "0", high: str | None = None) -> None:
        """The loop along a row. SIMD where order does not matter and OpenMP has the operators."""
        k, high = self.kernel, high or self.kernel.print_size(self.body)
        if self.grouped:
            end = self.open_group(low, high)
            k.emit_pragma(f"GCC unroll {tuning.SCAN_GROUP}")
            k.open_loop(self.body, "", "block", end)
            self.point()
            self.emit("}")
            self.close_group()
            return
        operators = [OMP_OPERATORS.get(str(scan.local.reduction)) for scan in self.scans]
        if not (are_scans_independent(self.nest) and all(operators)):
            k.open_loop(self.body, "", low, high)
            self.point()
            self.emit("}")
            return
        names = [self.accumulator(scan, "running") for scan in self.scans]
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
        self.declare_accumulators()
        self.row_loop()
        for _ in grid:
            self.emit("}")


class _ColumnScanWriter(_ScanWriter):
    def accumulator(self, scan: ScanAccumulator, suffix: str) -> str:
        name = self.nest.grid[-1].name
        return f"{scan.name}_{suffix}[{name} - {name}0]"

    def declare_accumulator(self, scan: ScanAccumulator, suffix: str) -> None:
        block, array = self.kernel.schedule.block, f"{scan.name}_{suffix}"
        self.emit(f"alignas(64) {scan.ctype} {array}[{block}];")
        self.emit(f"for (int64_t c = 0; c < {block}; ++c) {array}[c] = {scan.initial};")

    def open_lanes(self) -> None:
        lane = self.nest.grid[-1]
        self.kernel.emit_pragma("omp simd")
        self.kernel.open_loop(lane, "", f"{lane.name}0", f"{lane.name}1")

    def close_lanes(self) -> None:
        self.emit("}")

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
        self.declare_accumulators()
        start, end = "0", k.print_size(self.body)
        if self.grouped:
            start, end = "block", self.open_group(start, end)
        k.open_loop(self.body, "scan", start, end)
        self.open_lanes()
        self.point()
        self.close_lanes()
        self.emit("}")
        if self.grouped:
            self.close_group()
        for _ in range(len(outer) + 1):
            self.emit("}")


class _SplitScanWriter(_ScanWriter):
    """Chunks of a row are split among threads. They have a fixed size, so results do not depend on threads."""

    def write(self) -> None:
        k, grid, chunk = self.kernel, self.nest.grid, tuning.SCAN_CHUNK
        size = k.print_size(self.body)
        self.emit(f"const int64_t chunks = ({size} + {chunk - 1}) / {chunk};")
        for scan in self.scans:
            memory = f"({scan.ctype}*)malloc(sizeof({scan.ctype}) * chunks)"
            self.emit(f"{scan.ctype}* {scan.name}_partials = {memory};")
        for axis in grid:
            k.open_loop(axis)
        self.open_chunks("each chunk is reduced")
        self.declare_accumulators(("running", "chunk"))
        self.reduce_chunk()
        for scan in self.scans:
            total = self.accumulator(scan, "chunk" if scan.is_grouped else "running")
            self.emit(f"{scan.name}_partials[chunk] = {total};")
        self.emit("}")
        self.partials_to_prefixes()
        self.open_chunks("and scanned, starting from its prefix")
        for scan in self.scans:
            running = self.accumulator(scan, "running")
            self.emit(f"{scan.ctype} {running} = {scan.name}_partials[chunk];")
        for scan in self.grouped:
            self.declare_accumulator(scan, "chunk")
        self.row_loop("begin", "end")
        self.emit("}")
        for _ in grid:
            self.emit("}")
        for scan in self.scans:
            self.emit(f"free({scan.name}_partials);")

    def has_chunks(self) -> bool:
        return False  # loops are inside one

    def reduce_chunk(self) -> None:
        k, start, end = self.kernel, "begin", "end"
        if self.grouped:
            start, end = "block", self.open_group(start, end)
            k.emit_pragma(f"GCC unroll {tuning.SCAN_GROUP}")
        k.open_loop(self.body, "", start, end)
        declared: set[str] = set()
        for scan in self.scans:
            self.accumulate(scan, declared)
        self.emit("}")
        if self.grouped:
            self.close_group()

    def open_chunks(self, comment: str) -> None:
        size, chunk = self.kernel.print_size(self.body), tuning.SCAN_CHUNK
        self.kernel.open_parallel_for("max_threads")
        self.emit("for (int64_t chunk = 0; chunk < chunks; ++chunk) {", comment)
        bounds = f"begin = chunk * {chunk}, end = min_i64({size}, begin + {chunk})"
        self.emit(f"const int64_t {bounds};")

    def partials_to_prefixes(self) -> None:
        """Replaces the reduction of each chunk by the reduction of all chunks before it."""
        for scan in self.scans:
            name = scan.name
            self.emit(f"{scan.ctype} {name}_prefix = {scan.initial};")
            self.emit("for (int64_t chunk = 0; chunk < chunks; ++chunk) {")
            self.emit(f"const {scan.ctype} {name}_partial = {name}_partials[chunk];")
            self.emit(f"{name}_partials[chunk] = {name}_prefix;")
            self.emit(scan.update(f"{name}_prefix", f"{name}_partial"))
            self.emit("}")
