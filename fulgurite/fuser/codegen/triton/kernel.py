"""The Triton text of one scheduled nest: a kernel, and a second one that combines partials.

In: a `GpuSchedule`. Out: `TritonKernelSource`s in the order they run. A kernel goes through the
body of its nest in one of three ways: there is none (pointwise), a single block (every value is
computed once), or a loop over blocks, once a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.fuser.codegen.formulas import print_formulas
from fulgurite.fuser.codegen.triton.multi_pass import (
    emit_looped_body,
    emit_point_values,
    emit_row_values,
    emit_scan,
    find_pass_work,
)
from fulgurite.fuser.codegen.triton.op_table import APPROXIMATIONS
from fulgurite.fuser.codegen.triton.partials import (
    accumulate_partial,
    build_combine_nest,
    clear_partials,
    open_partials,
    store_partials,
)
from fulgurite.fuser.codegen.triton.row_program import RowProgramWriter
from fulgurite.fuser.codegen.triton.scatter import emit_indexed_store
from fulgurite.fuser.codegen.triton.source_lines import AxisBinding
from fulgurite.fuser.codegen.triton.values import as_factor, strip_parentheses
from fulgurite.fuser.codegen.triton.writer import KernelWriter
from fulgurite.fuser.ir.index import Axis, Index, Symbol
from fulgurite.fuser.ir.loop_nest import Local
from fulgurite.fuser.ir.random_seed import SEED_ADDRESS
from fulgurite.fuser.ir.statement import Tensor
from fulgurite.fuser.schedule.gpu.base import GpuSchedule
from fulgurite.fuser.schedule.gpu.persistent import schedule_combine
from fulgurite.fuser.segment.inplace import needs_barrier

# a kernel that a CUDA graph captured reads its seed; the address is 0 otherwise (`ir/random_seed.py`)
SEED_LINES = [
    "seed_ptr = random_seed_address.to(tl.int64).to(tl.pointer_type(tl.int64))",
    "random_seed += tl.load(seed_ptr, mask=random_seed_address != 0, other=0)",
]


@dataclass(frozen=True)
class TritonKernelSource:
    """One Triton function: its text, its arguments in order, and how it is launched."""

    name: str
    text: str
    tensors: tuple[Tensor, ...]
    symbols: tuple[Symbol, ...]
    grid: tuple[Index, Index]
    num_warps: int
    num_stages: int
    has_asserts: bool
    functions: frozenset[str]  # device functions that it calls
    writes: frozenset[str] = frozenset()  # the tensors that are results
    partials: tuple[Tensor, ...] = ()  # memory between this kernel and its combine kernel
    int64_index: bool = False
    updates: tuple[str, ...] = ()  # those of the writes that are also read
    flushes_denormals: bool = False  # fast-math functions do
    fused: tuple[str, ...] = ()  # names of the kernels that run in this launch (`horizontal.py`)


def write_kernels(name: str, schedule: GpuSchedule, int64_index: bool) -> list[TritonKernelSource]:
    """The kernel of a schedule, and its combine kernels."""
    if schedule.kind == "row_program":
        program = RowProgramWriter(name, schedule, int64_index)
        program.write()
        return [build_source(program)]
    writer = KernelWriter(name, schedule, int64_index)
    sources = [write_kernel(writer)]
    if not (schedule.num_programs or schedule.num_splits):
        return sources
    stores = writer.combine_stores()
    for suffix, group in (
        ("combine", [s for s in stores if s.index.axes()]),
        ("combine_all", [s for s in stores if not s.index.axes()]),
    ):
        if group:
            nest, partials = build_combine_nest(writer, group)
            combine = schedule_combine(nest, partials)
            sources.append(write_kernel(KernelWriter(f"{name}_{suffix}", combine, int64_index)))
    return sources


def write_kernel(w: KernelWriter) -> TritonKernelSource:
    emit_program_ids(w)
    if w.schedule.num_programs:
        emit_persistent_loop(w)
    elif not w.nest.body:
        emit_single_block(w)
    elif w.schedule.is_looped:
        emit_looped_body(w)
    else:
        emit_body_axis(w)
        emit_single_block(w)
    return build_source(w)


def build_source(w: KernelWriter) -> TritonKernelSource:
    """The function, once all its lines are there."""
    b = w.body
    assert len(b.blocks) == 1, "a loop was left open"
    memory = w.nest.memory
    results = [n for n in w.writes if n not in w.updates]
    tensors = [memory[n] for n in w.reads] + [memory[n] for n in results]
    tensors += w.partials.values()
    names = [b.names[n] for n in w.reads] + [w.outputs[n] for n in results]
    names += w.partial_names.values()
    symbols = w.find_symbols()
    head = [*print_formulas(w.nest, "#"), f"# {w.schedule}", "@triton.jit"]
    head.append(f"def {w.name}({', '.join([*names, *(s.name for s in symbols)])}):")
    head += ["    " + line for line in SEED_LINES if SEED_ADDRESS in symbols]
    text = "\n".join([*head, *("    " + line for line in b.blocks[0].all_lines)])
    return TritonKernelSource(
        w.name,
        text,
        tuple(tensors),
        tuple(symbols),
        w.grid_size(),
        w.schedule.num_warps,
        w.schedule.num_stages,
        b.has_asserts,
        frozenset(b.functions),
        writes=frozenset(w.writes),
        partials=tuple(w.partials.values()),
        int64_index=w.int64_index,
        updates=tuple(w.updates),
        flushes_denormals=b.fast_math and any(name in text for name in APPROXIMATIONS),
    )


def emit_program_ids(w: KernelWriter) -> None:
    """Binds the loops of the grid to program ids."""
    b, grid = w.body, w.nest.grid
    if w.schedule.num_programs:
        b.emit_header("program = tl.program_id(0)")
        return
    if len(grid) == 1:
        bind_grid_axis(w, grid[0], "tl.program_id(0)")
    elif grid:
        b.emit_header("program = tl.program_id(0)")
        rest = "program"
        for axis in reversed(grid[1:]):
            count = b.print_index(w.count_programs(axis))
            if count == "1":
                bind_grid_axis(w, axis, "0")
                continue
            count = as_factor(count)
            bind_grid_axis(w, axis, f"{rest} % {count}")
            rest = f"{rest} // {count}"
        bind_grid_axis(w, grid[0], rest)


def bind_grid_axis(w: KernelWriter, axis: Axis, program: str) -> None:
    """Binds one loop of the grid; `program` is this program's number along it."""
    b, int64 = w.body, w.print_int64()
    text = f"({program})" if int64 and " " in program else program
    if axis not in w.schedule.block_axes:
        b.emit_header(f"{axis.name} = {text}{int64}")
        b.bindings[axis] = AxisBinding(axis, 0, b.depth)
        return
    block = w.schedule.block_sizes[axis]
    text = f"({program})" if "//" in program or (int64 and " " in program) else program
    positions = f"{text}{int64} * {block} + tl.arange(0, {block})"
    if program == "0":
        positions = f"tl.arange(0, {block}){int64}"
    w.bind_block_axis(axis, positions, block)


def emit_body_axis(w: KernelWriter) -> None:
    """Binds the body's axis to a single block."""
    (axis,) = w.nest.body
    block = w.schedule.block_sizes[axis]
    w.bind_block_axis(axis, f"tl.arange(0, {block}){w.print_int64()}", block)


def emit_single_block(w: KernelWriter) -> None:
    """Values in an order they can be computed in, reductions among them, then stores."""
    used = w.find_used_locals(w.find_roots())
    partials = {x.name for x in w.partial_locals}
    for local in w.nest.locals.values():
        if local.name in w.body.depth_of:
            continue  # the accumulator of a GEMM tile
        if local.name in partials:
            accumulate_partial(w, local)
        elif local.name in used:
            if local.reduction is None:
                w.declare_local(local)
            elif local.role == "scan":
                emit_scan(w, local)
            else:
                emit_reduction(w, local)
    if w.updates and needs_barrier(w.nest):
        w.body.emit("tl.debug_barrier()")
    for store in w.main_stores():
        if store.combine is not None:
            emit_indexed_store(w, store)
        else:
            w.emit_store(store)


def emit_rematerialized(w: KernelWriter) -> None:
    """The same with fewer registers: values are rematerialized after each reduction."""
    b = w.body
    b.rematerializes = True
    for step in range(w.schedule.passes):
        b.pass_number = step
        emit_row_values(w, step)
        work = find_pass_work(w, step)
        emit_point_values(w, [x.expression for x in (*work.reductions, *work.partials)])
        for x in work.partials:
            accumulate_partial(w, x)
        for x in work.reductions:
            emit_reduction(w, x)
        emit_point_values(w, [s.value for s in work.stores])
        for store in work.stores:
            w.emit_store(store)
        w.forget_body_values()
    emit_row_values(w, w.schedule.passes)


def emit_reduction(w: KernelWriter, x: Local) -> None:
    """A reduction over the body, which is in one block."""
    b = w.body
    (axis,) = w.nest.body
    axes = b.find_axes(x.expression)
    text = w.print_reduction_input(x, w.nest.body)
    if axis not in axes and not b.bindings[axis].mask:
        text = f"tl.broadcast_to({strip_parentheses(text)}, {w.print_block_shape()})"
    name = b.unique_name(x.name)
    b.emit(f"{name} = {w.print_reduction(x, text, axis)}")
    w.define_local(x, name, b.depth, axes - {axis})


def emit_persistent_loop(w: KernelWriter) -> None:
    """A fixed number of programs, each with a loop over its rows."""
    b = w.body
    (grid,) = w.nest.grid
    is_block = grid in w.schedule.block_axes
    block = w.schedule.block_sizes[grid] if is_block else 1
    if w.nest.body and not w.schedule.is_looped:
        emit_body_axis(w)
    accumulators = open_partials(w)
    is_scalar = not is_block and not w.int64_index
    first = grid.name if is_scalar else b.unique_name(f"{grid.name}0")
    size = b.print_index(grid.size)
    start = f"program * {block}" if block > 1 else "program"
    clear_partials(w, start, size)
    num_stages = 1 if w.schedule.is_looped else w.schedule.num_stages
    steps = w.print_range(start, size, w.schedule.num_programs * block, num_stages)
    with b.indented(f"for {first} in {steps}:"):
        if is_block:
            positions = f"{first} + tl.arange(0, {block}){w.print_int64()}"
            w.bind_block_axis(grid, positions, block)
        else:
            if not is_scalar:
                b.emit_header(f"{grid.name} = {first}{w.print_int64()}")
            b.bindings[grid] = AxisBinding(grid, 0, b.depth)
        w.accumulators = accumulators
        w.is_first_row = f"{first} == {start}"
        if w.schedule.is_looped:
            emit_looped_body(w)
            if any(x.role == "column_reduction" for x in w.partial_locals):
                b.emit("tl.debug_barrier()")
        elif w.schedule.rematerializes:
            emit_rematerialized(w)
        else:
            emit_single_block(w)
        w.forget_values(b.depth)
    store_partials(w, accumulators)
