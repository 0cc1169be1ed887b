"""A body that is walked in blocks, once a pass: rows that registers can't hold, columns, split reductions.

In: a `Writer`. Out: for each pass a loop that accumulates a block of partial reductions, and after it their
reduction to one value. A maximum and the sum of exponentials below it share one pass.
"""

from __future__ import annotations

import torch

from fulgurite.fuser.codegen.triton.aligned_rows import block_positions, edge_positions, open_rows
from fulgurite.fuser.codegen.triton.partial_sums import add_to_part, store_split
from fulgurite.fuser.codegen.triton.register_resident import (
    Walk,
    extent,
    kept_end,
    kept_texts,
    kept_walks,
    read_kept,
)
from fulgurite.fuser.codegen.triton.values import bare, constant, value_tl
from fulgurite.fuser.codegen.triton.welford import Streams, add_squares, close_squares, open_squares
from fulgurite.fuser.codegen.triton.writer import Writer, held_tl, start_of, step_text
from fulgurite.fuser.ir.expression import Expression, value_type
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.cpu.base import store_axes

LOG2_E = 1.4426950408889634
LOWEST = {torch.float32: -3.4028234663852886e38, torch.float64: -1.7976931348623157e308}


def looped(w: Writer) -> None:
    open_rows(w)
    read_kept(w)
    for step in range(w.schedule.passes + 1):
        row_values(w, step)
        if step < w.schedule.passes:
            one_pass(w, step)
    if w.schedule.split:
        store_split(w)


def row_values(w: Writer, step: int) -> None:
    """Values and stores of the row that are ready after this many passes."""
    b = w.body
    wanted = w.wanted(w.roots())
    for local in w.nest.locals.values():
        name = local.name
        if name not in wanted or name in b.names or local.reduction is not None:
            continue
        if w.facts.waits[name] <= step and not w.facts.inner[name]:
            if not w.facts.after[name]:
                w.declare(local)
    for x in w.partial:
        if x.role == "scalar" and not x.over_body and w.facts.waits[x.name] == step:
            add_to_part(w, x)
    for store in w.main_stores():
        if store_axes(w.nest, store) or w.facts.expression_inner(store.value):
            continue
        if w.facts.expression_wait(store.value) == step:
            w.store(store)


def pass_work(w: Writer, step: int) -> tuple[list[Local], list[Local], list[Store]]:
    """What a walk over the body makes: sums of the row, sums over rows, results."""
    sums = [x for x in w.sums if w.facts.waits[x.name] == step + 1]
    inner = [x for x in w.partial if x not in w.sums]
    inner = [x for x in inner if w.facts.waits[x.name] == step]
    inner = [x for x in inner if x.role == "colsum" or x.over_body]
    stores = [
        s
        for s in w.main_stores()
        if store_axes(w.nest, s) and w.facts.expression_wait(s.value) == step
    ]
    return sums, inner, stores


def one_pass(w: Writer, step: int) -> None:
    b = w.body
    (axis,) = w.nest.body
    online, about = w.schedule.online, w.schedule.about
    sums, inner, stores = pass_work(w, step)
    if not (sums or inner or stores):
        return
    accumulators = open_sums(w, [x for x in sums if x.name not in about])
    streams = {x.name: open_squares(w, x) for x in sums if x.name in about}
    open_scans(w)
    ready = [x for x in sums if x.name not in online]
    edges = {} if stores else walk_edges(w, ready, stores)
    b.walk = step
    for walk in body_walks(w, step):
        first = b.fresh(f"{axis.name}0")
        with b.loop(f"for {first} in {walk.steps}:"):
            block_positions(w, first, walk.filled)
            b.kept = kept_texts(w, first) if walk.kept else {}
            own = [x for x in sums if x.name not in online and x.name not in about]
            pass_values(w, [x.expression for x in (*own, *inner)])
            for x in own:
                accumulate(w, x, accumulators, streams)
            for x in inner:
                add_to_part(w, x)
            pass_values(w, [s.value for s in stores])
            for store in stores:
                w.store(store)
            w.forget(b.depth)
    b.kept = {}
    if stores:  # last: nothing waits for what edges still have to read
        edges = walk_edges(w, ready, stores)
    close_sums(w, sums, accumulators, streams, edges)


def walk_edges(w: Writer, sums: list[Local], stores: list[Store]) -> dict[str, str]:
    """The elements before and after what is aligned, in a small block: what each sum has of them."""
    b = w.body
    if not w.schedule.granule:
        return {}
    found = {x.name: b.fresh(f"{x.name}_edges") for x in sums}
    b.walk, b.kept = 0, dict(w.edges)  # few elements: what is made of them may stay
    with b.loop(f"for {b.fresh('edge')} in tl.static_range(1):"):
        edge_positions(w)
        pass_values(w, [x.expression for x in sums])
        for x in sums:
            text = w.value_of(x, w.nest.body)
            b.line(f"{found[x.name]} = {w.reduced(x, text, w.nest.body[0])}")
        pass_values(w, [s.value for s in stores])
        for store in stores:
            w.store(store)
        w.forget(b.depth)
    b.kept = {}
    return found


def open_sums(w: Writer, sums: list[Local]) -> dict[str, str]:
    """A block of partial reductions for each."""
    b, online = w.body, w.schedule.online
    names: dict[str, str] = {}
    for x in sums:
        names[x.name] = b.fresh(f"{x.name}_sums" if x.reduction == "sum" else f"{x.name}_all")
        start, shape = start_of(x), w.block_shape()
        if x.name in online.values():
            start = constant(LOWEST[value_type(x.dtype)], x.dtype)
        if grouped(w) and x.name in (*online, *online.values()):
            shape = f"[{w.schedule.sizes[w.nest.body[0]] // w.schedule.group}]"
        b.line(f"{names[x.name]} = tl.full({shape}, {start}, {held_tl(x)})")
    return names


def close_sums(
    w: Writer,
    sums: list[Local],
    accumulators: dict[str, str],
    streams: dict[str, Streams],
    edges: dict[str, str],
) -> None:
    """The reduction of each block to one value."""
    b, online = w.body, w.schedule.online
    (axis,) = w.nest.body
    for x in sums:
        name = b.fresh(x.name)
        if x.name in streams:
            close_squares(w, x, streams[x.name], name)
        elif x.name in online:
            best, m = accumulators[online[x.name]], b.names[online[x.name]]
            text = w.reduced(x, f"{accumulators[x.name]} * tl.exp({best} - {m})", axis)
            edges |= walk_edges(w, [x], [])  # which wait for the maximum
            b.line(f"{name} = {combined(w, x, edges[x.name], text) if edges else text}")
        else:
            text = w.reduced(x, accumulators[x.name], axis)
            b.line(f"{name} = {combined(w, x, edges[x.name], text) if x.name in edges else text}")
            if x.name in online.values():
                low = constant(LOWEST[value_type(x.dtype)], x.dtype)
                b.line(f'{name} = tl.where({name} == {low}, float("-inf"), {name})')
        axes = {a for a in w.nest.grid if a in b.loops}
        w.known(x, name, b.depth, axes)


def grouped(w: Writer) -> bool:
    """Are a thread's neighbouring elements reduced first, before they meet the running values?"""
    return w.schedule.group > 1 and len(w.body.blocks) == 1


def body_walks(w: Writer, step: int) -> list[Walk]:
    """The loops over the body: blocks that are kept, all others that are full, then what is left."""
    b, ahead = w.body, w.schedule.stages
    (axis,) = w.nest.body
    block = w.schedule.sizes[axis]
    w.part_start, w.part_end = "0", b.index(axis.size)
    if w.schedule.split:
        return [Walk(part_range(w, axis, block), None)]
    if not axis.size.is_constant:
        return [Walk(w.range("0", b.index(axis.size), block, ahead), None)]
    (size, full), start = extent(w), kept_end(w)
    found = []
    back = w.schedule.back and step % 2 == 1
    if start < full:
        steps = w.range(str(start), str(full), block, ahead)
        if back:
            steps = w.range(str(full - block), str(start - block), -block, ahead)
        found.append(Walk(steps, True))
    if max(start, full) < size or not size:
        last = max(start, full)
        # one block at most where edges are apart, whose block is smaller: no loop of Triton's allows that
        unrolled = f"tl.static_range({last}, {size}, {block})"
        steps = unrolled if w.schedule.granule else w.range(str(last), str(size), block)
        found.append(Walk(steps, False))
    kept = kept_walks(w)
    if back:
        return found[::-1] + kept  # what was read last comes first
    # first what is read, beside what is on its way, then what waits for both; later while results are written
    return found + kept if step == 0 and not w.schedule.about else kept + found


def part_range(w: Writer, axis: Axis, block: int) -> str:
    """The steps over this program's part of the body."""
    b, parts = w.body, w.schedule.split
    size = b.index(axis.size)
    b.line("part = tl.program_id(1)")
    if axis.size.is_constant:
        chunk = str(-(-axis.size.constant // (parts * block)) * block)
    else:
        chunk = b.fresh("chunk")
        b.line(f"{chunk} = tl.cdiv({size}, {parts * block}) * {block}")
    start = f"part.to(tl.int64) * {chunk}" if w.wide else f"part * {chunk}"
    end = f"tl.minimum({start} + {chunk}, {size})"
    w.part_start, w.part_end = start, end
    return w.range(start, end, block, w.schedule.stages)


def pass_values(w: Writer, roots: list[Expression]) -> None:
    """Locals at a point of the body that these need and that are not there yet."""
    b = w.body
    wanted: set[str] = set()
    stack = list(roots)
    while stack:
        for local in w.nest.references(stack.pop()):
            if local.name not in wanted and local.name not in b.names:
                wanted.add(local.name)
                if local.reduction is None or local.role == "scan":
                    stack.append(local.expression)
    for local in w.nest.locals.values():
        if local.name in wanted and local.role == "scan":
            scan(w, local, w.carried[local.name])
        elif local.name in wanted and local.reduction is None:
            w.declare(local)


def scan(w: Writer, x: Local, carried: str | None = None) -> None:
    """The scan of a block; `carried` is the reduction of everything before it, which it extends."""
    b = w.body
    (axis,) = w.nest.body
    axes = b.axes(x.expression) | {axis}
    text = w.value_of(x, w.nest.body)
    if not set(b.blocks) <= b.axes(x.expression):
        # also what is the same in all columns: Triton 3.6 scans a block that is one wide wrongly
        text = f"tl.broadcast_to({bare(text)}, {w.block_shape()})"
    name = b.fresh(x.name)
    if carried is None:
        b.line(f"{name} = {w.scanned(x, text, axis)}")
    else:
        point = b.fresh("value")
        b.line(f"{point} = {bare(text)}")
        before = f"{carried}.to({value_tl(x.dtype)})" if long_sum(x) else carried
        b.line(f"{name} = {combined(w, x, before, w.scanned(x, point, axis))}")
        b.line(f"{carried} = {combined(w, x, carried, w.reduced(x, point, axis))}")
    w.known(x, name, b.depth, axes)


def combined(w: Writer, x: Local, left: str, right: str) -> str:
    if x.reduction in ("sum", "prod"):
        return f"{left} {'+' if x.reduction == 'sum' else '*'} {right}"
    return f"{w.combining(x)}({left}, {right})"


def long_sum(x: Local) -> bool:
    """Sums of floats are carried in double: they may be of many blocks."""
    return x.reduction == "sum" and value_type(x.dtype) == torch.float32


def open_scans(w: Writer) -> None:
    """What scans carry from block to block, one value a row."""
    b = w.body
    sizes = ["1" if a in w.nest.body else str(w.schedule.sizes[a]) for a in b.blocks]
    shape = f"[{', '.join(sizes)}]" if len(b.blocks) > 1 else "[]"
    for x in w.nest.locals.values():
        if x.role == "scan":
            w.carried[x.name] = b.fresh(f"{x.name}_before")
            kind = "tl.float64" if long_sum(x) else held_tl(x)
            b.line(f"{w.carried[x.name]} = tl.full({shape}, {start_of(x)}, {kind})")


def accumulate(
    w: Writer, x: Local, accumulators: dict[str, str], streams: dict[str, Streams]
) -> None:
    b, online = w.body, w.schedule.online
    name = accumulators[x.name]
    about = [streams[n] for n, total in w.schedule.about.items() if total == x.name]
    if about:
        add_squares(w, x, name, about)
        return
    value = w.value_of(x, w.nest.body)
    partners = [n for n, best in online.items() if best == x.name]
    if not partners:
        b.line(step_text(b, x, name, value))
        return
    if grouped(w):
        accumulate_groups(w, x, accumulators, partners, bare(value))
        return
    # the exponentials so far are scaled where the maximum grows: one exponential an element
    point, step, scale = b.fresh("value"), b.fresh("step"), b.fresh("scale")
    b.line(f"{point} = {bare(value)}")
    b.line(f"{step} = {point} - {name}")
    b.line(f"{scale} = tl.exp(-tl.abs({step}))")
    for partner in partners:
        s = accumulators[partner]
        b.line(f"{s} = tl.where({step} > 0, {s} * {scale} + 1, {s} + {scale})")
    b.line(step_text(b, x, name, point))


def accumulate_groups(
    w: Writer, x: Local, accumulators: dict[str, str], partners: list[str], value: str
) -> None:
    """The same with one running maximum and sum for all elements of a thread's access."""
    b, group = w.body, w.schedule.group
    name, count = accumulators[x.name], w.schedule.sizes[w.nest.body[0]] // group
    groups, best, scale = b.fresh("groups"), b.fresh("best"), b.fresh("scale")
    w.combining(x)
    b.line(f"{groups} = tl.reshape({value}, [{count}, {group}])")
    b.line(f"{best} = nan_max({name}, tl.reduce({groups}, 1, nan_max))")
    b.line(f"{scale} = tl.exp({name} - {best})")
    if b.fast:
        # one multiplication with the subtraction in it
        power = f"{groups} * {LOG2_E} - ({best} * {LOG2_E})[:, None]"
        terms = f"tl.exp2({power})"
    else:
        terms = f"{b.spelled('exp', value_type(x.dtype))}({groups} - {best}[:, None])"
    for partner in partners:
        s = accumulators[partner]
        b.line(f"{s} = {s} * {scale} + tl.sum({terms}, 1)")
    b.line(f"{name} = {best}")
