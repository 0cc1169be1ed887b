"""Row kernels: reductions over the body and what uses them, the SIMD loop inside the body.

Sums, norms, softmax, cross entropy: each grid point is a row; its reductions are made in passes over
the row, which stays in cache. Sums over the grid (weight gradients) are kept a thread and combined.
"""

from __future__ import annotations

from fulgurite.device import Device
from fulgurite.fuser.cost import elements, number
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu.base import Analysis, Schedule, analyse, needed, store_axes
from fulgurite.fuser.schedule.cpu.loop_order import arranged, vector_axis, votes
from fulgurite.fuser.schedule.cpu.memory_traffic import fetching_pass, streamed

KEEP_FLOPS = 10  # a value that costs more is kept from one pass to the next
KEEP_BYTES = 64 << 10  # of the stack, for kept rows
SPLIT_ELEMENTS = 1 << 15  # a body shorter than this is not shared among threads


def accepts(nest: Nest) -> str | None:
    if not nest.body:
        return "it does not reduce"
    over_grid = any(local.role in ("colsum", "scalar") for local in nest.locals.values())
    vector = vector_axis(nest, nest.axes)
    if vector in nest.grid and not over_grid:
        best = vector_axis(nest, nest.body)
        if best is None or votes(nest, best) < votes(nest, vector):  # type: ignore[arg-type]
            return "memory is contiguous along the rows, not inside them"
    return None


def schedule(nest: Nest, device: Device) -> Schedule:
    nest = arranged(nest, vector_axis(nest, nest.body))
    facts = analyse(nest)
    passes = count_passes(nest, facts)
    split = may_split(nest, elements(tuple(a.size for a in nest.grid)), device)
    roots = [pass_roots(nest, facts, k) for k in range(passes)]
    kept = () if split else kept_locals(nest, facts, passes)
    return Schedule(
        "rows",
        nest,
        nest.body[-1],
        passes=passes,
        split=split,
        kept=kept,
        streamed=streamed(nest, nest.body[-1]),
        fetches=None if split else fetching_pass(nest, roots, kept, device),
    )


def count_passes(nest: Nest, facts: Analysis) -> int:
    """Walks over the body: one more than the passes that the last thing made in one must wait for."""
    passes = 1
    for local in nest.locals.values():
        if local.role == "rowsum":
            passes = max(passes, facts.waits[local.name])
        elif local.role == "colsum" or (local.role == "scalar" and local.over_body):
            passes = max(passes, facts.waits[local.name] + 1)
    for store in nest.stores:
        if store_axes(nest, store) and not facts.expression_after(store.value):
            passes = max(passes, facts.expression_wait(store.value) + 1)
    return passes


def may_split(nest: Nest, tasks: int, device: Device) -> bool:
    """Few tasks with much to do each: threads can share the body."""
    points = elements(tuple(axis.size for axis in nest.axes))
    static = all(axis.size.is_constant for axis in nest.axes)
    if tasks >= 2 * device.threads or points < SPLIT_ELEMENTS or not static:
        return False
    sums = [x for x in nest.locals.values() if x.reduction]
    return all(x.role == "rowsum" for x in sums)


def kept_locals(
    nest: Nest, facts: Analysis, passes: int, limit: int | None = KEEP_BYTES
) -> tuple[str, ...]:
    """Dear values that several passes use, as far as `limit` bytes go."""
    if passes < 2 or not all(axis.size.is_constant for axis in nest.body):
        return ()
    uses: dict[str, set[int]] = {}
    for number_of_pass in range(passes):
        for local in needed(nest, pass_roots(nest, facts, number_of_pass)):
            uses.setdefault(local.name, set()).add(number_of_pass)
    points = 1
    for axis in nest.body:
        points *= number(axis.size)
    kept: list[str] = []
    room = limit
    for name, where in uses.items():
        local = nest.locals[name]
        size = points * local.dtype.itemsize
        if len(where) > 1 and local.reduction is None and local.flops >= KEEP_FLOPS:
            if facts.inner[name] and facts.after[name] is False and (room is None or size <= room):
                kept.append(name)
                room = room if room is None else room - size
    return tuple(kept)


def pass_roots(nest: Nest, facts: Analysis, number_of_pass: int) -> list:  # type: ignore[type-arg]
    """The expressions that a pass over the body computes: reductions and stores."""
    roots = []
    for local in nest.locals.values():
        if local.role == "rowsum" and facts.waits[local.name] == number_of_pass + 1:
            roots.append(local.expression)
        elif local.role in ("colsum", "scalar") and facts.waits[local.name] == number_of_pass:
            if local.over_body or local.role == "colsum":
                roots.append(local.expression)
    for store in nest.stores:
        late = facts.expression_after(store.value)
        if store_axes(nest, store) and not late:
            if facts.expression_wait(store.value) == number_of_pass:
                roots.append(store.value)
    return roots
