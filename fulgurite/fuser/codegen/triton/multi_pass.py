"""A body that is iterated in blocks, once a pass: long rows, columns, split reductions.

In: a `KernelWriter`. Out: for each pass a loop that accumulates a block, and after it the reduction
of the block to one value. An online softmax takes its maximum and its sum in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fulgurite.fuser.codegen.triton.op_table import FAST_MATH_OPS
from fulgurite.fuser.codegen.triton.partials import accumulate_partial, store_split_partials
from fulgurite.fuser.codegen.triton.peel import (
    emit_block_positions,
    emit_edge_positions,
    emit_peel_prologue,
)
from fulgurite.fuser.codegen.triton.register_resident import (
    BlockLoop,
    block_extent,
    emit_resident_loads,
    resident_block_texts,
    resident_end,
    resident_loops,
)
from fulgurite.fuser.codegen.triton.values import literal, strip_parentheses, triton_type
from fulgurite.fuser.codegen.triton.welford import (
    WelfordState,
    close_welford,
    open_welford,
    update_welford,
)
from fulgurite.fuser.codegen.triton.writer import (
    KernelWriter,
    accumulator_type,
    initial_value,
    print_accumulate,
)
from fulgurite.fuser.ir.expression import Expression, opmath_dtype
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.analysis import is_body_store

LOWEST = {torch.float32: -3.4028234663852886e38, torch.float64: -1.7976931348623157e308}


@dataclass(frozen=True)
class PassWork:
    """What one pass over the body computes."""

    reductions: list[Local]  # of the row
    partials: list[Local]  # reductions over the grid
    stores: list[Store]


def emit_looped_body(w: KernelWriter) -> None:
    emit_peel_prologue(w)
    emit_resident_loads(w)
    for step in range(w.schedule.passes + 1):
        emit_row_values(w, step)
        if step < w.schedule.passes:
            emit_pass(w, step)
    if w.schedule.num_splits:
        store_split_partials(w)


def emit_row_values(w: KernelWriter, step: int) -> None:
    """Values and stores of the row that are ready after this many passes."""
    b, analysis = w.body, w.analysis
    used = w.find_used_locals(w.find_roots())
    for local in w.nest.locals.values():
        name = local.name
        if name not in used or name in b.names or local.reduction is not None:
            continue
        if analysis.ready_pass[name] <= step and not analysis.in_body[name]:
            if not analysis.after_grid[name]:
                w.declare_local(local)
    for x in w.partial_locals:
        is_row_value = x.role == "full_reduction" and not x.over_body
        if is_row_value and analysis.ready_pass[x.name] == step:
            accumulate_partial(w, x)
    for store in w.main_stores():
        if is_body_store(w.nest, store) or analysis.is_in_body(store.value):
            continue
        if analysis.expression_ready_pass(store.value) == step:
            w.emit_store(store)


def find_pass_work(w: KernelWriter, step: int) -> PassWork:
    ready_pass = w.analysis.ready_pass
    partials = [x for x in w.partial_locals if x not in w.row_reductions]
    partials = [x for x in partials if ready_pass[x.name] == step]
    return PassWork(
        [x for x in w.row_reductions if ready_pass[x.name] == step + 1],
        [x for x in partials if x.role == "column_reduction" or x.over_body],
        [
            s
            for s in w.main_stores()
            if is_body_store(w.nest, s) and w.analysis.expression_ready_pass(s.value) == step
        ],
    )


def emit_pass(w: KernelWriter, step: int) -> None:
    b = w.body
    (axis,) = w.nest.body
    online, welford = w.schedule.online_softmax, w.schedule.welford
    work = find_pass_work(w, step)
    if not (work.reductions or work.partials or work.stores):
        return
    accumulators = open_accumulators(w, [x for x in work.reductions if x.name not in welford])
    states = {x.name: open_welford(w, x) for x in work.reductions if x.name in welford}
    open_scan_carries(w)
    without_online = [x for x in work.reductions if x.name not in online]
    edges = {} if work.stores else emit_edges(w, without_online, work.stores)
    b.pass_number = step
    for loop in body_loops(w, step):
        first = b.unique_name(f"{axis.name}0")
        with b.indented(f"for {first} in {loop.range}:"):
            emit_block_positions(w, first, loop.is_full)
            b.resident = resident_block_texts(w, first) if loop.is_resident else {}
            own = [x for x in without_online if x.name not in welford]
            emit_point_values(w, [x.expression for x in (*own, *work.partials)])
            for x in own:
                accumulate(w, x, accumulators, states)
            for x in work.partials:
                accumulate_partial(w, x)
            emit_point_values(w, [s.value for s in work.stores])
            for store in work.stores:
                w.emit_store(store)
            w.forget_values(b.depth)
    b.resident = {}
    if work.stores:  # last: nothing waits for what the edges still have to load
        edges = emit_edges(w, without_online, work.stores)
    close_accumulators(w, work.reductions, accumulators, states, edges)


def emit_edges(w: KernelWriter, reductions: list[Local], stores: list[Store]) -> dict[str, str]:
    """The edges of a peeled row, in a small block: the names of their reductions."""
    b = w.body
    if not w.schedule.peel_width:
        return {}
    found = {x.name: b.unique_name(f"{x.name}_edges") for x in reductions}
    b.pass_number, b.resident = 0, dict(w.resident_edges)  # few elements need no barrier
    with b.indented(f"for {b.unique_name('edge')} in tl.static_range(1):"):
        emit_edge_positions(w)
        emit_point_values(w, [x.expression for x in reductions])
        for x in reductions:
            text = w.print_reduction_input(x, w.nest.body)
            b.emit(f"{found[x.name]} = {w.print_reduction(x, text, w.nest.body[0])}")
        emit_point_values(w, [s.value for s in stores])
        for store in stores:
            w.emit_store(store)
        w.forget_values(b.depth)
    b.resident = {}
    return found


def open_accumulators(w: KernelWriter, reductions: list[Local]) -> dict[str, str]:
    """A block of running reductions for each."""
    b, online = w.body, w.schedule.online_softmax
    names: dict[str, str] = {}
    for x in reductions:
        names[x.name] = b.unique_name(f"{x.name}_acc")
        initial, shape = initial_value(x), w.print_block_shape()
        if uses_online_groups(w) and x.name in (*online, *online.values()):
            shape = f"[{w.schedule.block_sizes[w.nest.body[0]] // w.schedule.online_group}]"
        b.emit(f"{names[x.name]} = tl.full({shape}, {initial}, {accumulator_type(x)})")
    return names


def close_accumulators(
    w: KernelWriter,
    reductions: list[Local],
    accumulators: dict[str, str],
    states: dict[str, WelfordState],
    edges: dict[str, str],
) -> None:
    """Reduces each block to one value."""
    b, online = w.body, w.schedule.online_softmax
    (axis,) = w.nest.body
    for x in reductions:
        name = b.unique_name(x.name)
        if x.name in states:
            close_welford(w, x, states[x.name], name)
        elif x.name in online:
            maxima, maximum = accumulators[online[x.name]], b.names[online[x.name]]
            rescaled = f"{accumulators[x.name]} * tl.exp({maxima} - {maximum})"
            text = w.print_reduction(x, rescaled, axis)
            edges |= emit_edges(w, [x], [])  # which wait for the maximum
            b.emit(f"{name} = {print_combined(w, x, edges[x.name], text) if edges else text}")
        else:
            text = w.print_reduction(x, accumulators[x.name], axis)
            if x.name in edges:
                text = print_combined(w, x, edges[x.name], text)
            b.emit(f"{name} = {text}")
        axes = {a for a in w.nest.grid if a in b.bindings}
        w.define_local(x, name, b.depth, axes)


def uses_online_groups(w: KernelWriter) -> bool:
    """Are a thread's neighbouring elements reduced before they meet the running values?"""
    return w.schedule.online_group > 1 and len(w.body.block_axes) == 1


def body_loops(w: KernelWriter, step: int) -> list[BlockLoop]:
    """The loops over the body: resident blocks, other full blocks, then the rest."""
    b, num_stages = w.body, w.schedule.num_stages
    (axis,) = w.nest.body
    block = w.schedule.block_sizes[axis]
    w.split_start, w.split_end = "0", b.print_index(axis.size)
    if w.schedule.num_splits:
        return [BlockLoop(split_range(w, axis, block), None)]
    if not axis.size.is_constant:
        return [BlockLoop(w.print_range("0", b.print_index(axis.size), block, num_stages), None)]
    (size, full), start = block_extent(w), resident_end(w)
    loops = []
    is_backward = w.schedule.alternates_direction and step % 2 == 1
    if start < full:
        steps = w.print_range(str(start), str(full), block, num_stages)
        if is_backward:
            steps = w.print_range(str(full - block), str(start - block), -block, num_stages)
        loops.append(BlockLoop(steps, True))
    if max(start, full) < size or not size:
        last = max(start, full)
        # of a peeled row one block at most, and another one in each row: Triton must unroll that
        # loop
        unrolled = f"tl.static_range({last}, {size}, {block})"
        is_peeled = bool(w.schedule.peel_width)
        steps = unrolled if is_peeled else w.print_range(str(last), str(size), block)
        loops.append(BlockLoop(steps, False))
    resident = resident_loops(w)
    if is_backward:
        return loops[::-1] + resident  # what was loaded last comes first
    # first what must be loaded, while the resident loads are in flight; in later passes last, while
    # results are written
    return loops + resident if step == 0 and not w.schedule.welford else resident + loops


def split_range(w: KernelWriter, axis: Axis, block: int) -> str:
    """The iterations over this program's part of the body."""
    b, splits = w.body, w.schedule.num_splits
    size = b.print_index(axis.size)
    b.emit("split = tl.program_id(1)")
    if axis.size.is_constant:
        chunk = str(-(-axis.size.constant // (splits * block)) * block)
    else:
        chunk = b.unique_name("chunk")
        b.emit(f"{chunk} = tl.cdiv({size}, {splits * block}) * {block}")
    start = f"split{w.print_int64()} * {chunk}"
    end = f"tl.minimum({start} + {chunk}, {size})"
    w.split_start, w.split_end = start, end
    return w.print_range(start, end, block, w.schedule.num_stages)


def emit_point_values(w: KernelWriter, roots: list[Expression]) -> None:
    """Locals at a point of the body that these expressions need and that are not known yet."""
    b = w.body
    required: set[str] = set()
    stack = list(roots)
    while stack:
        for local in w.nest.references(stack.pop()):
            if local.name not in required and local.name not in b.names:
                required.add(local.name)
                if local.reduction is None or local.role == "scan":
                    stack.append(local.expression)
    for local in w.nest.locals.values():
        if local.name in required and local.role == "scan":
            emit_scan(w, local, w.scan_carries[local.name])
        elif local.name in required and local.reduction is None:
            w.declare_local(local)


def emit_scan(w: KernelWriter, x: Local, carry: str | None = None) -> None:
    """The scan of a block; `carry` is the reduction of all blocks before it, which it extends."""
    b = w.body
    (axis,) = w.nest.body
    axes = b.find_axes(x.expression) | {axis}
    text = w.print_reduction_input(x, w.nest.body)
    if not set(b.block_axes) <= b.find_axes(x.expression):
        # also a value that all columns share: Triton 3.6 scans a block of width 1 wrongly
        text = f"tl.broadcast_to({strip_parentheses(text)}, {w.print_block_shape()})"
    name = b.unique_name(x.name)
    if carry is None:
        b.emit(f"{name} = {w.print_scan(x, text, axis)}")
    else:
        value = b.unique_name("value")
        b.emit(f"{value} = {strip_parentheses(text)}")
        before = f"{carry}.to({triton_type(x.dtype)})" if carries_float64(x) else carry
        b.emit(f"{name} = {print_combined(w, x, before, w.print_scan(x, value, axis))}")
        b.emit(f"{carry} = {print_combined(w, x, carry, w.print_reduction(x, value, axis))}")
    w.define_local(x, name, b.depth, axes)


def print_combined(w: KernelWriter, x: Local, left: str, right: str) -> str:
    """Two values of a reduction combined."""
    if x.reduction in ("sum", "prod"):
        return f"{left} {'+' if x.reduction == 'sum' else '*'} {right}"
    return f"{w.combine_function(x)}({left}, {right})"


def carries_float64(x: Local) -> bool:
    """Is the carry of a scan a float64? For sums of floats, which may be of many blocks."""
    return x.reduction == "sum" and opmath_dtype(x.dtype) == torch.float32


def open_scan_carries(w: KernelWriter) -> None:
    """What scans carry from block to block, one value a row."""
    b, sizes = w.body, w.schedule.block_sizes
    dimensions = ["1" if a in w.nest.body else str(sizes[a]) for a in b.block_axes]
    shape = f"[{', '.join(dimensions)}]" if len(b.block_axes) > 1 else "[]"
    for x in w.nest.locals.values():
        if x.role == "scan":
            w.scan_carries[x.name] = b.unique_name(f"{x.name}_carry")
            dtype = "tl.float64" if carries_float64(x) else accumulator_type(x)
            b.emit(f"{w.scan_carries[x.name]} = tl.full({shape}, {initial_value(x)}, {dtype})")


def accumulate(
    w: KernelWriter, x: Local, accumulators: dict[str, str], states: dict[str, WelfordState]
) -> None:
    b, online = w.body, w.schedule.online_softmax
    name = accumulators[x.name]
    welford = [states[n] for n, total in w.schedule.welford.items() if total == x.name]
    if welford:
        update_welford(w, x, name, welford)
        return
    value = w.print_reduction_input(x, w.nest.body)
    sums = [accumulators[n] for n, maximum in online.items() if maximum == x.name]
    if not sums:
        b.emit(print_accumulate(b, x, name, value))
    elif uses_online_groups(w):
        accumulate_online_groups(w, x, name, sums, strip_parentheses(value))
    else:
        accumulate_online(w, x, name, sums, strip_parentheses(value))


def accumulate_online(w: KernelWriter, x: Local, maximum: str, sums: list[str], value: str) -> None:
    """Online softmax: sums are rescaled where the maximum grows, with one exponential an element.

    d = x - max;  s = exp(-|d|);  sum = d > 0 ? sum * s + 1 : sum + s;  max = max(max, x)

    A maximum of -inf is subtracted as the lowest finite number, since -inf - -inf is NaN.
    """
    b = w.body
    point, delta, scale = b.unique_name("value"), b.unique_name("delta"), b.unique_name("scale")
    b.emit(f"{point} = {value}")
    b.emit(f"{delta} = {point} - tl.maximum({maximum}, {print_lowest(x)})")
    b.emit(f"{scale} = tl.exp(-tl.abs({delta}))")
    for s in sums:
        b.emit(f"{s} = tl.where({delta} > 0, {s} * {scale} + 1, {s} + {scale})")
    b.emit(print_accumulate(b, x, maximum, point))


def print_lowest(x: Local) -> str:
    """The lowest finite number of a maximum's dtype. A bare literal would be float32."""
    lowest = literal(LOWEST[opmath_dtype(x.dtype)], x.dtype)
    return f"tl.full([], {lowest}, {accumulator_type(x)})"


def accumulate_online_groups(
    w: KernelWriter, x: Local, maximum: str, sums: list[str], value: str
) -> None:
    """The same with one running maximum and sum for all elements of a thread's access."""
    b, group = w.body, w.schedule.online_group
    count = w.schedule.block_sizes[w.nest.body[0]] // group
    groups, new_max = b.unique_name("groups"), b.unique_name("new_max")
    shift, scale = b.unique_name("shift"), b.unique_name("scale")
    w.combine_function(x)
    b.emit(f"{groups} = tl.reshape({value}, [{count}, {group}])")
    b.emit(f"{new_max} = nan_max({maximum}, tl.reduce({groups}, 1, nan_max))")
    b.emit(f"{shift} = tl.maximum({new_max}, {print_lowest(x)})")  # see accumulate_online
    b.emit(f"{scale} = tl.exp({maximum} - {shift})")
    exp = FAST_MATH_OPS["exp"] if b.fast_math else b.lookup_op("exp", opmath_dtype(x.dtype))
    terms = f"{exp}({groups} - {shift}[:, None])"
    for s in sums:
        b.emit(f"{s} = {s} * {scale} + tl.sum({terms}, 1)")
    b.emit(f"{maximum} = {new_max}")
