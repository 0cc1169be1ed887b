"""C++ of row programs: one step of a row after the other, with values in row buffers.

    for each row (split among threads)
      probs_row[j] = …          elementwise, SIMD
      total = sum of probs_row  reductions
      topk_row[k] = …           sorts (`include/sort.h`)

Buffers are allocated once a thread.
"""

from __future__ import annotations

import itertools

import torch

from fulgurite.fuser.codegen.cpp.expressions import ExpressionPrinter, identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import (
    KernelWriter,
    accumulator,
    is_one_block,
    is_ordered,
    print_block_reduction,
    print_combined_blocks,
    print_flat_index,
    print_lane_tree,
    static_size,
    total_ctype,
)
from fulgurite.fuser.codegen.cpp.row_loops import (
    StepLoops,
    flatten_step_loads,
    merge_step_loops,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import count_elements
from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import Local, LoopNest, Store
from fulgurite.kernels.tuning import fuser_cpu as tuning

MAX_PACKED_POSITION = 1 << 16  # of a 16-bit key in 32 bits
MAX_UNROLLED_POINTS = 4  # of a reduction
KEY_CTYPES = {torch.int16: "uint32_t", torch.int32: "uint64_t", torch.int64: "SortPair"}


class RowPrinter(ExpressionPrinter):
    """Prints loads of steps as elements of their row buffers."""

    def __init__(self, nest: LoopNest) -> None:
        super().__init__(identifier)
        self.nest = nest

    def print_load(self, load: Load) -> str:
        if not load.index or not self.nest.is_local(load):
            return super().print_load(load)
        step = self.nest.locals[load.name]
        if len(load.index) == len(step.axes) > 1:
            load = flatten_step_loads(self.nest, load)  # type: ignore[assignment]
        return f"{buffer_name(step)}[{self.print_index(load.index[0])}]"


def buffer_name(step: Local) -> str:
    return f"{identifier(step.name)}_row"


def key_dtype(step: Local) -> torch.dtype:
    """The dtype of an argsort's keys; wider, if positions of the row need more bits."""
    (axis,) = step.reduced_axes
    dtype = step.expression.dtype
    is_short = axis.size.is_constant and axis.size.constant <= MAX_PACKED_POSITION
    return torch.int32 if dtype == torch.int16 and not is_short else dtype


def write_row_program(kernel: KernelWriter) -> None:
    kernel.open_function()
    RowProgramWriter(kernel).write()
    kernel.close_function()


class RowProgramWriter:
    """Writes the text of a row program, from the outside in."""

    def __init__(self, kernel: KernelWriter) -> None:
        self.kernel, self.nest, self.emit = kernel, kernel.nest, kernel.emit
        self.printer = RowPrinter(self.nest)
        self.steps = list(self.nest.locals.values())
        self.stores: dict[str, list[Store]] = {}
        for store in self.nest.stores:
            assert isinstance(store.value, Load), f"{store} stores no step"
            self.stores.setdefault(store.value.name, []).append(store)
        read = {local.name for s in self.steps for local in self.nest.references(s.expression)}
        self.buffered = {s.name: s for s in self.steps if s.axes and s.name in read}
        self.sorts = [s for s in self.steps if s.rank is not None]

    def write(self) -> None:
        k, grid = self.kernel, self.nest.grid
        num_threads = self.print_num_threads() if grid else None
        if num_threads:
            k.emit_pragma(f"omp parallel num_threads({num_threads})")
        self.emit("{")
        self.allocate()
        if num_threads:
            collapse = f" collapse({len(grid)})" if len(grid) > 1 else ""
            k.emit_pragma(f"omp for{collapse} schedule(static)")
        for axis in grid:
            k.open_loop(axis)
        for step in self.steps:
            self.step(step)
        for _ in grid:
            self.emit("}")
        self.emit("free(scratch);")
        self.emit("}")

    def print_num_threads(self) -> str | None:
        """The number of threads that the rows are worth; None for a small kernel."""
        work = sum(self.count_work(step) for step in self.steps)
        rows = indices.product([axis.size for axis in self.nest.grid])
        grain = max(8 * tuning.THREAD_GRAIN // max(work, 1), 1)
        if rows.is_constant and rows.constant < 2 * grain:
            return None
        return f"choose_num_threads({self.printer.print_index(rows)}, {grain}, max_threads)"

    def count_work(self, step: Local) -> int:
        """Operations of a step of one row. Sorts take about 32 for each element."""
        points = count_elements(tuple(axis.size for axis in (*step.axes, *step.reduced_axes)))
        if step.rank is None:
            return points * max(step.flops, 1)
        return count_elements(tuple(axis.size for axis in step.reduced_axes)) * (step.flops + 32)

    # buffers

    def allocate(self) -> None:
        """Declares a thread's buffers, one after the other in one allocation."""
        sizes = [(buffer_name(s), value_ctype(s.dtype), s.axes) for s in self.buffered.values()]
        for sort in self.sorts:
            name, ctype = identifier(sort.name), KEY_CTYPES[key_dtype(sort)]
            outer = self.key_axes(sort)
            sizes += [(f"{name}_keys", ctype, outer), (f"{name}_keys_other", ctype, outer)]
        total = " + ".join(f"align_64({self.print_bytes(c, axes)})" for _, c, axes in sizes)
        self.emit(f"char* const scratch = (char*)malloc({total or 0} + 64);")
        self.emit("char* free_scratch = (char*)align_64((int64_t)scratch);")
        for name, ctype, axes in sizes:
            self.emit(f"{ctype}* const __restrict {name} = ({ctype}*)free_scratch;")
            self.emit(f"free_scratch += align_64({self.print_bytes(ctype, axes)});")

    def key_axes(self, sort: Local) -> tuple[Axis, ...]:
        return sort.reduced_axes

    def print_bytes(self, ctype: str, axes: tuple[Axis, ...]) -> str:
        return f"({self.kernel.print_product(axes)}) * sizeof({ctype})"

    # steps

    def step(self, step: Local) -> None:
        if step.rank is not None:
            self.sort(step, step.rank)
            return
        loops = StepLoops(step, tuple(self.stores.get(step.name, ())))
        loops = merge_step_loops(self.nest, loops)
        points = static_size(loops.step.reduced_axes)
        if step.reduction is None:
            self.open_loops(loops.step.axes, "simd" if step.axes else "")
            self.define(loops, self.printer.print_expression(loops.step.expression))
            self.close_loops(loops.step.axes)
        elif not is_ordered(step):
            self.reduce_in_any_order(loops)
        elif step.axes and points is not None and points <= MAX_UNROLLED_POINTS:
            self.reduce_unrolled(loops)
        else:
            self.reduce(loops)

    def open_loops(self, axes: tuple[Axis, ...], pragma: str = "") -> None:
        for axis in axes:
            if pragma and axis is axes[-1]:
                self.kernel.emit_pragma(f"omp {pragma}")
            self.kernel.open_loop(axis)

    def close_loops(self, axes: tuple[Axis, ...]) -> None:
        for _ in axes:
            self.emit("}")

    def define(self, loops: StepLoops, text: str) -> None:
        """One value of a step: into its buffer, and to memory where the kernel stores it."""
        step = loops.step
        name = identifier(step.name)
        self.emit(f"const {value_ctype(step.dtype)} {name} = {text};")
        if step.name in self.buffered:
            self.emit(f"{buffer_name(step)}[{print_flat_index(step.axes, self.kernel)}] = {name};")
        plain = ExpressionPrinter(identifier)
        for store in loops.stores:
            value = Load(step.name, (), store.value.dtype)
            self.kernel.emit_store(Store(store.tensor, store.index, value), plain)

    def reduce_in_any_order(self, loops: StepLoops) -> None:
        """A reduction of integers or bools."""
        step = loops.step
        name, a = identifier(step.name), accumulator(step)
        self.open_loops(step.axes)
        self.emit(f"{a.ctype} {name}_total = {a.initial};")
        self.open_loops(step.reduced_axes, f"simd reduction({a.omp_operator}:{name}_total)")
        value = self.printer.print_expression(step.expression)
        self.emit(a.update.format(f"{name}_total", value) + ";")
        self.close_loops(step.reduced_axes)
        self.define(loops, f"{name}_total")
        self.close_loops(step.axes)

    def reduce(self, loops: StepLoops) -> None:
        """A reduction of floats, block by block: `include/reductions.h`."""
        step, chunk = loops.step, tuning.REDUCTION_CHUNK
        name, a = identifier(step.name), accumulator(step)
        *outer, inner = step.reduced_axes
        size, text = static_size((inner,)), self.kernel.print_size(inner)
        is_long = size is None or size > chunk
        has_total = bool(outer) or not is_one_block(size)
        start, end, count = ("0", text, text)
        if is_long:
            start, end = "block", f"min_i64({text}, block + {chunk})"
            count = f"min_i64({chunk}, {text} - block)"
        self.open_loops(step.axes)
        if has_total:
            self.emit(f"{total_ctype(step)} {name}_total = {a.initial};")
        self.open_loops(tuple(outer))
        if is_long:
            self.emit(f"for (int64_t block = 0; block < {text}; block += {chunk}) {{")
        values = f"{name}_values"
        length = chunk if is_long else max(size or 1, 1)
        self.emit(f"alignas(64) {a.ctype} {values}[{length}];")
        self.kernel.emit_pragma("omp simd")
        self.kernel.open_loop(inner, "", start, end)
        position = f"{inner.name} - block" if is_long else inner.name
        self.emit(f"{values}[{position}] = {self.printer.print_expression(step.expression)};")
        self.emit("}")
        if has_total:
            total = print_combined_blocks(step, f"{name}_total", values, count)
            self.emit(f"{name}_total = {total};")
            self.close_loops((*outer, *((inner,) if is_long else ())))
        result = f"{name}_total" if has_total else print_block_reduction(step, values, int(count))
        self.define(loops, result)
        self.close_loops(step.axes)

    def reduce_unrolled(self, loops: StepLoops) -> None:
        """A reduction of a few points: unrolled, SIMD along the values."""
        step = loops.step
        a = accumulator(step)
        *outer, inner = step.reduced_axes
        self.open_loops(step.axes, "simd")
        result = ""
        for point in itertools.product(*(range(axis.size.constant) for axis in outer)):
            at = dict(zip(outer, map(Index, point), strict=True))
            values = [
                step.expression.substitute({**at, inner: Index(k)})
                for k in range(inner.size.constant)
            ]
            texts = [a.combine.format(a.initial, self.printer.print_expression(v)) for v in values]
            block = print_lane_tree(a.combine, texts) if texts else a.initial
            block = f"({total_ctype(step)}){block}" if outer else block
            result = a.combine.format(result, block) if result else block
        self.define(loops, result or a.initial)
        self.close_loops(step.axes)

    def sort(self, step: Local, rank: Index) -> None:
        """Packs the keys, sorts them as far as the ranks need, and unpacks positions."""
        name, (axis,) = identifier(step.name), step.reduced_axes
        ranked = tuple(a for a in step.axes if a in rank.axes())
        outer = tuple(a for a in step.axes if a not in ranked)
        self.open_loops(outer)
        self.open_loops((axis,), "simd")
        ctype = value_ctype(key_dtype(step))
        key = self.printer.print_expression(step.expression)
        self.emit(f"{name}_keys[{axis.name}] = pack_sort_key(({ctype}){key}, {axis.name});")
        self.close_loops((axis,))
        low = rank.substitute(dict.fromkeys(ranked, indices.ZERO))
        high = rank.substitute({a: a.size - 1 for a in ranked}) + 1
        bounds = ", ".join(self.printer.print_index(i) for i in (axis.size, low, high))
        self.emit(f"sort_ranks({name}_keys, {name}_keys_other, {bounds});")
        self.open_loops(ranked)
        loops = StepLoops(step, tuple(self.stores.get(step.name, ())))
        self.define(loops, f"sorted_position({name}_keys[{self.printer.print_index(rank)}])")
        self.close_loops(ranked)
        self.close_loops(outer)
