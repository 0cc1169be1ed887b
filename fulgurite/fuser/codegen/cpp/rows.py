"""C++ of pointwise and row kernels: threads split the grid, passes over the body, SIMD inside.

    for each row (split among threads)
      pass 1: its reductions   →   row values   →   pass 2: what needs them, stores

Large results of a pass are staged in a block and written by non-temporal stores. While the most
expensive pass works on a row, the next row is prefetched. `grid_reductions.py` adds reductions over
the grid, `split_rows.py` splits a few long rows among threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from fulgurite.fuser.codegen.cpp.buffered_printer import BufferedPrinter
from fulgurite.fuser.codegen.cpp.expressions import (
    ExpressionPrinter,
    identifier,
    storage_type,
    value_ctype,
)
from fulgurite.fuser.codegen.cpp.kernel import (
    KernelWriter,
    accumulator,
    is_one_block,
    is_ordered,
    print_block_reduction,
    print_combined_blocks,
    print_flat_index,
    static_size,
    total_ctype,
)
from fulgurite.fuser.ir.expression import NARROW_FLOATS, Expression, Load, opmath_dtype
from fulgurite.fuser.ir.index import ONE, ZERO, from_atom
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.analysis import is_body_store, iter_unmasked
from fulgurite.fuser.schedule.cpu.memory_traffic import find_contiguous_loads
from fulgurite.fuser.schedule.cpu.pointwise import find_tail_loads
from fulgurite.kernels.tuning import fuser_cpu as tuning


@dataclass(frozen=True)
class PassWork:
    """What one pass over the body computes."""

    row_reductions: list[Local]
    column_reductions: list[Local]
    full_reductions: list[Local]  # over the body's points
    stores: list[Store]

    @property
    def roots(self) -> list[Expression]:
        reductions = (*self.row_reductions, *self.column_reductions, *self.full_reductions)
        roots: list[Expression] = [x.expression for x in reductions]
        return roots + [s.value for s in self.stores]


class RowWriter:
    """Writes the text of a row kernel, from the outside in."""

    bounds: tuple[str, str] | None = None  # of the first body loop, where threads split it

    def __init__(self, kernel: KernelWriter) -> None:
        self.kernel = kernel
        self.nest = kernel.nest
        self.analysis = kernel.analysis
        self.schedule = kernel.schedule
        self.emit = kernel.emit
        self.printer = BufferedPrinter(identifier)
        self.full_reductions = [x for x in self.nest.locals.values() if x.role == "full_reduction"]
        self.declared: set[str] = set()  # row values
        self.passes = [self.find_pass_work(step) for step in range(self.schedule.passes)]
        self.pass_roots = [work.roots for work in self.passes]

    def write(self) -> None:
        num_threads = self.kernel.print_num_threads()
        if self.schedule.parallel_simd_loop:
            self.grid_loops(num_threads)
            return
        if num_threads and self.nest.grid:
            self.kernel.open_parallel_for(num_threads, len(self.nest.grid))
        self.grid_loops()

    def grid_loops(self, simd_threads: str | None = None) -> None:
        for axis in self.nest.grid:
            self.kernel.open_loop(axis)
        self.row(simd_threads)
        for _ in self.nest.grid:
            self.emit("}")

    def row_pieces(self) -> None:
        """The pieces of a row, those of one side of a mask after each other."""
        for assumptions, group in itertools.groupby(self.schedule.pieces, lambda p: p.assumptions):
            tests = [
                self.printer.print_bounds(check)
                if truth
                else f"!({self.printer.print_bounds(check)})"
                for check, truth in assumptions
            ]
            if tests:
                self.emit(f"if ({' && '.join(tests)}) {{")
            for piece in group:
                schedule = replace(
                    self.schedule, nest=piece.nest, simd_axis=piece.nest.body[-1], pieces=()
                )
                self.emit("{")
                RowWriter(replace(self.kernel, schedule=schedule)).row(None)
                self.emit("}")
            if tests:
                self.emit("}")

    def row(self, simd_threads: str | None) -> None:
        """One row: its values and passes in turn; `simd_threads` split the SIMD loop, if any."""
        if self.schedule.pieces:
            self.row_pieces()
            return
        for name in self.schedule.buffered_locals:
            ctype = value_ctype(self.nest.locals[name].dtype)
            points = static_size(self.nest.body)
            self.emit(f"alignas(64) {ctype} {identifier(name)}_row[{points}];", "for later passes")
        for step in range(self.schedule.passes + 1):
            self.row_values(step)
            if step == 0:
                self.row_lookups()
            if step < self.schedule.passes:
                self.one_pass(step, simd_threads)
        self.printer.buffers.clear()

    def row_lookups(self) -> None:
        """Indirect indices that are the same along the row, once a row."""
        roots = [root for roots in self.pass_roots for root in roots]
        required = self.kernel.find_required_locals(roots)
        roots += [x.expression for x in required if self.analysis.in_body[x.name]]
        for part in (part for root in roots for part in iter_unmasked(root)):
            for atom in (
                part.index[0].indirect_indices() if isinstance(part, Load) and part.index else ()
            ):
                used = self.nest.references(atom.value)
                is_known = all(x.name in self.declared for x in used)
                if is_known and not atom.value.axes() & set(self.nest.body):
                    if atom not in self.printer.lookups:
                        name = f"index{len(self.printer.lookups) + 1}_"
                        self.emit(f"const int64_t {name} = {self.printer.print_lookup(atom)};")
                        self.printer.lookups[atom] = name

    # values of a row

    def row_values(self, step: int) -> None:
        """Row locals and row stores that are ready after `step` passes."""
        stores = [
            s
            for s in self.nest.stores
            if not is_body_store(self.nest, s)
            and not self.analysis.is_after_grid(s.value)
            and not self.analysis.is_in_body(s.value)
            and self.analysis.expression_ready_pass(s.value) == step
        ]
        ready_pass = self.analysis.ready_pass
        reductions = [
            x for x in self.full_reductions if not x.over_body and ready_pass[x.name] == step
        ]
        roots: list[Expression] = [s.value for s in stores] + [x.expression for x in reductions]
        for later in self.pass_roots[step:]:
            roots += later
        for local in self.kernel.find_required_locals(roots):
            is_ready = ready_pass[local.name] <= step and not self.analysis.in_body[local.name]
            if is_ready and local.reduction is None and local.name not in self.declared:
                self.kernel.declare_local(local, self.printer)
                self.declared.add(local.name)
        self.row_stores(stores)
        for x in reductions:
            value = self.printer.print_expression(x.expression)
            self.emit(accumulator(x).update.format(f"{identifier(x.name)}_partial", value) + ";")

    def row_stores(self, stores: list[Store]) -> None:
        for store in stores:
            self.kernel.emit_store(store, self.printer)

    # a pass over the body

    def find_pass_work(self, step: int) -> PassWork:
        work = PassWork([], [], [], [])
        ready_pass = self.analysis.ready_pass
        for x in self.nest.locals.values():
            if x.role == "row_reduction" and ready_pass[x.name] == step + 1:
                work.row_reductions.append(x)
            elif x.role == "column_reduction" and ready_pass[x.name] == step:
                work.column_reductions.append(x)
            elif x.role == "full_reduction" and ready_pass[x.name] == step and x.over_body:
                work.full_reductions.append(x)
        for s in self.nest.stores:
            if is_body_store(self.nest, s) and not self.analysis.is_after_grid(s.value):
                if self.analysis.expression_ready_pass(s.value) == step:
                    work.stores.append(s)
        return work

    def one_pass(self, step: int, simd_threads: str | None = None) -> None:
        work = self.passes[step]
        if not work.roots:
            return
        reductions = [*work.row_reductions, *work.full_reductions]
        for x in reductions:
            self.declare_total(x)
        if not self.nest.body:
            self.point(step)
        else:
            self.body_loops(step, reductions, simd_threads)
        for x in work.row_reductions:
            self.finish_row_reduction(x)
        for x in work.full_reductions:
            update = accumulator(x).update.format(f"{identifier(x.name)}_partial", self.total(x))
            self.emit(update + ";")

    def declare_total(self, x: Local) -> None:
        """Declares what the blocks of a row are combined in, or the points if no order is kept."""
        a = accumulator(x)
        if not self.nest.body or not is_ordered(x):
            self.emit(f"{a.ctype} {self.running_name(x)} = {a.initial};")
        elif self.has_blocks():
            self.emit(f"{total_ctype(x)} {identifier(x.name)}_total = {a.initial};")

    def has_blocks(self) -> bool:
        """Is the body more than one block of a reduction?"""
        return len(self.nest.body) > 1 or not is_one_block(static_size(self.nest.body))

    def total(self, x: Local) -> str:
        """The result of a reduction over the body."""
        is_blocked = self.nest.body and is_ordered(x) and self.has_blocks()
        return f"{identifier(x.name)}_total" if is_blocked else self.running_name(x)

    def finish_row_reduction(self, x: Local) -> None:
        if self.total(x) != identifier(x.name):
            self.emit(f"const {value_ctype(x.dtype)} {identifier(x.name)} = {self.total(x)};")

    def running_name(self, x: Local) -> str:
        """The result of a reduction over a body of one block, or the accumulator of its points."""
        name = identifier(x.name)
        return f"{name}_row" if x.role == "full_reduction" else name

    def body_loops(self, step: int, reductions: list[Local], simd_threads: str | None) -> None:
        k = self.kernel
        *outer, simd_axis = self.nest.body
        label = f"pass {step + 1}" if self.schedule.passes > 1 else ""
        for axis in outer:
            is_split = axis is self.nest.body[0] and self.bounds
            k.open_loop(axis, label, *(self.bounds if is_split and self.bounds else ("0", None)))
        if self.schedule.pads_tail:
            self.padded_row()
            return
        low, high = self.bounds if self.bounds and not outer else ("0", k.print_size(simd_axis))
        ordered = [x for x in reductions if is_ordered(x)]
        block = self.block_size(step, ordered)
        start, end, count = low, high, k.print_size(simd_axis)
        if block:
            is_even = (static_size((simd_axis,)) or 1) % block == 0 and low == "0"
            if simd_threads:
                k.open_parallel_for(simd_threads)
                simd_threads = None
            self.emit(f"for (int64_t block = {low}; block < {high}; block += {block}) {{")
            start, end = "block", f"block + {block}"
            count = str(block)
            if not is_even:
                end = f"min_i64({high}, {end})"
                count = f"min_i64({block}, {high} - block)"
        if self.schedule.prefetch_pass == step:
            self.prefetch(start, count)
        staged = self.staged_stores(step)
        for store in staged:
            ctype = storage_type(store.tensor.dtype)
            length = block or static_size((simd_axis,))
            self.emit(f"alignas(64) {ctype} {staging_name(store)}[{length}];")
        length = block or static_size((simd_axis,))
        halves = self.widen_halves(step, start, count, length)
        in_memory = {x.name: self.find_source(x, start) for x in ordered}
        for x in (x for x in ordered if in_memory[x.name] is None):
            self.emit(f"alignas(64) {value_ctype(x.dtype)} {values_name(x)}[{length}];")
        read_directly = {name for name, source in in_memory.items() if source is not None}
        if self.has_points(step, read_directly):
            unordered = [x for x in reductions if x not in ordered]
            k.emit_pragma(self.simd_pragma(unordered, simd_threads))
            k.open_loop(simd_axis, label, start, end)
            self.point(step, start, read_directly)
            self.emit("}")
        for x in ordered:
            source = in_memory[x.name] or values_name(x)
            self.finish_chunk(x, source, count)
        self.narrow_halves(step, start, count)
        for load in halves if block or outer else ():  # their scope ends; others serve later passes
            del self.printer.buffers[load]
        for store in staged:
            at_start = ExpressionPrinter(identifier, {simd_axis: start})
            index = at_start.print_index(store.index).removesuffix(" + 0")
            target = f"{k.output_name(store.tensor.name)} + {index}"
            self.emit(f"store_nontemporal({target}, {staging_name(store)}, {count});")
        for _ in range(len(outer) + bool(block)):
            self.emit("}")

    # float16: blocks are converted before and after the loop

    def find_halves(self, step: int) -> tuple[list[Load], list[Store]]:
        """The loads and stores of float16 along the row that a pass makes at every point."""
        if not self.nest.body or self.schedule.pads_tail:
            return [], []
        inner, roots = self.nest.body[-1], [*self.passes[step].roots]
        roots += [x.expression for x in self.body_values(step)]
        loads: dict[Load, None] = {}
        for part in (part for root in roots for part in iter_unmasked(root)):
            if isinstance(part, Load) and part.index and part.dtype == torch.float16:
                index = part.index[0]
                if not index.indirect_indices() and index.coefficient(inner) == 1:
                    loads[part] = None
        staged = self.staged_stores(step)
        stores = [
            s
            for s in self.passes[step].stores
            if s.tensor.dtype == torch.float16
            and s.combine is None
            and s.index.coefficient(inner) == 1
        ]
        return list(loads), [s for s in stores if s not in staged]

    def widen_halves(
        self, step: int, start: str, count: str, length: int | None
    ) -> tuple[Load, ...]:
        """Converts a block of loads, and declares one of stores. Returns the loads."""
        loads, stores = self.find_halves(step)
        at_start = ExpressionPrinter(identifier, {self.nest.body[-1]: start})
        loads = [load for load in loads if load not in self.printer.buffers]
        first = len(self.printer.buffers)
        for number, load in enumerate(loads, first):
            name = f"{identifier(load.name)}{number or ''}_wide"
            source = f"{identifier(load.name)} + {at_start.print_index(load.index[0])}"
            self.emit(f"alignas(64) float {name}[{length}];")
            self.emit(f"widen_block({name}, {source}, {count});")
            self.printer.buffers[load] = f"{name}[{self.block_index(start)}]"
        for store in stores:
            self.emit(f"alignas(64) float {wide_name(store)}[{length}];")
        return tuple(loads)

    def narrow_halves(self, step: int, start: str, count: str) -> None:
        """Converts a block of results."""
        at_start = ExpressionPrinter(identifier, {self.nest.body[-1]: start})
        for store in self.find_halves(step)[1]:
            target = self.kernel.output_name(store.tensor.name)
            index = at_start.print_index(store.index)
            self.emit(f"narrow_block({target} + {index}, {wide_name(store)}, {count});")

    def find_source(self, x: Local, start: str) -> str | None:
        """Where the values of a block already are in memory, one after the other; None: nowhere."""
        load = x.expression
        if not isinstance(load, Load) or load.dtype not in (torch.float32, torch.float64):
            return None
        if opmath_dtype(x.dtype) != load.dtype or load in self.printer.buffers:
            return None
        at_start = ExpressionPrinter(identifier, {self.nest.body[-1]: start})
        if not load.index:
            if load.name not in self.schedule.buffered_locals:
                return None
            position = print_flat_index(self.nest.body, self.kernel, at_start)
            return f"{identifier(load.name)}_row + {position}"
        index = load.index[0]
        if index.indirect_indices() or index.coefficient(self.nest.body[-1]) != 1:
            return None
        return f"{identifier(load.name)} + {at_start.print_index(index)}"

    def has_points(self, step: int, read_directly: set[str]) -> bool:
        """Does a pass compute anything point by point?"""
        work = self.passes[step]
        reductions = (*work.row_reductions, *work.full_reductions)
        return bool(
            work.stores
            or work.column_reductions
            or any(x.name not in read_directly for x in reductions)
            or self.body_values(step)
        )

    def finish_chunk(self, x: Local, values: str, count: str) -> None:
        """Takes in the values of a part of the row."""
        total = f"{identifier(x.name)}_total"
        if not is_one_block(static_size(self.nest.body[-1:])):
            self.emit(f"{total} = {print_combined_blocks(x, total, values, count)};")
            return
        is_stored = values.split()[0].endswith(("_values", "_row"))
        result = print_block_reduction(x, values, int(count), is_stored)
        if self.has_blocks():
            self.emit(accumulator(x).update.format(total, result) + ";")
        else:
            name = self.running_name(x)
            self.emit(f"const {value_ctype(x.dtype)} {name} = {result};")

    def padded_row(self) -> None:
        """A pointwise row: whole vectors, then its end as one more vector in buffers."""
        k, lanes, axis = self.kernel, tuning.VECTOR_LANES, self.nest.body[-1]
        size = static_size((axis,))
        assert size is not None, "rows of dynamic length are not padded"
        start = size // lanes * lanes
        if start:
            k.emit_pragma("omp simd")
            k.open_loop(axis, "", "0", str(start))
            self.point(0)
            self.emit("}")
        at_start = ExpressionPrinter(identifier, {axis: str(start)})
        rest, buffers = size - start, self.printer.buffers
        for number, load in enumerate(find_tail_loads(self.nest) or ()):
            name = f"{identifier(load.name)}_tail{number or ''}"
            source = f"{identifier(load.name)} + {at_start.print_index(load.index[0])}"
            self.emit(f"alignas(64) {storage_type(load.dtype)} {name}[{lanes}];")
            self.emit(f"load_tail<{lanes}>({name}, {source}, {rest});")
            buffers[load] = f"{name}[lane]"
        stores = self.passes[0].stores
        for store in stores:
            ctype = storage_type(store.tensor.dtype)
            self.emit(f"alignas(64) {ctype} {staging_name(store)}[{lanes}];")
        k.emit_pragma("omp simd")
        self.emit(f"for (int64_t lane = 0; lane < {lanes}; ++lane) {{", "the end of the row")
        self.emit(f"const int64_t {axis.name} = {start} + lane;")
        for local in self.body_values(0):
            k.declare_local(local, self.printer)
        for store in stores:
            value, name = self.printer.print_expression(store.value), staging_name(store)
            is_narrow = store.tensor.dtype in NARROW_FLOATS
            self.emit(
                f"store({name} + lane, {value});" if is_narrow else f"{name}[lane] = {value};"
            )
        self.emit("}")
        for store in stores:
            target = f"{k.output_name(store.tensor.name)} + {at_start.print_index(store.index)}"
            self.emit(f"store_tail<{lanes}>({target}, {staging_name(store)}, {rest});")
        buffers.clear()

    def simd_pragma(self, reductions: list[Local], simd_threads: str | None) -> str:
        """`reductions` are those whose order does not matter."""
        clauses = ""
        for x in reductions:
            clauses += f" reduction({accumulator(x).omp_operator}:{self.running_name(x)})"
        if simd_threads is None:
            return f"omp simd{clauses}"
        return f"omp parallel for simd schedule(static) num_threads({simd_threads}){clauses}"

    def block_size(self, step: int, ordered: list[Local]) -> int | None:
        """Iterations of the innermost loop in a block; None where it is one loop."""
        size = static_size(self.nest.body[-1:])
        block = tuning.REDUCTION_CHUNK if ordered else tuning.STAGING_BLOCK
        is_prefetched = self.schedule.prefetch_pass == step
        reasons = (ordered, is_prefetched, self.staged_stores(step), *self.find_halves(step))
        is_blocked = any(reasons)
        is_long = size is None or size > block or self.bounds is not None
        return block if is_blocked and is_long else None

    def staged_stores(self, step: int) -> list[Store]:
        """Stores of a pass that are staged in a block and written by non-temporal stores."""
        names = self.schedule.nontemporal_stores
        return [s for s in self.passes[step].stores if s.tensor.name in names]

    def prefetch(self, start: str, count: str) -> None:
        """Prefetches the same part of the next row."""
        simd_axis, row = self.nest.body[-1], self.nest.grid[-1]
        found: dict[str, Load] = {}
        for load in find_contiguous_loads(self.nest, simd_axis, row):
            found.setdefault(load.name, load)
        for name, load in found.items():
            index = load.index[0].substitute({row: from_atom(row) + ONE})
            if start == "0":
                index = index.substitute({simd_axis: ZERO})
            text = ExpressionPrinter(identifier, {simd_axis: start}).print_index(index)
            self.emit(f"prefetch({identifier(name)} + {text}, {count});", "next row")

    # one point

    def point(
        self, step: int, start: str = "0", read_directly: Collection[str] = frozenset()
    ) -> None:
        """One point of a pass; reductions that read memory directly take no part."""
        k, work = self.kernel, self.passes[step]
        index = self.body_index()
        for local in self.body_values(step):
            name = identifier(local.name)
            if local.name in self.kernel.find_buffered_locals(self.pass_roots, step):
                self.emit(f"const {value_ctype(local.dtype)} {name} = {name}_row[{index}];")
                continue
            k.declare_local(local, self.printer)
            if local.name in self.schedule.buffered_locals:
                self.emit(f"{name}_row[{index}] = {name};")
        for x in (*work.row_reductions, *work.full_reductions):
            if self.nest.body and is_ordered(x):
                if x.name not in read_directly:
                    value = self.printer.print_expression(x.expression)
                    self.emit(f"{values_name(x)}[{self.block_index(start)}] = {value};")
            else:
                self.accumulate(x, self.running_name(x))
        for x in work.column_reductions:
            self.accumulate(x, f"{identifier(x.name)}_acc[{index}]")
        staged, halves = self.staged_stores(step), self.find_halves(step)[1]
        for store in work.stores:
            if store in staged:
                self.stage_value(store, start)
            elif store in halves:
                value = self.printer.print_expression(store.value)
                self.emit(f"{wide_name(store)}[{self.block_index(start)}] = {value};")
            else:
                k.emit_store(store, self.printer)

    def accumulate(self, x: Local, target: str) -> None:
        value = self.printer.print_expression(x.expression)
        self.emit(accumulator(x).update.format(target, value) + ";")

    def block_index(self, start: str) -> str:
        """The position of a point in its block."""
        name = self.nest.body[-1].name
        return name if start == "0" else f"{name} - {start}"

    def stage_value(self, store: Store, start: str) -> None:
        """Puts a value into the block for non-temporal stores."""
        index = self.block_index(start)
        value = self.printer.print_expression(store.value)
        if store.tensor.dtype in NARROW_FLOATS:
            offset = index if start == "0" else f"({index})"
            self.emit(f"store({staging_name(store)} + {offset}, {value});")
        else:
            self.emit(f"{staging_name(store)}[{index}] = {value};")

    def body_values(self, step: int) -> list[Local]:
        return self.kernel.find_body_values(self.pass_roots, step)

    def body_index(self) -> str:
        """The body point as one number."""
        return print_flat_index(self.nest.body, self.kernel)


def values_name(x: Local) -> str:
    """The values of a block that a reduction combines."""
    return f"{identifier(x.name)}_values"


def wide_name(store: Store) -> str:
    """A block of results that become float16."""
    return f"{identifier(store.name)}_out_wide"


def staging_name(store: Store) -> str:
    """The block that collects values for non-temporal stores."""
    return f"{identifier(store.name)}_staging"
