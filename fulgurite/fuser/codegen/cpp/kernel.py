"""What the C++ of every kernel shape shares: the function around the loops, locals, accumulators.

In: a `CpuSchedule`. Out: lines of text, collected by `LineWriter`. `rows.py`, `columns.py`,
`scan.py` and `transpose.py` write the loops themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fulgurite.fuser.codegen.cpp.expressions import (
    ExpressionPrinter,
    identifier,
    storage_type,
    value_ctype,
)
from fulgurite.fuser.codegen.formulas import print_formulas
from fulgurite.fuser.codegen.store_casts import drop_store_casts
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.expression import NARROW_FLOATS, Expression, opmath_dtype
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import Local, Store, Table
from fulgurite.fuser.schedule.analysis import Analysis, analyze_nest, find_required_locals
from fulgurite.fuser.schedule.cpu.base import CpuSchedule
from fulgurite.kernels.tuning import fuser_cpu as tuning


class LineWriter:
    """Lines of C++, indented by their braces."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, line: str, comment: str = "") -> None:
        if line.startswith("}"):
            self.depth -= 1
        prefix = "" if line.startswith("#") else "  " * self.depth
        note = f"  // {comment}" if comment else ""
        self.lines.append(prefix + line + note if line else "")
        if line.endswith("{"):
            self.depth += 1


@dataclass(frozen=True)
class Accumulator:
    """How a reduction is written."""

    ctype: str
    initial: str
    omp_operator: str  # of the OpenMP reduction clause
    update: str  # with {0} the accumulator and {1} the next value
    combine: str = ""  # of a float: two values, as {0} and {1}
    functor: str = ""  # the same in `reductions.h`


def accumulator(local: Local) -> Accumulator:
    ctype = value_ctype(local.dtype)
    if local.dtype == torch.bool:
        if local.reduction in ("max", "sum"):
            return Accumulator("int32_t", "0", "|", "{0} |= {1}")
        return Accumulator("int32_t", "1", "&", "{0} &= {1}")
    if local.reduction == "sum":
        return Accumulator(ctype, "0", "+", "{0} += {1}", "({0} + {1})", "Sum")
    if local.reduction == "prod":
        return Accumulator(ctype, "1", "*", "{0} *= {1}", "({0} * {1})", "Product")
    is_max = local.reduction == "max"
    name, limit = ("nan_max", "lowest") if is_max else ("nan_min", "highest")
    combine = f"{name}({{0}}, {{1}})"
    functor = "Maximum" if is_max else "Minimum"
    initial = f"{limit}<{ctype}>()"
    return Accumulator(ctype, initial, name, f"{{0}} = {combine}", combine, functor)


def is_ordered(local: Local) -> bool:
    """Whether the result of a reduction depends on the order of its operations."""
    return local.reduction is not None and opmath_dtype(local.dtype).is_floating_point


def sums_in_double(local: Local) -> bool:
    """Sums of blocks of floats are added in double."""
    return local.reduction == "sum" and is_ordered(local)


def total_ctype(x: Local) -> str:
    """The type in which blocks, or the partial results of threads, are combined."""
    return "double" if sums_in_double(x) else accumulator(x).ctype


def print_block_reduction(x: Local, values: str, count: int, is_stored: bool = True) -> str:
    """The reduction of a block in memory; `is_stored`: the kernel has just stored its values there."""
    flags = f"{accumulator(x).functor}, {count}, {'true' if is_stored else 'false'}"
    return f"reduce_block<{flags}>({values}, {count})"


def print_combined_blocks(x: Local, total: str, values: str, count: str) -> str:
    """What a total and the blocks of a chunk in memory come to."""
    return f"combine_blocks<{accumulator(x).functor}>({total}, {values}, {count})"


def is_one_block(size: int | None) -> bool:
    """Whether a loop is one block of a reduction."""
    return size is not None and size <= tuning.REDUCTION_BLOCK


def print_lane_tree(combine: str, lanes: list[str]) -> str:
    """Accumulators of lanes combined in halves, as `combine_lanes` of `reductions.h` does."""
    half = tuning.REDUCTION_LANES // 2
    while half:
        pairs = [(lanes[k], lanes[k + half : k + half + 1]) for k in range(min(half, len(lanes)))]
        lanes = [combine.format(low, high[0]) if high else low for low, high in pairs]
        half //= 2
    return lanes[0]


@dataclass
class KernelWriter:
    """Writes the text of one kernel."""

    name: str
    schedule: CpuSchedule
    emit: LineWriter = field(default_factory=LineWriter)

    def __post_init__(self) -> None:
        self.nest = drop_store_casts(self.schedule.nest)
        self.analysis: Analysis = analyze_nest(self.nest)
        written = [s.tensor.name for s in self.nest.stores]
        accessed = list(dict.fromkeys(t.name for t, _, _ in self.nest.accesses()))
        tables = {table.tensor.name for table in self.nest.tables}
        self.reads = [name for name in accessed if name not in written and name not in tables]
        self.writes = list(dict.fromkeys(written))
        read = {t.name for t, _, stores in self.nest.accesses() if not stores}
        self.updates = [name for name in self.writes if name in read]
        self.symbols = sorted(self.nest.symbols(), key=lambda s: s.name)
        self.printer = ExpressionPrinter(identifier)
        self.allocated_tables: list[str] = []

    # the function around the loops

    def open_function(self) -> None:
        for line in print_formulas(self.nest, "//"):
            self.emit(line)
        self.emit(f"// {self.schedule}")
        parameters = []
        for name in self.reads:
            ctype = storage_type(self.nest.memory[name].dtype)
            parameters.append(f"const {ctype}* __restrict {identifier(name)}")
        for name in self.writes:
            ctype = storage_type(self.nest.memory[name].dtype)
            parameters.append(f"{ctype}* __restrict {self.output_name(name)}")
        parameters += [f"int64_t {symbol.name}" for symbol in self.symbols]
        parameters += ["int64_t* error", "int max_threads"]
        self.emit(f"static void {self.name}({', '.join(parameters)}) {{")
        self.return_when_empty()
        for table in self.nest.tables:
            self.write_table(table)

    def write_table(self, table: Table) -> None:
        """Allocates a table and computes it."""
        name, size = identifier(table.tensor.name), static_size(table.axes)
        ctype = storage_type(table.tensor.dtype)
        if size is not None and size * table.tensor.itemsize <= tuning.MAX_STACK_TABLE_BYTES:
            self.emit(f"alignas(64) {ctype} {name}[{max(size, 1)}];")
        else:
            count = self.print_product(table.axes)
            self.emit(f"{ctype}* const {name} = ({ctype}*)malloc(({count}) * sizeof({ctype}));")
            self.allocated_tables.append(name)
        *outer, inner = table.axes
        for axis in outer:
            self.open_loop(axis)
        self.emit_pragma("omp simd")
        self.open_loop(inner)
        value = _strip_parentheses(self.printer.print_expression(table.value))
        self.emit(f"{name}[{self.printer.print_index(table.index)}] = {value};")
        for _ in table.axes:
            self.emit("}")

    def return_when_empty(self) -> None:
        """Returns if there are no points: an index lookup before the loops may read out of range."""
        locals_ = self.nest.locals.values()
        has_lookups = any(index.indirect_indices() for _, index, _ in self.nest.accesses())
        points = static_size(self.nest.axes)
        if points or not has_lookups or any(x.reduction is not None for x in locals_):
            return
        if points == 0:
            self.emit("return;")
        else:
            self.emit(f"if ({self.print_product(self.nest.axes)} == 0) return;")

    def close_function(self) -> None:
        for name in self.allocated_tables:
            self.emit(f"free({name});")
        self.emit("}")
        self.emit("")

    # sizes

    def print_size(self, axis: Axis) -> str:
        return self.printer.print_index(axis.size)

    def print_product(self, axes: tuple[Axis, ...]) -> str:
        """The number of points of these loops."""
        return self.printer.print_index(_product(axes))

    def print_num_threads(self) -> str | None:
        """The number of threads that the kernel is worth; None for a small kernel."""
        flops = sum(local.flops for local in self.nest.locals.values())
        grain = max(tuning.THREAD_GRAIN * 8 // (8 + flops), tuning.MIN_THREAD_GRAIN)
        points = _product(self.nest.axes)
        if points.is_constant and points.constant < 2 * grain:
            return None
        if not points.is_constant or points.constant < tuning.STATIC_THREADS_GRAINS * grain:
            return f"choose_num_threads({self.printer.print_index(points)}, {grain}, max_threads)"
        return "max_threads"

    def open_parallel_for(self, num_threads: str, loops: int = 1) -> None:
        """Splits the next `loops` loops among threads."""
        collapse = f" collapse({loops})" if loops > 1 else ""
        clauses = f"schedule(static) num_threads({num_threads})"
        self.emit_pragma(f"omp parallel for{collapse} {clauses}")

    # values

    def declare_local(self, local: Local, printer: ExpressionPrinter) -> None:
        text = _strip_parentheses(printer.print_expression(local.expression))
        self.emit(f"const {value_ctype(local.dtype)} {identifier(local.name)} = {text};")

    def output_name(self, name: str) -> str:
        """The parameter of a result; a tensor that is read and then written has one name."""
        return identifier(name) if name in self.updates else f"{identifier(name)}_out"

    def emit_store(self, store: Store, printer: ExpressionPrinter) -> None:
        self.emit_store_text(store, printer.print_expression(store.value), printer)

    def emit_store_text(self, store: Store, value: str, printer: ExpressionPrinter) -> None:
        """Stores a value that is already text."""
        target = self.output_name(store.tensor.name)
        index = printer.print_index(store.index)
        if store.tensor.dtype in NARROW_FLOATS:
            self.emit(f"store({target} + {index}, {value});")
        else:
            self.emit(f"{target}[{index}] = {_strip_parentheses(value)};")

    def find_required_locals(self, roots: list[Expression]) -> list[Local]:
        return find_required_locals(self.nest, roots)

    def find_buffered_locals(self, roots: list[list[Expression]], step: int) -> set[str]:
        """Locals that an earlier pass left in a buffer; `roots` are what each pass computes."""
        earlier = (x.name for part in roots[:step] for x in self.find_required_locals(part))
        return {name for name in earlier if name in self.schedule.buffered_locals}

    def find_body_values(self, roots: list[list[Expression]], step: int) -> list[Local]:
        """Locals that a pass computes at each point, unless only a buffered value needs them."""
        buffered = self.find_buffered_locals(roots, step)
        required = self.find_required_locals(roots[step])
        used: set[str] = set()
        for root in roots[step]:
            used.update(x.name for x in self.nest.references(root))
        for local in reversed(required):
            if local.name in used and local.name not in buffered and local.reduction is None:
                used.update(x.name for x in self.nest.references(local.expression))
        in_body = self.analysis.in_body
        return [x for x in required if x.name in used and x.reduction is None and in_body[x.name]]

    # loops

    def open_loop(
        self, axis: Axis, comment: str = "", start: str = "0", end: str | None = None
    ) -> None:
        end = self.print_size(axis) if end is None else end
        name = axis.name
        self.emit(f"for (int64_t {name} = {start}; {name} < {end}; ++{name}) {{", comment)

    def emit_pragma(self, text: str) -> None:
        self.emit.lines.append("  " * self.emit.depth + f"#pragma {text}")


def _product(axes: tuple[Axis, ...]) -> Index:
    total = Index(1)
    for axis in axes:
        total = total * axis.size
    return total


def _strip_parentheses(text: str) -> str:
    """The text without one pair of parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and k < len(text) - 1:
            return text
    return text[1:-1]


def static_size(axes: tuple[Axis, ...]) -> int | None:
    """The number of points, None where it is dynamic."""
    total = 1
    for axis in axes:
        if not axis.size.is_constant:
            return None
        total *= size_hint(axis.size)
    return total


def print_flat_index(
    axes: tuple[Axis, ...], kernel: KernelWriter, printer: ExpressionPrinter | None = None
) -> str:
    """A point of these loops as one number, row-major."""
    text, printer = "", printer or kernel.printer
    for axis in axes:
        position = printer.print_atom(axis)
        text = f"({text}) * ({kernel.print_size(axis)}) + {position}" if text else position
    return text or "0"
