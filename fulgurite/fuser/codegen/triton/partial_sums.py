"""Parts: sums that programs leave in memory, and the nest of the kernel that adds them up.

In: a `Writer` whose schedule walks rows or splits the body. Out: lines that keep and store a program's own
sums, and `finish_nest`, what is left to do with them. Parts are added in a fixed order: results are the same
every time.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.fuser.codegen.triton.expressions import Body
from fulgurite.fuser.codegen.triton.welford import merged_parts
from fulgurite.fuser.codegen.triton.writer import Writer, held_tl, start_of, step_text
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Load, walk
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import Local, Nest, Store
from fulgurite.fuser.schedule.gpu.choose import joined


def in_memory(w: Writer, x: Local) -> bool:
    """Sums over rows that are too long for registers are added up in memory."""
    return x.role == "colsum" and w.schedule.looped


def open_parts(w: Writer) -> dict[str, str]:
    b = w.body
    found: dict[str, str] = {}
    for x in w.partial:
        if in_memory(w, x):
            continue
        found[x.name] = b.fresh(f"{x.name}_part")
        shape = w.block_shape()
        if x.role == "scalar" and not x.over_body:
            sizes = [str(w.schedule.sizes[a]) if a in w.nest.grid else "1" for a in b.blocks]
            grids = [a for a in b.blocks if a in w.nest.grid]
            shape = f"[{', '.join(sizes)}]" if grids else "[]"
        b.line(f"{found[x.name]} = tl.full({shape}, {start_of(x)}, {held_tl(x)})")
    return found


def clear_parts(w: Writer, start: str, size: str) -> None:
    """Sums in memory of a program without rows, as fewer rows than were seen first may leave one."""
    kept = [x for x in w.partial if in_memory(w, x)]
    if not kept or w.nest.grid[0].size.is_constant:
        return
    b = w.body
    (axis,) = w.nest.body
    block, length, first = w.schedule.sizes[axis], b.index(axis.size), b.fresh(f"{axis.name}0")
    with b.loop(f"if {start} >= {size}:"), b.loop(f"for {first} in range(0, {length}, {block}):"):
        place = b.fresh(f"{axis.name}_at")
        b.line(f"{place} = {first} + tl.arange(0, {block})")
        for x in kept:
            pointer = f"{w.part_names[x.name]} + program * {_factor(b, axis.size)} + {place}"
            none = f"tl.full([{block}], {start_of(x)}, {held_tl(x)})"
            b.line(f"tl.store({pointer}, {none}, mask={place} < {length})")


def add_to_part(w: Writer, x: Local) -> None:
    b = w.body
    axes = w.nest.grid if x.role == "scalar" and not x.over_body else w.nest.axes
    value = w.value_of(x, axes)
    if not in_memory(w, x):
        b.line(step_text(b, x, w.accumulators[x.name], value))
        return
    (axis,) = w.nest.body
    place = f"{w.part_names[x.name]} + program * {b.index(axis.size)} + {axis.name}"
    mask = f", mask={b.loops[axis].mask}" if b.loops[axis].mask else ""
    before = b.fresh("before")
    b.line(f"{before} = tl.load({place}{mask})")
    b.line(f"{before} = tl.where({w.first}, {start_of(x)}, {before})")
    b.line(step_text(b, x, before, value))
    b.line(f"tl.store({place}, {before}{mask})")


def close_parts(w: Writer, accumulators: dict[str, str]) -> None:
    b = w.body
    for x in w.partial:
        if in_memory(w, x):
            continue
        name = accumulators[x.name]
        over = [a for a in b.blocks if a in w.nest.grid or x.role == "scalar"]
        if x.role == "scalar" and not x.over_body:
            over = [a for a in b.blocks if a in w.nest.grid]
        for axis in over:
            b.line(f"{name} = {w.reduced(x, name, axis).removesuffix(' != 0')}")
        pointer = f"{w.part_names[x.name]} + program"
        mask = ""
        if x.role == "colsum":
            (axis,) = w.nest.body
            pointer += f" * {b.index(axis.size)} + {axis.name}"
            mask = f", mask={b.loops[axis].mask}" if b.loops[axis].mask else ""
        elif len(b.blocks) > 1:
            name = f"tl.sum({name})"  # of one element: a scalar
        b.line(f"tl.store({pointer}, {name}{mask})")


def store_split(w: Writer) -> None:
    """A part of every row's reductions."""
    b = w.body
    rows = indices.product([a.size for a in w.nest.grid])
    place = indices.ZERO
    for axis in w.nest.grid:
        place = place * axis.size + indices.of_atom(axis)
    mask = b.mask_text(set(w.nest.grid))
    options = f", mask={mask}" if mask else ""
    for name in w.parts:
        pointer = f"{w.part_names[name]} + part"
        if w.nest.grid:
            pointer += f" * {_factor(b, rows)} + {b.index(place)}"
        b.line(f"tl.store({pointer}, {b.names[name]}{options})")


def finish_nest(w: Writer, stores: list[Store]) -> tuple[Nest, Axis]:
    """What is left to do with the parts, as a nest of its own."""
    rows = Axis("t", Index(w.schedule.programs or w.schedule.split))
    t = indices.of_atom(rows)
    place = indices.ZERO
    grid: tuple[Axis, ...] = ()
    if w.schedule.split:
        grid = w.nest.grid
        for axis in grid:
            place = place * axis.size + indices.of_atom(axis)
    elif any(s.index.axes() for s in stores):
        grid = w.nest.body
        place = indices.of_atom(grid[0])
    wanted = w.wanted([s.value for s in stores])
    kept: dict[str, Local] = {}
    memory = dict(w.nest.memory)
    for local in w.nest.locals.values():
        if local.name not in wanted:
            continue
        part = w.parts.get(local.name)
        if part is None:
            kept[local.name] = replace(local, role="row")
            continue
        memory[part.name] = part
        if local.name in w.schedule.about:
            memory.update({tensor.name: tensor for tensor in w.parts.values()})
            kept.update(merged_parts(w, local, t, place))
            continue
        at = t * part.sizes[1] + (place if part.sizes[1] != 1 else indices.ZERO)
        kept[local.name] = replace(
            local, expression=Load(part.name, (at,), part.dtype), role="rowsum"
        )
    kept = {n: x for n, x in kept.items() if _reaches(x, kept, stores)}
    nest = replace(
        w.nest,
        grid=grid,
        body=(rows,),
        locals=kept,
        stores=tuple(stores),
        memory=memory,
        formulas=(),
    )
    return joined(nest, grid), rows


def _reaches(x: Local, kept: dict[str, Local], stores: list[Store]) -> bool:
    """Is the local still used, now that parts stand for what made them?"""
    stack: list[Expression] = [s.value for s in stores]
    seen: set[str] = set()
    while stack:
        for part in walk(stack.pop()):
            if isinstance(part, Load) and not part.index and part.name not in seen:
                seen.add(part.name)
                if part.name in kept:
                    stack.append(kept[part.name].expression)
    return x.name in seen


def _factor(b: Body, index: Index) -> str:
    text = b.index(index)
    return text if text.isalnum() else f"({text})"
