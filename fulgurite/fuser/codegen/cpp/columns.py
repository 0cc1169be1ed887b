"""C++ of column kernels: a block of neighbouring grid points at once, one SIMD lane each.

for each block of lanes (split among threads)
  rows along the body: their tile is transposed into a buffer, and results are transposed back
  for each body point: every lane accumulates its element   (contiguous across lanes)
  row values of each lane, then the next pass, which reads packed loads from a buffer
"""

from __future__ import annotations

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
    print_flat_index,
    print_lane_tree,
    static_size,
    total_ctype,
)
from fulgurite.fuser.codegen.cpp.rows import staging_name
from fulgurite.fuser.ir.expression import NARROW_FLOATS, Expression, Load
from fulgurite.fuser.ir.index import ZERO, Axis, Index, as_index, from_atom
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.analysis import is_body_store, iter_unmasked
from fulgurite.fuser.schedule.cpu.columns import find_packed_loads
from fulgurite.kernels.tuning import fuser_cpu as tuning


class ColumnWriter:
    """Writes the text of one kernel; row values are arrays over the lanes."""

    def __init__(self, kernel: KernelWriter) -> None:
        self.kernel = kernel
        self.nest = kernel.nest
        self.analysis = kernel.analysis
        self.emit = kernel.emit
        self.simd_axis: Axis = self.nest.grid[-1]
        self.row_locals: set[str] = set()
        self.printer = BufferedPrinter(self.print_local)
        self.declared: set[str] = set()
        self.block = kernel.schedule.block
        self.pass_roots = [self.find_pass_roots(step) for step in range(kernel.schedule.passes)]
        loads = find_packed_loads(self.nest, self.pass_roots, kernel.schedule.buffered_locals)
        self.packed_loads = loads if kernel.schedule.packed else []
        self.tiles = kernel.schedule.tiles

    def print_local(self, name: str) -> str:
        text = identifier(name)
        return f"{text}[lane]" if name in self.row_locals else text

    def print_at_first_lane(self, index: Index) -> str:
        """An index at the first lane of the block."""
        return ExpressionPrinter(identifier, {self.simd_axis: "lane0"}).print_index(index)

    def write(self) -> None:
        num_threads = self.kernel.print_num_threads()
        if num_threads:
            self.kernel.open_parallel_for(num_threads, len(self.nest.grid))
        self.open_loops(is_split=True)
        block, size = self.block, self.kernel.print_size(self.simd_axis)
        width = static_size((self.simd_axis,))
        if width is not None and (width % block == 0 or width < block):
            self.write_block(str(min(width, block)))
        else:  # twice: accumulators of a constant number of lanes stay in registers
            self.emit(f"if ({size} - lane0 >= {block}) {{")
            self.write_block(str(block))
            self.emit("} else {")
            self.write_block(f"{size} - lane0" if width is None else str(width % block))
            self.emit("}")
        self.close_loops()

    def write_block(self, lanes: str) -> None:
        """All passes of one block of lanes."""
        self.emit(f"const int64_t lanes = {lanes};")
        self.row_locals, self.declared = set(), set()
        self.printer.buffers.clear()
        self.open_buffers()
        self.load_tiles()
        passes = self.kernel.schedule.passes
        for step in range(passes + 1):
            self.row_values(step)
            if step < passes:
                self.one_pass(step)

    def open_loops(self, is_split: bool = False) -> None:
        """The loops over the grid; `is_split`: the number of lanes is declared by what follows."""
        k = self.kernel
        for axis in self.nest.grid[:-1]:
            k.open_loop(axis)
        block, size = self.block, k.print_size(self.simd_axis)
        self.emit(f"for (int64_t lane0 = 0; lane0 < {size}; lane0 += {block}) {{", "block of lanes")
        if not is_split:
            is_even = (static_size((self.simd_axis,)) or 1) % block == 0
            lanes = block if is_even else f"min_i64({block}, {size} - lane0)"
            self.emit(f"const int64_t lanes = {lanes};")

    def open_buffers(self) -> None:
        """Buffers for what later passes read again."""
        points = static_size(self.nest.body)
        for load in self.packed_loads:
            ctype = storage_type(load.dtype)
            self.emit(f"alignas(64) {ctype} {buffer_name(load.name)}[{points}][{self.block}];")
        for name in self.kernel.schedule.buffered_locals:
            ctype = value_ctype(self.nest.locals[name].dtype)
            self.emit(f"alignas(64) {ctype} {buffer_name(name)}[{points}][{self.block}];")

    # tiles

    def load_tiles(self) -> None:
        """Transposes what is contiguous along the body: a row in memory becomes a lane."""
        for number, load in enumerate(self.tiles.loads):
            ctype, source = storage_type(load.dtype), identifier(load.name)
            tile = f"{source}_tile{number or ''}"
            self.emit(f"alignas(64) {ctype} {tile}[{static_size(self.nest.body)}][{self.block}];")
            self.open_tile_rows()
            start, stride, row, count = self.print_tile(load.index[0])
            target = f"&{tile}[{row}][0], {self.block}"
            self.emit(f"transpose_tile({source} + {start}, {stride}, {target}, {count}, lanes);")
            self.close_tile_rows()
            flat = print_flat_index(self.nest.body, self.kernel)
            self.printer.buffers[load] = f"{tile}[{flat}][lane]"
        for store in self.tiles.stores:
            ctype = storage_type(store.tensor.dtype)
            points = static_size(self.nest.body)
            self.emit(f"alignas(64) {ctype} {tile_name(store)}[{points}][{self.block}];")

    def store_tiles(self, stores: list[Store]) -> None:
        """Transposes the results of a pass back into rows."""
        for store in (s for s in stores if s in self.tiles.stores):
            self.open_tile_rows()
            start, stride, row, count = self.print_tile(store.index)
            target = f"{self.kernel.output_name(store.tensor.name)} + {start}, {stride}"
            source = f"&{tile_name(store)}[{row}][0], {self.block}"
            self.emit(f"transpose_tile({source}, {target}, lanes, {count});")
            self.close_tile_rows()

    def open_tile_rows(self) -> None:
        for axis in self.nest.body[:-1]:
            self.kernel.open_loop(axis)

    def close_tile_rows(self) -> None:
        for _ in self.nest.body[:-1]:
            self.emit("}")

    def print_tile(self, index: Index) -> tuple[str, str, str, str]:
        """Where a part of a tile starts in memory, its row stride there, its first row, its length."""
        last = self.nest.body[-1]
        at_start = index.substitute({last: ZERO})
        stride = index.coefficient(self.simd_axis)
        assert stride is not None, "the lanes of a tile are apart"
        row = print_flat_index(self.nest.body, self.kernel).removesuffix(last.name) + "0"
        text = self.kernel.printer.print_index(stride)
        return self.print_at_first_lane(at_start), text, row, self.kernel.print_size(last)

    def print_buffered(self, name: str) -> str:
        """A buffered value at this point."""
        return f"{buffer_name(name)}[{print_flat_index(self.nest.body, self.kernel)}][lane]"

    def close_loops(self) -> None:
        for _ in self.nest.grid:
            self.emit("}")

    def open_lanes(self, comment: str = "") -> None:
        self.kernel.emit_pragma("omp simd")
        self.emit("for (int64_t lane = 0; lane < lanes; ++lane) {", comment)
        self.emit(f"const int64_t {self.simd_axis.name} = lane0 + lane;")

    # values of a lane

    def find_row_stores(self, step: int) -> list[Store]:
        return [
            s
            for s in self.nest.stores
            if not is_body_store(self.nest, s)
            and self.analysis.expression_ready_pass(s.value) == step
        ]

    def row_values(self, step: int) -> None:
        """Row locals and row stores that are ready after `step` passes."""
        stores = self.find_row_stores(step)
        roots: list[Expression] = [s.value for s in stores]
        for later in range(step, self.kernel.schedule.passes):
            roots += self.find_pass_roots(later)
        ready = [
            x
            for x in self.kernel.find_required_locals(roots)
            if self.analysis.ready_pass[x.name] <= step
            and not self.analysis.in_body[x.name]
            and x.reduction is None
            and x.name not in self.declared
        ]
        if not ready and not stores:
            return
        for x in ready:
            self.declare_array(x)
            self.declared.add(x.name)
        self.open_lanes()
        for x in ready:
            self.row_locals.add(x.name)
            value = self.printer.print_expression(x.expression)
            self.emit(f"{self.print_local(x.name)} = {value};")
        for store in stores:
            self.kernel.emit_store(store, self.printer)
        self.emit("}")

    def declare_array(self, x: Local, suffix: str = "", ctype: str | None = None) -> None:
        # g++ does not vectorize a loop that reads an array of bools beside floats
        ctype = ctype or ("int32_t" if x.dtype == torch.bool else value_ctype(x.dtype))
        self.emit(f"alignas(64) {ctype} {identifier(x.name)}{suffix}[{self.block}];")

    # a pass over the body

    def find_reductions(self, step: int) -> list[Local]:
        return [
            x
            for x in self.nest.locals.values()
            if x.role == "row_reduction" and self.analysis.ready_pass[x.name] == step + 1
        ]

    def find_stores(self, step: int) -> list[Store]:
        return [
            s
            for s in self.nest.stores
            if is_body_store(self.nest, s) and self.analysis.expression_ready_pass(s.value) == step
        ]

    def find_pass_roots(self, step: int) -> list[Expression]:
        roots: list[Expression] = [x.expression for x in self.find_reductions(step)]
        return roots + [s.value for s in self.find_stores(step)]

    def one_pass(self, step: int, bounds: tuple[str, str] | None = None) -> None:
        """One pass over the body, or over the part of its first loop between `bounds`."""
        reductions, stores = self.find_reductions(step), self.find_stores(step)
        if not reductions and not stores:
            return
        k = self.kernel
        ordered = [x for x in reductions if is_ordered(x)]
        self.declare_accumulators(reductions)
        *outer, last = self.nest.body
        for axis in outer:
            is_split = bounds is not None and axis is self.nest.body[0]
            k.open_loop(axis, "", *(bounds if is_split and bounds else ("0", None)))
        low, high = bounds if bounds and not outer else ("0", k.print_size(last))
        size, block = static_size((last,)), tuning.REDUCTION_BLOCK
        is_long = bool(ordered) and not is_one_block(size)
        if is_long:
            self.emit(f"for (int64_t block = {low}; block < {high}; block += {block}) {{")
            low, high = "block", f"min_i64({high}, block + {block})"
        if size is None or size > tuning.REDUCTION_LANES:
            self.reset_lanes(ordered)
        group = tuning.REDUCTION_LANES * tuning.COLUMN_UNROLL
        is_packing = step == 0 and bool(self.packed_loads)
        halves = self.find_half_loads(step)
        is_plain = bool(ordered) and not (stores or is_packing or halves)
        values = k.find_body_values(self.pass_roots, step)
        is_cheap = sum(x.flops for x in values) <= tuning.MAX_UNROLLED_FLOPS
        is_unrolled = is_plain and is_cheap and (size or group) >= group
        if is_unrolled:
            self.emit("{")
            low = self.unrolled_loop(step, reductions, (low, high), size)
        if low:
            label = f"pass {step + 1}" if k.schedule.passes > 1 else ""
            k.open_loop(last, label, low, high)
            self.prefetch(step)
            self.open_staging(stores)
            self.widen_halves(halves)
            self.open_lanes()
            self.point(step, reductions, stores)
            self.emit("}")
            self.flush_staging(stores)
            for load in halves:
                del self.printer.buffers[load]
            self.emit("}")
        if is_unrolled:
            self.emit("}")
        self.combine_accumulators(ordered)
        for _ in range(len(outer) + is_long):
            self.emit("}")
        self.store_tiles(stores)
        totals = [x for x in ordered if self.has_blocks()]
        if totals:
            self.open_lanes()
            for x in totals:
                self.emit(f"{identifier(x.name)}[lane] = {identifier(x.name)}_total[lane];")
            self.emit("}")

    # accumulators: `include/reductions.h` defines the order of operations

    def has_blocks(self) -> bool:
        """Is the body more than one block of a reduction?"""
        return len(self.nest.body) > 1 or not is_one_block(static_size(self.nest.body))

    def count_accumulators(self) -> int:
        """Accumulators of each lane."""
        size = static_size(self.nest.body[-1:])
        most = tuning.REDUCTION_LANES
        return most if size is None else max(min(size, most), 1)

    def declare_accumulators(self, reductions: list[Local]) -> None:
        for x in reductions:
            ctype = accumulator(x).ctype
            self.declare_array(x, "", ctype)
            self.row_locals.add(x.name)
            if is_ordered(x):
                count = self.count_accumulators()
                self.emit(f"alignas(64) {ctype} {identifier(x.name)}_acc[{count}][{self.block}];")
                if self.has_blocks():
                    self.declare_array(x, "_total", total_ctype(x))
                    self.reset([x], "_total")
        self.reset([x for x in reductions if not is_ordered(x)], "")

    def reset_lanes(self, ordered: list[Local]) -> None:
        if ordered:
            self.emit(f"for (int64_t k = 0; k < {tuning.REDUCTION_LANES}; ++k) {{")
            self.reset(ordered, "_acc[k]")
            self.emit("}")

    def combine_accumulators(self, ordered: list[Local]) -> None:
        """The end of a block."""
        if not ordered:
            return
        self.open_lanes("accumulators combined in halves")
        for x in ordered:
            name, a = identifier(x.name), accumulator(x)
            lanes = [f"{name}_acc[{k}][lane]" for k in range(self.count_accumulators())]
            value = print_lane_tree(a.combine, lanes)
            if self.has_blocks():
                self.emit(a.update.format(f"{name}_total[lane]", value) + ";")
            else:
                self.emit(f"{name}[lane] = {value};")
        self.emit("}")

    def unrolled_loop(
        self, step: int, reductions: list[Local], bounds: tuple[str, str], size: int | None
    ) -> str:
        """The innermost body loop, a few points of each accumulator at once. Returns where the rest starts."""
        low, high = bounds
        lanes, unroll = tuning.REDUCTION_LANES, tuning.COLUMN_UNROLL
        self.emit(f"int64_t group = {low};")
        self.emit(f"for (; group + {lanes * unroll} <= {high}; group += {lanes * unroll}) {{")
        self.emit(f"for (int64_t first = group; first < group + {lanes}; ++first) {{")
        self.open_lanes()
        self.kernel.emit_pragma(f"GCC unroll {unroll}")
        name = self.nest.body[-1].name
        last = f"first + {lanes * unroll}"
        self.emit(f"for (int64_t {name} = first; {name} < {last}; {name} += {lanes}) {{")
        self.point(step, reductions, [], "first")
        for _ in range(4):
            self.emit("}")
        return "" if size is not None and size % (lanes * unroll) == 0 else "group"

    def prefetch(self, step: int) -> None:
        """Prefetches what the first pass loads a few body points later."""
        if step == 0 and self.packed_loads:
            last = self.nest.body[-1]
            ahead = {last: from_atom(last) + as_index(tuning.COLUMN_PREFETCH_DISTANCE)}
            for load in self.packed_loads:
                index = self.print_at_first_lane(load.index[0].substitute(ahead))
                self.emit(f"prefetch({identifier(load.name)} + {index}, lanes);")

    # float16: the lanes of a point are converted before and after their loop

    def find_half_loads(self, step: int) -> list[Load]:
        """The loads of float16 along the lanes, at every point of a pass."""
        roots = [*self.pass_roots[step]]
        values = self.kernel.find_body_values(self.pass_roots, step)
        roots += [x.expression for x in values]
        found: dict[Load, None] = {}
        for part in (part for root in roots for part in iter_unmasked(root)):
            if isinstance(part, Load) and part.index and part.dtype == torch.float16:
                index = part.index[0]
                is_along = index.coefficient(self.simd_axis) == 1 and not index.indirect_indices()
                if is_along and part not in (*self.packed_loads, *self.printer.buffers):
                    found[part] = None
        return list(found)

    def widen_halves(self, loads: list[Load]) -> None:
        for number, load in enumerate(loads):
            name = f"{identifier(load.name)}{number or ''}_wide"
            source = f"{identifier(load.name)} + {self.print_at_first_lane(load.index[0])}"
            self.emit(f"alignas(64) float {name}[{self.block}];")
            self.emit(f"widen_block({name}, {source}, lanes);")
            self.printer.buffers[load] = f"{name}[lane]"

    def is_half(self, store: Store) -> bool:
        """Whether a result is stored as float16, along the lanes."""
        is_along = store.index.coefficient(self.simd_axis) == 1
        if store in self.tiles.stores or store.combine is not None:
            return False
        is_temporal = store.tensor.name not in self.kernel.schedule.nontemporal_stores
        return store.tensor.dtype == torch.float16 and is_along and is_temporal

    # staged stores: non-temporal ones, and float16

    def find_staged(self, stores: list[Store]) -> list[Store]:
        names = self.kernel.schedule.nontemporal_stores
        return [s for s in stores if s.tensor.name in names or self.is_half(s)]

    def open_staging(self, stores: list[Store]) -> None:
        for store in self.find_staged(stores):
            ctype = "float" if self.is_half(store) else storage_type(store.tensor.dtype)
            self.emit(f"alignas(64) {ctype} {staging_name(store)}[{self.block}];")

    def flush_staging(self, stores: list[Store]) -> None:
        for store in self.find_staged(stores):
            index = self.print_at_first_lane(store.index)
            target = f"{self.kernel.output_name(store.tensor.name)} + {index}"
            function = "narrow_block" if self.is_half(store) else "store_nontemporal"
            self.emit(f"{function}({target}, {staging_name(store)}, lanes);")

    def stage_value(self, store: Store, target: str) -> None:
        value = self.printer.print_expression(store.value)
        is_narrow = store.tensor.dtype in NARROW_FLOATS and not self.is_half(store)
        self.emit(f"store(&{target}, {value});" if is_narrow else f"{target} = {value};")

    def reset(self, reductions: list[Local], suffix: str) -> None:
        if not reductions:
            return
        self.kernel.emit_pragma("omp simd")
        self.emit("for (int64_t lane = 0; lane < lanes; ++lane) {")
        for x in reductions:
            self.emit(f"{identifier(x.name)}{suffix}[lane] = {accumulator(x).initial};")
        self.emit("}")

    def point(
        self, step: int, reductions: list[Local], stores: list[Store], first: str = ""
    ) -> None:
        """One point of a pass; `first` is the first one with the same accumulator, or the point itself."""
        self.pack_loads(step)
        buffered = self.kernel.find_buffered_locals(self.pass_roots, step)
        for local in self.kernel.find_body_values(self.pass_roots, step):
            name = identifier(local.name)
            if local.name in buffered:
                ctype = value_ctype(local.dtype)
                self.emit(f"const {ctype} {name} = {self.print_buffered(local.name)};")
                continue
            self.kernel.declare_local(local, self.printer)
            if local.name in self.kernel.schedule.buffered_locals:
                self.emit(f"{self.print_buffered(local.name)} = {name};")
        for x in reductions:
            self.accumulate(x, first or self.nest.body[-1].name)
        staged = self.find_staged(stores)
        for store in stores:
            if store in staged:
                self.stage_value(store, f"{staging_name(store)}[lane]")
            elif store in self.tiles.stores:
                flat = print_flat_index(self.nest.body, self.kernel)
                self.stage_value(store, f"{tile_name(store)}[{flat}][lane]")
            else:
                self.kernel.emit_store(store, self.printer)

    def accumulate(self, x: Local, position: str) -> None:
        name, a = identifier(x.name), accumulator(x)
        value = self.printer.print_expression(x.expression)
        size, most = static_size(self.nest.body[-1:]), tuning.REDUCTION_LANES
        if not is_ordered(x):
            self.emit(a.update.format(f"{name}[lane]", value) + ";")
        elif size is not None and size <= most:  # the only value of this accumulator
            self.emit(f"{name}_acc[{position}][lane] = {a.combine.format(a.initial, value)};")
        else:
            self.emit(a.update.format(f"{name}_acc[{position} & {most - 1}][lane]", value) + ";")

    def pack_loads(self, step: int) -> None:
        """The first pass copies its loads into buffers, where the later ones find them."""
        for load in self.packed_loads if step == 0 else ():
            buffered = self.print_buffered(load.name)
            source = f"{identifier(load.name)}[{self.printer.print_index(load.index[0])}]"
            # g++ vectorizes copies of integers, but not always of structs
            member = ".code" if load.dtype in NARROW_FLOATS else ""
            self.emit(f"{buffered}{member} = {source}{member};")
            self.printer.buffers[load] = buffered


def buffer_name(name: str) -> str:
    return f"{identifier(name)}_buffer"


def tile_name(store: Store) -> str:
    """The transposed buffer of a result along the body."""
    return f"{identifier(store.name)}_tile"
