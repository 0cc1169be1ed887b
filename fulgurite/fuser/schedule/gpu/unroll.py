"""Short loops that choose between formulas, written out.

In: an elementwise nest. Out: the same, or one without the loop whose steps differ: a step of it is a store of its own.
The gradient of `q, k, v = qkv` is such a loop of three: q's and k's gradients are turned back, v's is copied. As one
formula every point computes all of them, reads under masks, and takes one

    out[s, i] = where(s == 0, turned(q[i]), 0) + where(s == 1, turned(k[i]), 0) + where(s == 2, v[i], 0)

and written out a point computes three values, each once, and reads what they have in common (angles) once:

    out[0, i] = turned(q[i]);  out[1, i] = turned(k[i]);  out[2, i] = v[i]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fulgurite.device import Device
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Bound, Expression, Guard, Load, walk
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Local, Nest, Store, rewrite, substituted
from fulgurite.fuser.schedule.cpu.base import needed
from fulgurite.fuser.schedule.gpu.base import length

MOST_STEPS = 4  # of a loop that is written out
MOST_STORES = 8  # once it is: the values of each are in registers at once
PIECE = 128  # bytes that a step stores one after the other, at the least: a line of memory
LEAST_POINTS = 1024  # of each step for each multiprocessor: fewer leave some without work


def unrolled(nest: Nest, device: Device) -> Nest:
    """The nest with its short loops that choose written out, where each step is work enough."""
    for axis in nest.grid:
        if _is_short(nest, axis, device) and _chooses(nest, axis) and _stores_pieces(nest, axis):
            nest = written_out(nest, axis)
    return nest


def _is_short(nest: Nest, axis: Axis, device: Device) -> bool:
    if not axis.size.is_constant or not 1 < axis.size.constant <= MOST_STEPS:
        return False
    points, steps = length(nest.grid), axis.size.constant
    few = steps * len(nest.stores) <= MOST_STORES
    return few and points >= steps * LEAST_POINTS * device.threads


def _chooses(nest: Nest, axis: Axis) -> bool:
    """Does the step alone say which of two formulas holds, and is memory read for one?"""
    guards = [
        part
        for expression in _expressions(nest)
        for part in walk(expression)
        if isinstance(part, Guard)
    ]
    return any(any(_decides(axis, b) for b in g.bounds) and _reads(nest, g) for g in guards)


def _decides(axis: Axis, bound: Bound) -> bool:
    """Is it known in every step whether the bound holds?"""
    steps = [bound.substitute({axis: indices.Index(k)}) for k in range(axis.size.constant)]
    return axis in bound.index.axes() and all(step.known is not None for step in steps)


def _reads(nest: Nest, part: Expression) -> bool:
    """Is memory read for it, by itself or by the locals it uses?"""
    loads = [inner for inner in walk(part) if isinstance(inner, Load)]
    return any(load.index or _reads(nest, nest.locals[load.name].expression) for load in loads)


def _stores_pieces(nest: Nest, axis: Axis) -> bool:
    """Does each step store whole lines of memory?"""
    for store in nest.stores:
        step = store.index.coefficient(axis)
        if step is None or not step.is_constant or step.constant * store.tensor.itemsize < PIECE:
            return False
    return True


def _expressions(nest: Nest) -> Iterator[Expression]:
    yield from (local.expression for local in nest.locals.values())
    yield from (store.value for store in nest.stores)


def written_out(nest: Nest, axis: Axis) -> Nest:
    """The nest without the loop: locals that depend on it, and stores, once for each of its steps."""
    varying = _varying(nest, axis)
    found: dict[str, Local] = {}
    stores: list[Store] = []
    for step in range(axis.size.constant):
        names = {name: f"{name}_of_{step}" for name in varying}
        grid = tuple(a for a in nest.grid if a != axis)
        there = substituted(nest, {axis: indices.Index(step)}, grid, ())
        for name, local in there.locals.items():
            own, value = names.get(name, name), _renamed(local.expression, names)
            found.setdefault(own, replace(local, name=own, expression=value))
        stores += [replace(s, value=_renamed(s.value, names)) for s in there.stores]
    return _without_unused(replace(there, locals=found, stores=tuple(stores)))


def _varying(nest: Nest, axis: Axis) -> set[str]:
    """The locals whose value depends on the loop, directly or through others."""
    found: set[str] = set()
    for name, local in nest.locals.items():
        used = {other.name for other in nest.references(local.expression)}
        if axis in local.expression.axes() or used & found:
            found.add(name)
    return found


def _renamed(expression: Expression, names: Mapping[str, str]) -> Expression:
    """The expression with other locals in the place of some."""

    def change(part: Expression) -> Expression | None:
        if isinstance(part, Load) and not part.index and part.name in names:
            return replace(part, name=names[part.name])
        return None

    return rewrite(expression, change, lambda index: index)


def _without_unused(nest: Nest) -> Nest:
    """The nest without locals, and memory, that only steps not taken needed."""
    used = needed(nest, [store.value for store in nest.stores])
    nest = replace(nest, locals={local.name: local for local in used})
    touched = {tensor.name for tensor, _, _ in nest.accesses()}
    return replace(nest, memory={n: t for n, t in nest.memory.items() if n in touched})
