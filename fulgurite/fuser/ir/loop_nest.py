"""A loop nest: values that are local to an iteration, and what is stored.

In: what `nest_builder` made of a segment. Out: nests over other loops: in another order, joined, renamed.
Grid and body loops have axes of their own, `Local` values stand in the order they can be computed, memory
is addressed by one flat index. Still no threads and no language: schedules order and cut the loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fulgurite.fuser.cost import number
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Bound, Expression, Guard, Load, Operation, Position, walk
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.index_rewrites import map_loaded
from fulgurite.fuser.ir.statement import Tensor

LOOP_NAMES = "ijklmnopqrstuvw"


@dataclass(frozen=True, slots=True)
class Local:
    """A value of one iteration; where `reduction` is set, its accumulation over other loops."""

    name: str
    expression: Expression
    dtype: torch.dtype
    reduction: str | None = None  # sum, prod, max or min; of a scan logsumexp, too
    role: str = "body"  # as in shape.py; rowsum, colsum and scalar are reductions, and scan
    flops: int = 0
    over_body: bool = True  # a scalar: whether it sums the body's points or one value a row
    about: str | None = None  # squared distances from the mean of what this local sums up


@dataclass(frozen=True, slots=True)
class Store:
    """memory[index] = value."""

    tensor: Tensor
    index: Index
    value: Expression


@dataclass(frozen=True)
class Nest:
    """The loops of one kernel."""

    grid: tuple[Axis, ...]
    body: tuple[Axis, ...]
    locals: dict[str, Local]
    stores: tuple[Store, ...]
    memory: dict[str, Tensor]  # what is read or written, by name
    formulas: tuple[str, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.grid + self.body

    def references(self, expression: Expression) -> list[Local]:
        """The locals an expression uses directly."""
        found: dict[str, Local] = {}
        for part in walk(expression):
            if isinstance(part, Load) and not part.index:
                found[part.name] = self.locals[part.name]
        return list(found.values())

    def accesses(self) -> Iterator[tuple[Tensor, Index, bool]]:
        """Every flat index with its tensor, and whether it is a store."""
        for local in self.locals.values():
            for part in walk(local.expression):
                if isinstance(part, Load) and part.index:
                    yield self.memory[part.name], part.index[0], False
        for store in self.stores:
            yield store.tensor, store.index, True
            for part in walk(store.value):
                if isinstance(part, Load) and part.index:
                    yield self.memory[part.name], part.index[0], False


def rewrite(
    expression: Expression,
    change: Callable[[Expression], Expression | None],
    change_index: Callable[[Index], Index],
) -> Expression:
    """A copy with parts replaced (`change` gives the new part, or None to go on inside)."""
    changed = change(expression)
    if changed is not None:
        return changed

    def inner(part: Expression) -> Expression:
        return rewrite(part, change, change_index)

    def in_index(index: Index) -> Index:
        return map_loaded(change_index(index), inner)

    if isinstance(expression, Load):
        return replace(expression, index=tuple(in_index(i) for i in expression.index))
    if isinstance(expression, Operation):
        return replace(expression, arguments=tuple(inner(a) for a in expression.arguments))
    if isinstance(expression, Guard):
        bounds = tuple(Bound(in_index(b.index), b.size) for b in expression.bounds)
        return replace(
            expression,
            bounds=bounds,
            inside=inner(expression.inside),
            outside=inner(expression.outside),
        )
    if isinstance(expression, Position):
        return replace(expression, index=in_index(expression.index))
    return expression


def substituted(
    nest: Nest, axes: Mapping[Axis, Index], grid: tuple[Axis, ...], body: tuple[Axis, ...]
) -> Nest:
    """The nest over other axes."""
    return replace(
        nest,
        grid=grid,
        body=body,
        locals={
            name: replace(local, expression=local.expression.substitute(axes))
            for name, local in nest.locals.items()
        },
        stores=tuple(
            replace(s, index=s.index.substitute(axes), value=s.value.substitute(axes))
            for s in nest.stores
        ),
    )


def all_indices(nest: Nest) -> list[Index]:
    """Every index of the nest: addresses, positions, guards, gathered positions' own."""
    found: list[Index] = [s.index for s in nest.stores]
    expressions = [local.expression for local in nest.locals.values()]
    expressions += [s.value for s in nest.stores]
    for expression in expressions:
        for part in walk(expression):
            if isinstance(part, Load):
                found += part.index
            elif isinstance(part, Position):
                found.append(part.index)
            elif isinstance(part, Guard):
                found += [b.index for b in part.bounds]
    return found


def order_axes(nest: Nest, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Largest steps through memory first, as the widest access has them; stores decide ties."""
    best: dict[Axis, tuple[int, int]] = {}
    ranked = sorted(
        nest.accesses(),
        key=lambda access: (-sum(_step(access[1], a) != 0 for a in axes), not access[2]),
    )
    for rank, (_, index, _) in enumerate(ranked):
        for axis in axes:
            step = _step(index, axis)
            if axis not in best and step:
                best[axis] = (rank, step)
    # axes of one access by their step; an axis the widest access lacks goes outside
    return tuple(
        sorted(axes, key=lambda a: (-best.get(a, (999, 0))[0], -best.get(a, (999, 0))[1], a.name))
    )


def _step(index: Index, axis: Axis) -> int:
    """The size of the step an axis makes, 0 for none; something large where it isn't linear."""
    step = index.coefficient(axis)
    if step is None:
        return 1 << 20
    return abs(number(step))


def coalesce(nest: Nest) -> Nest:
    """Joins neighbouring loops that every index walks as one."""
    changed = True
    while changed:
        changed = False
        for group in ("grid", "body"):
            axes: tuple[Axis, ...] = getattr(nest, group)
            for outer, inner in itertools.pairwise(axes):
                if all(_joins(index, outer, inner) for index in all_indices(nest)):
                    joined = Axis(inner.name, outer.size * inner.size)
                    new = tuple(joined if a == inner else a for a in axes if a != outer)
                    other = {"grid": nest.grid, "body": nest.body, group: new}
                    swap = {outer: indices.ZERO, inner: indices.of_atom(joined)}
                    nest = substituted(nest, swap, other["grid"], other["body"])
                    changed = True
                    break
            if changed:
                break
    return nest


def _joins(index: Index, outer: Axis, inner: Axis) -> bool:
    a, b = index.coefficient(outer), index.coefficient(inner)
    return a is not None and b is not None and a == b * inner.size


def named(nest: Nest) -> Nest:
    """Loops called i, j, k … from the outside in."""
    names = iter(LOOP_NAMES)
    swap: dict[Axis, Index] = {}
    renamed: list[Axis] = []
    for k, axis in enumerate(nest.axes):
        name = next(names, f"i{k}")
        new = Axis(name, axis.size)
        renamed.append(new)
        swap[axis] = indices.of_atom(new)
    count = len(nest.grid)
    return substituted(nest, swap, tuple(renamed[:count]), tuple(renamed[count:]))
