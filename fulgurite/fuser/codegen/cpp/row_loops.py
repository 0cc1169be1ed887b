"""Loops of a row program's steps, merged so that SIMD loops are long.

In: a step and what it stores. Out: the same over merged loops: a row of blocks [j, k] is one loop where
all buffers and tensors are contiguous in both, and otherwise the loop over `k` alone is SIMD. Loads of
other steps get one index into their row buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Load, iter_indices
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, FloorDiv, Index, Mod
from fulgurite.fuser.ir.index_rewrites import map_indirect, recombine_div_mod
from fulgurite.fuser.ir.loop_nest import Local, LoopNest, Store


@dataclass(frozen=True)
class StepLoops:
    """A step, its stores, and the loops to write for it."""

    step: Local
    stores: tuple[Store, ...]


def flatten_step_loads(nest: LoopNest, expression: Expression) -> Expression:
    """Replaces the indices of loads of other steps by one index into their row buffer."""

    def flatten(part: Expression) -> Expression | None:
        if not isinstance(part, Load):
            return None
        index = tuple(
            recombine_div_mod(map_indirect(i, lambda p: flatten_step_loads(nest, p)))
            for i in part.index
        )
        if not index or not nest.is_local(part):
            return replace(part, index=index)
        flat = indices.ZERO
        for axis, position in zip(nest.locals[part.name].axes, index, strict=True):
            flat = flat * axis.size + position
        return replace(part, index=(recombine_div_mod(flat),))

    return rewrite_expression(expression, flatten, recombine_div_mod)


def merge_step_loops(nest: LoopNest, loops: StepLoops) -> StepLoops:
    """Merges the innermost loops: of the values, and of what is reduced."""
    for attribute in ("reduced_axes", "axes"):
        axes: tuple[Axis, ...] = getattr(loops.step, attribute)
        for first in range(len(axes) - 1):
            merged = _merge(nest, loops, axes[first:])
            if merged is not None:
                loops = merged
                break
    step = loops.step
    return replace(loops, step=replace(step, expression=flatten_step_loads(nest, step.expression)))


def _merge(nest: LoopNest, loops: StepLoops, axes: tuple[Axis, ...]) -> StepLoops | None:
    """One loop instead of these; None if an index would then need a division."""
    flat = Axis("".join(axis.name for axis in axes), indices.product([a.size for a in axes]))
    positions: dict[Axis, Index] = {}
    rest = indices.from_atom(flat)
    for axis in reversed(axes[1:]):
        positions[axis] = indices.modulo(rest, axis.size)
        rest = indices.floordiv(rest, axis.size)
    positions[axes[0]] = rest
    expression = loops.step.expression.substitute(positions)
    if _divides(flatten_step_loads(nest, expression)):
        return None
    stores = tuple(_substitute_store(store, positions) for store in loops.stores)
    if any(_index_divides(store.index) for store in stores):
        return None

    def merge(group: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return (*(a for a in group if a not in axes), flat) if axes[0] in group else group

    step = loops.step
    step = replace(
        step, expression=expression, axes=merge(step.axes), reduced_axes=merge(step.reduced_axes)
    )
    return StepLoops(step, stores)


def _substitute_store(store: Store, positions: Mapping[Axis, Index]) -> Store:
    return replace(store, index=recombine_div_mod(store.index.substitute(positions)))


def _divides(expression: Expression) -> bool:
    return any(map(_index_divides, iter_indices(expression)))


def _index_divides(index: Index) -> bool:
    return any(isinstance(atom, FloorDiv | Mod) for atom in index.atoms())
