"""Partials: reductions that programs store in memory, and the kernel that combines them.

In: a `KernelWriter` of a persistent kernel or of a split reduction. Out: lines that accumulate and
store a program's partials, and `build_combine_nest`, what remains to do with them. Partials are
combined in a fixed order: results are the same every time.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.fuser.codegen.triton.values import as_factor
from fulgurite.fuser.codegen.triton.welford import merge_welford_partials
from fulgurite.fuser.codegen.triton.writer import (
    KernelWriter,
    accumulator_type,
    initial_value,
    print_accumulate,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Load, walk
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import Local, LoopNest, Store
from fulgurite.fuser.schedule.gpu.base import flatten_loops


def accumulates_in_memory(w: KernelWriter, x: Local) -> bool:
    """Sums over rows that are too long for registers are accumulated in memory."""
    return x.role == "column_reduction" and w.schedule.is_looped


def is_row_scalar(x: Local) -> bool:
    """Does the reduction take one value a row?"""
    return x.role == "full_reduction" and not x.over_body


def open_partials(w: KernelWriter) -> dict[str, str]:
    """Accumulators in registers, by the reduction's name."""
    b = w.body
    found: dict[str, str] = {}
    for x in w.partial_locals:
        if accumulates_in_memory(w, x):
            continue
        found[x.name] = b.unique_name(f"{x.name}_partial")
        shape = w.print_block_shape()
        if is_row_scalar(x):
            sizes = w.schedule.block_sizes
            dimensions = [str(sizes[a]) if a in w.nest.grid else "1" for a in b.block_axes]
            has_rows = any(a in w.nest.grid for a in b.block_axes)
            shape = f"[{', '.join(dimensions)}]" if has_rows else "[]"
        b.emit(f"{found[x.name]} = tl.full({shape}, {initial_value(x)}, {accumulator_type(x)})")
    return found


def clear_partials(w: KernelWriter, start: str, size: str) -> None:
    """Clears partials in memory of a program without rows, where the number of rows is dynamic."""
    in_memory = [x for x in w.partial_locals if accumulates_in_memory(w, x)]
    if not in_memory or w.nest.grid[0].size.is_constant:
        return
    b = w.body
    (axis,) = w.nest.body
    block, length = w.schedule.block_sizes[axis], b.print_index(axis.size)
    first = b.unique_name(f"{axis.name}0")
    loop = f"for {first} in range(0, {length}, {block}):"
    with b.indented(f"if {start} >= {size}:"), b.indented(loop):
        offset = b.unique_name("offset")
        b.emit(f"{offset} = {first} + tl.arange(0, {block})")
        for x in in_memory:
            pointer = f"{w.partial_names[x.name]} + program * {as_factor(length)} + {offset}"
            cleared = f"tl.full([{block}], {initial_value(x)}, {accumulator_type(x)})"
            b.emit(f"tl.store({pointer}, {cleared}, mask={offset} < {length})")


def accumulate_partial(w: KernelWriter, x: Local) -> None:
    b = w.body
    value = w.print_reduction_input(x, w.nest.grid if is_row_scalar(x) else w.nest.axes)
    if not accumulates_in_memory(w, x):
        b.emit(print_accumulate(b, x, w.accumulators[x.name], value))
        return
    (axis,) = w.nest.body
    pointer = f"{w.partial_names[x.name]} + program * {b.print_index(axis.size)} + {axis.name}"
    mask = f", mask={b.bindings[axis].mask}" if b.bindings[axis].mask else ""
    partial = b.unique_name("partial")
    b.emit(f"{partial} = tl.load({pointer}{mask})")
    b.emit(f"{partial} = tl.where({w.is_first_row}, {initial_value(x)}, {partial})")
    b.emit(print_accumulate(b, x, partial, value))
    b.emit(f"tl.store({pointer}, {partial}{mask})")


def store_partials(w: KernelWriter, accumulators: dict[str, str]) -> None:
    """Reduces the accumulators of a persistent kernel and stores them."""
    b = w.body
    for x in w.partial_locals:
        if accumulates_in_memory(w, x):
            continue
        name = accumulators[x.name]
        is_scalar = x.role == "full_reduction" and x.over_body
        for axis in [a for a in b.block_axes if a in w.nest.grid or is_scalar]:
            b.emit(f"{name} = {w.print_reduction(x, name, axis).removesuffix(' != 0')}")
        pointer = f"{w.partial_names[x.name]} + program"
        mask = ""
        if x.role == "column_reduction":
            (axis,) = w.nest.body
            pointer += f" * {b.print_index(axis.size)} + {axis.name}"
            mask = f", mask={b.bindings[axis].mask}" if b.bindings[axis].mask else ""
        elif len(b.block_axes) > 1:
            name = f"tl.sum({name})"  # of one element: a scalar
        b.emit(f"tl.store({pointer}, {name}{mask})")


def store_split_partials(w: KernelWriter) -> None:
    """Stores the partials of every row's reductions."""
    b = w.body
    rows = indices.product([a.size for a in w.nest.grid])
    mask = b.print_mask(set(w.nest.grid))
    options = f", mask={mask}" if mask else ""
    for name in w.partials:
        pointer = f"{w.partial_names[name]} + split"
        if w.nest.grid:
            row = b.print_index(_flat_index(w.nest.grid))
            pointer += f" * {as_factor(b.print_index(rows))} + {row}"
        b.emit(f"tl.store({pointer}, {b.names[name]}{options})")


def _flat_index(axes: tuple[Axis, ...]) -> Index:
    """A point of these loops as one number, row-major."""
    index = indices.ZERO
    for axis in axes:
        index = index * axis.size + indices.from_atom(axis)
    return index


def build_combine_nest(w: KernelWriter, stores: list[Store]) -> tuple[LoopNest, Axis]:
    """The nest of the kernel that combines partials, and its axis over them."""
    partials_axis = Axis("t", Index(w.schedule.num_programs or w.schedule.num_splits))
    t = indices.from_atom(partials_axis)
    grid: tuple[Axis, ...] = ()
    if w.schedule.num_splits:
        grid = w.nest.grid
    elif any(s.index.axes() for s in stores):
        grid = w.nest.body
    column = _flat_index(grid)
    used = w.find_used_locals([s.value for s in stores])
    locals_: dict[str, Local] = {}
    memory = dict(w.nest.memory)
    for local in w.nest.locals.values():
        if local.name not in used:
            continue
        partial = w.partials.get(local.name)
        if partial is None:
            locals_[local.name] = replace(local, role="row")
            continue
        memory[partial.name] = partial
        if local.name in w.schedule.welford:
            memory.update({tensor.name: tensor for tensor in w.partials.values()})
            locals_.update(merge_welford_partials(w, local, t, column))
            continue
        index = t * partial.sizes[1] + (column if partial.sizes[1] != 1 else indices.ZERO)
        load = Load(partial.name, (index,), partial.dtype)
        locals_[local.name] = replace(local, expression=load, role="row_reduction")
    locals_ = {n: x for n, x in locals_.items() if n in _find_used(locals_, stores)}
    nest = replace(
        w.nest,
        grid=grid,
        body=(partials_axis,),
        locals=locals_,
        stores=tuple(stores),
        memory=memory,
        formulas=(),
    )
    return flatten_loops(nest, grid), partials_axis


def _find_used(locals_: dict[str, Local], stores: list[Store]) -> set[str]:
    """The locals that stores still use, now that partials replace reductions."""
    stack: list[Expression] = [s.value for s in stores]
    found: set[str] = set()
    while stack:
        for part in walk(stack.pop()):
            if isinstance(part, Load) and not part.index and part.name not in found:
                found.add(part.name)
                if part.name in locals_:
                    stack.append(locals_[part.name].expression)
    return found
