"""The Triton text of one scheduled nest: a kernel, and a second one that adds up parts where there are.

In: a `GpuSchedule`. Out: `Stage`s in the order they run. Three ways through the body of a nest: held
(the row is in registers, every value once), looped (walked in blocks, once a pass) and none (pointwise).
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.device import Device
from fulgurite.fuser.codegen.triton.multi_pass import (
    looped,
    pass_values,
    pass_work,
    row_values,
    scan,
)
from fulgurite.fuser.codegen.triton.op_table import APPROXIMATIONS
from fulgurite.fuser.codegen.triton.partial_sums import (
    add_to_part,
    clear_parts,
    close_parts,
    finish_nest,
    open_parts,
)
from fulgurite.fuser.codegen.triton.source_lines import Loop
from fulgurite.fuser.codegen.triton.values import bare
from fulgurite.fuser.codegen.triton.writer import Writer
from fulgurite.fuser.frontend.input_mutations import needs_barrier
from fulgurite.fuser.ir.index import Axis, Index, Symbol
from fulgurite.fuser.ir.loop_nest import Local
from fulgurite.fuser.ir.statement import Tensor
from fulgurite.fuser.schedule.gpu.choose import GpuSchedule, finishing

FORMULAS = 24


@dataclass(frozen=True)
class Stage:
    """One function: its text, its arguments in order, and how it is launched."""

    name: str
    text: str
    tensors: tuple[Tensor, ...]
    symbols: tuple[Symbol, ...]
    grid: tuple[Index, Index]
    warps: int
    stages: int
    asserts: bool
    functions: frozenset[str]
    writes: frozenset[str] = frozenset()  # the tensors that are results
    parts: tuple[Tensor, ...] = ()  # memory between this stage and the next
    wide: bool = False
    updates: tuple[str, ...] = ()  # those of the writes that are read, too
    # functions take denormals for zero, which approximations of narrow floats do
    flushes: bool = False


def write_stages(name: str, schedule: GpuSchedule, device: Device, wide: bool) -> list[Stage]:
    writer = Writer(name, schedule, wide)
    stages = [write(writer)]
    if schedule.programs or schedule.split:
        stages += _finishes(name, writer, device, wide)
    return stages


def _finishes(name: str, writer: Writer, device: Device, wide: bool) -> list[Stage]:
    """Kernels that add parts up: one for what is stored at points, one for single values."""
    late = writer.late_stores()
    found = []
    for suffix, stores in (
        ("finish", [s for s in late if s.index.axes()]),
        ("finish_all", [s for s in late if not s.index.axes()]),
    ):
        if stores:
            nest, axis = finish_nest(writer, stores)
            found.append(write(Writer(f"{name}_{suffix}", finishing(nest, axis, device), wide)))
    return found


def write(w: Writer) -> Stage:
    open_grid(w)
    if w.schedule.programs:
        walk(w)
    elif not w.nest.body:
        held(w)
    elif w.schedule.looped:
        looped(w)
    else:
        held_axis(w)
        held(w)
    return finished(w)


def finished(w: Writer) -> Stage:
    """The function, once all its lines are there."""
    b = w.body
    assert len(b.levels) == 1, "a loop was left open"
    memory = w.nest.memory
    results = [n for n in w.writes if n not in w.updates]
    tensors = [memory[n] for n in w.reads] + [memory[n] for n in results]
    tensors += w.parts.values()
    names = [b.names[n] for n in w.reads] + [w.outputs[n] for n in results]
    names += w.part_names.values()
    symbols = w._symbols()
    head = [f"# {formula}"[:160] for formula in w.nest.formulas[:FORMULAS]]
    head += [f"# {w.schedule}", "@triton.jit"]
    head.append(f"def {w.name}({', '.join([*names, *(s.name for s in symbols)])}):")
    text = "\n".join([*head, *("    " + line for line in b.levels[0].all)])
    s = w.schedule
    return Stage(
        w.name,
        text,
        tuple(tensors),
        tuple(symbols),
        w.grid_size(),
        s.warps,
        s.stages,
        b.asserts,
        frozenset(b.functions),
        frozenset(w.writes),
        tuple(w.parts.values()),
        w.wide,
        tuple(w.updates),
        b.fast and any(name in text for name in APPROXIMATIONS),
    )


def open_grid(w: Writer) -> None:
    b, grid = w.body, w.nest.grid
    if w.schedule.programs:
        b.head("program = tl.program_id(0)")
        return
    if len(grid) == 1:
        grid_axis(w, grid[0], "tl.program_id(0)")
    elif grid:
        b.head("program = tl.program_id(0)")
        rest = "program"
        for axis in reversed(grid[1:]):
            count = b.index(w.count(axis))
            if count == "1":
                grid_axis(w, axis, "0")
                continue
            count = count if count.isalnum() else f"({count})"
            grid_axis(w, axis, f"{rest} % {count}")
            rest = f"{rest} // {count}"
        grid_axis(w, grid[0], rest)


def grid_axis(w: Writer, axis: Axis, program: str) -> None:
    b = w.body
    wide = ".to(tl.int64)" if w.wide else ""
    place = f"({program})" if wide and " " in program else program
    if axis not in w.schedule.blocks:
        b.head(f"{axis.name} = {place}{wide}")
        b.loops[axis] = Loop(axis, 0, b.depth)
        return
    block = w.schedule.sizes[axis]
    place = f"({program})" if "//" in program or (wide and " " in program) else program
    text = f"{place}{wide} * {block} + tl.arange(0, {block})"
    if program == "0":
        text = f"tl.arange(0, {block}){wide}"
    w.block_axis(axis, text, block)


def held_axis(w: Writer) -> None:
    """The whole body at once."""
    (axis,) = w.nest.body
    block = w.schedule.sizes[axis]
    wide = ".to(tl.int64)" if w.wide else ""
    w.block_axis(axis, f"tl.arange(0, {block}){wide}", block)


def held(w: Writer) -> None:
    """Values in the order they can be computed, reductions among them, then stores."""
    wanted = w.wanted(w.roots())
    partial = {x.name for x in w.partial}
    for local in w.nest.locals.values():
        if local.name in w.body.level_of:
            continue  # a tile of a matrix product
        if local.name in partial:
            add_to_part(w, local)
        elif local.name in wanted:
            if local.reduction is None:
                w.declare(local)
            elif local.role == "scan":
                scan(w, local)
            else:
                reduce_now(w, local)
    if w.updates and needs_barrier(w.nest):
        w.body.line("tl.debug_barrier()")
    for store in w.main_stores():
        w.store(store)


def held_narrow(w: Writer) -> None:
    """The same with less in registers: after each reduction, values are made again of what was read."""
    b = w.body
    b.remade = True
    for step in range(w.schedule.passes):
        b.walk = step
        row_values(w, step)
        sums, inner, stores = pass_work(w, step)
        pass_values(w, [x.expression for x in (*sums, *inner)])
        for x in inner:
            add_to_part(w, x)
        for x in sums:
            reduce_now(w, x)
        pass_values(w, [s.value for s in stores])
        for store in stores:
            w.store(store)
        w.forget_points()
    row_values(w, w.schedule.passes)


def reduce_now(w: Writer, x: Local) -> None:
    b = w.body
    (axis,) = w.nest.body
    axes = b.axes(x.expression)
    text = w.value_of(x, w.nest.body)
    if axis not in axes and not b.loops[axis].mask:
        text = f"tl.broadcast_to({bare(text)}, {w.block_shape()})"
    name = b.fresh(x.name)
    b.line(f"{name} = {w.reduced(x, text, axis)}")
    w.known(x, name, b.depth, axes - {axis})


def walk(w: Writer) -> None:
    """A fixed number of programs over all rows."""
    b = w.body
    (grid,) = w.nest.grid
    block = w.schedule.sizes.get(grid, 1) if grid in w.schedule.blocks else 1
    if w.nest.body and not w.schedule.looped:
        held_axis(w)
    accumulators = open_parts(w)
    scalar = grid not in w.schedule.blocks and not w.wide
    first = grid.name if scalar else b.fresh(f"{grid.name}0")
    size, programs = b.index(grid.size), w.schedule.programs
    start = f"program * {block}" if block > 1 else "program"
    clear_parts(w, start, size)
    wide = ".to(tl.int64)" if w.wide else ""
    ahead = 1 if w.schedule.looped else w.schedule.stages
    steps = w.range(start, size, programs * block, ahead)
    with b.loop(f"for {first} in {steps}:"):
        if grid in w.schedule.blocks:
            w.block_axis(grid, f"{first} + tl.arange(0, {block}){wide}", block)
        else:
            if not scalar:
                b.head(f"{grid.name} = {first}{wide}")
            b.loops[grid] = Loop(grid, 0, b.depth)
        w.accumulators = accumulators
        w.first = f"{first} == {start}"
        if w.schedule.looped:
            looped(w)
            if any(x.role == "colsum" for x in w.partial):
                b.line("tl.debug_barrier()")
        else:
            (held_narrow if w.schedule.remade else held)(w)
        w.forget(b.depth)
    close_parts(w, accumulators)


__all__ = ["Stage", "write_stages"]
