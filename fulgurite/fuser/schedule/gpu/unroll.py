"""Unrolling of short loops that select between formulas.

In: a pointwise nest. Out: the same nest, or one without the loop, with one store for each of its
steps. The gradient of `q, k, v = qkv` is such a loop of three: the gradients of q and k go through
the inverse rotary embedding, that of v is copied. As one formula every point computes all of them,
under masks:

    out[s, i] = where(s == 0, rope(q[i]), 0) + where(s == 1, rope(k[i]), 0) + where(s == 2, v[i], 0)

Unrolled, a point computes three values once each, and loads what they share (the angles) once:

    out[0, i] = rope(q[i]);  out[1, i] = rope(k[i]);  out[2, i] = v[i]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import BoundsCheck, Expression, Load, Masked, walk
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Local, LoopNest, Store, substitute_axes
from fulgurite.fuser.schedule.analysis import find_required_locals, iter_expressions
from fulgurite.fuser.schedule.gpu.base import count_points
from fulgurite.kernels.tuning import fuser_gpu as tuning


def unroll_select_loops(nest: LoopNest, device: DeviceInfo) -> LoopNest:
    """The nest with its short selecting loops unrolled, where each step has enough work."""
    for axis in nest.grid:
        if _is_worth_unrolling(nest, axis, device) and _selects(nest, axis):
            if _stores_full_lines(nest, axis):
                nest = unroll_loop(nest, axis)
    return nest


def _is_worth_unrolling(nest: LoopNest, axis: Axis, device: DeviceInfo) -> bool:
    if not axis.size.is_constant or not 1 < axis.size.constant <= tuning.MAX_UNROLL_STEPS:
        return False
    steps = axis.size.constant
    points = steps * tuning.MIN_UNROLLED_POINTS * device.num_cores
    has_few_stores = steps * len(nest.stores) <= tuning.MAX_UNROLLED_STORES
    return has_few_stores and count_points(nest.grid) >= points


def _selects(nest: LoopNest, axis: Axis) -> bool:
    """Does the step alone decide between two formulas, one of which reads memory?"""
    selections = [
        part
        for expression in iter_expressions(nest)
        for part in walk(expression)
        if isinstance(part, Masked)
    ]
    return any(
        any(_is_decided_by(axis, b) for b in s.bounds) and _reads_memory(nest, s)
        for s in selections
    )


def _is_decided_by(axis: Axis, bound: BoundsCheck) -> bool:
    """Is the outcome of the check known in every step of the loop?"""
    steps = [bound.substitute({axis: indices.Index(k)}) for k in range(axis.size.constant)]
    return axis in bound.index.axes() and all(step.static_value is not None for step in steps)


def _reads_memory(nest: LoopNest, part: Expression) -> bool:
    """Does it load from memory, itself or through the locals it uses?"""
    loads = [inner for inner in walk(part) if isinstance(inner, Load)]
    return any(
        load.index or _reads_memory(nest, nest.locals[load.name].expression) for load in loads
    )


def _stores_full_lines(nest: LoopNest, axis: Axis) -> bool:
    """Does each step store whole cache lines?"""
    for store in nest.stores:
        stride = store.index.coefficient(axis)
        if stride is None or not stride.is_constant:
            return False
        if stride.constant * store.tensor.itemsize < tuning.MIN_UNROLLED_RUN:
            return False
    return True


def unroll_loop(nest: LoopNest, axis: Axis) -> LoopNest:
    """The nest without the loop: stores, and locals that depend on it, once for each step."""
    varying = _find_varying_locals(nest, axis)
    grid = tuple(a for a in nest.grid if a != axis)
    unrolled: dict[str, Local] = {}
    stores: list[Store] = []
    for step in range(axis.size.constant):
        names = {name: f"{name}_step{step}" for name in varying}
        at_step = substitute_axes(nest, {axis: indices.Index(step)}, grid, ())
        for name, local in at_step.locals.items():
            new_name = names.get(name, name)
            expression = _rename_locals(local.expression, names)
            unrolled.setdefault(new_name, replace(local, name=new_name, expression=expression))
        stores += [replace(s, value=_rename_locals(s.value, names)) for s in at_step.stores]
    return _drop_unused(replace(at_step, locals=unrolled, stores=tuple(stores)))


def _find_varying_locals(nest: LoopNest, axis: Axis) -> set[str]:
    """The locals whose value depends on the loop, directly or through others."""
    found: set[str] = set()
    for name, local in nest.locals.items():
        used = {other.name for other in nest.references(local.expression)}
        if axis in local.expression.axes() or used & found:
            found.add(name)
    return found


def _rename_locals(expression: Expression, names: Mapping[str, str]) -> Expression:
    def rename(part: Expression) -> Expression | None:
        if isinstance(part, Load) and not part.index and part.name in names:
            return replace(part, name=names[part.name])
        return None

    return rewrite_expression(expression, rename, lambda index: index)


def _drop_unused(nest: LoopNest) -> LoopNest:
    """The nest without the locals and tensors that no store needs any more."""
    used = find_required_locals(nest, [store.value for store in nest.stores])
    nest = replace(nest, locals={local.name: local for local in used})
    touched = {tensor.name for tensor, _, _ in nest.accesses()}
    return replace(nest, memory={n: t for n, t in nest.memory.items() if n in touched})
