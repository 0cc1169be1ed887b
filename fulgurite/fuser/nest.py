"""A segment as one loop nest: values that are local to an iteration, and what is stored.

In: a segment of a refined region. Out: a `Nest`: grid and body loops with axes of its own, `Local`
values in the order they can be computed, and `Store`s. Statements of the segment that are read at
several places become several locals; memory is addressed by one flat index; axes that are always
walked together are one axis. Still no threads and no language: schedules order and cut the loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from . import index as indices
from .cost import number
from .index import Axis, Index
from .ir import (
    Bound,
    Constant,
    Expression,
    Guard,
    Load,
    Operation,
    Position,
    Region,
    Statement,
    Tensor,
    value_type,
    walk,
)
from .refine import axis_classes
from .segment import Segment

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


def build(region: Region, segment: Segment) -> Nest:
    """The nest of a segment, with its axes in no particular order yet."""
    return _Builder(region, segment).build()


class _Builder:
    def __init__(self, region: Region, segment: Segment) -> None:
        self.segment = segment
        self.tensors = region.tensors
        self.members = {f.name: f.statement for f in segment.shape.facts.values()}
        self.classes = axis_classes(region)
        self.loops: dict[int, Axis] = {}
        for s in self.members.values():
            for axis in s.all_axes:
                key = self.classes[(s.name, axis)]
                self.loops.setdefault(key, Axis(f"a{key}", axis.size))
        self.locals: dict[str, Local] = {}
        self.known: dict[tuple[str, tuple[Index, ...]], Expression] = {}
        self.memory: dict[str, Tensor] = {}

    def build(self) -> Nest:
        shape = self.segment.shape
        stores = []
        parts = self.parts()
        for name in self.segment.stored:
            s = self.members[name]
            at = tuple(self.loop(s, axis) for axis in s.axes)
            tensor = self.tensors[name]
            self.memory[name] = tensor
            places = [at] if parts is None else [(*at[:-1], Index(k)) for k in range(2)]
            stores += [Store(tensor, flat(tensor, at), self.value(name, at)) for at in places]
        grid = tuple(self.loops[c] for c in sorted(shape.grid - {parts}) if c in self.loops)
        body = tuple(self.loops[c] for c in sorted(shape.body) if c in self.loops)
        formulas = tuple(str(self.members[name]) for name in self.members)
        return Nest(grid, body, self.locals, tuple(stores), self.memory, formulas)

    def parts(self) -> int | None:
        """The loop over the parts of complex results, where it can be written out: nothing else has it.

        And nothing chooses between values: GCC 12 mixes up neighbours that are read under a mask and
        stored in pairs (-O2 -ftree-vectorize -fno-trapping-math).
        """
        woven = [s for s in self.members.values() if s.tensor.pairs]
        if not woven or {s.name for s in woven} != set(self.segment.stored):
            return None
        (loop,) = {self.classes[(s.name, s.axes[-1])] for s in woven}
        others = [s for s in self.members.values() if not s.tensor.pairs]
        if any(_chooses(part) for s in others for part in walk(s.expression)):
            return None
        used = {self.classes[(s.name, axis)] for s in others for axis in s.all_axes}
        used |= {self.classes[(s.name, axis)] for s in woven for axis in s.axes[:-1]}
        return None if loop in used else loop

    def loop(self, s: Statement, axis: Axis) -> Index:
        return indices.of_atom(self.loops[self.classes[(s.name, axis)]])

    def value(self, name: str, at: tuple[Index, ...]) -> Expression:
        """The statement's value at an index, as a constant or a reference to a local."""
        key = (name, at)
        if key in self.known:
            return self.known[key]
        s = self.members[name]
        axes = dict(zip(s.axes, at, strict=True))
        if s.reduction is not None:
            axes.update({axis: self.loop(s, axis) for axis in s.reduction.axes})
        expression = self.rewrite(s.expression.substitute(axes))
        role = self.segment.shape.roles[name]
        reduction = s.reduction.kind if s.reduction else s.scan.kind if s.scan else None
        reference = isinstance(expression, Load) and not expression.index
        if reduction is None and (reference or isinstance(expression, Constant)):
            self.known[key] = expression
            return expression
        unique = _unused(name, self.locals)
        dtype = value_type(s.expression.dtype)
        facts = self.segment.shape.facts[name]
        inner = bool(facts.reduced & self.segment.shape.body)
        about = s.reduction.about if s.reduction else None
        summed = self.known.get((about, at)) if about is not None else None
        self.locals[unique] = Local(
            unique,
            expression,
            dtype,
            reduction,
            role,
            facts.flops,
            over_body=inner,
            about=summed.name if isinstance(summed, Load) else None,
        )
        self.known[key] = Load(unique, (), dtype)
        return self.known[key]

    def rewrite(self, expression: Expression) -> Expression:
        """Loads of this segment's statements become locals, other loads flat addresses."""
        if isinstance(expression, Load):
            if expression.name in self.members:
                return self.value(expression.name, expression.index)
            at = tuple(self.in_index(i) for i in expression.index)
            tensor = self.tensors[expression.name]
            self.memory[expression.name] = tensor
            return Load(expression.name, (flat(tensor, at),), expression.dtype)
        if isinstance(expression, Operation):
            return replace(
                expression, arguments=tuple(self.rewrite(a) for a in expression.arguments)
            )
        if isinstance(expression, Guard):
            bounds = tuple(
                Bound(self.in_index(b.index), self.in_index(b.size)) for b in expression.bounds
            )
            return replace(
                expression,
                bounds=bounds,
                inside=self.guarded(expression.inside),
                outside=self.guarded(expression.outside),
            )
        if isinstance(expression, Position):
            return replace(expression, index=self.in_index(expression.index))
        return expression

    def guarded(self, expression: Expression) -> Expression:
        """A side of a guard, all in one expression: a local would be read outside the guard too."""
        rewritten = self.rewrite(expression)
        return self.expand(rewritten)

    def expand(self, expression: Expression) -> Expression:
        def expanded(part: Expression) -> Expression | None:
            if isinstance(part, Load) and not part.index:
                local = self.locals[part.name]
                if local.reduction is None and _reads_memory(local.expression, self.locals):
                    return self.expand(local.expression)
            return None

        return rewrite(expression, expanded, lambda index: index)

    def in_index(self, index: Index) -> Index:
        return indices.map_loaded(index, self.rewrite)


def _chooses(part: Expression) -> bool:
    return isinstance(part, Guard) or (isinstance(part, Operation) and part.name == "where")


def _reads_memory(expression: Expression, known: Mapping[str, Local]) -> bool:
    """Does it read memory, itself or through locals that are not reductions?"""
    for part in walk(expression):
        if isinstance(part, Load):
            if part.index:
                return True
            local = known[part.name]
            if local.reduction is None and _reads_memory(local.expression, known):
                return True
    return False


def flat(tensor: Tensor, at: tuple[Index, ...]) -> Index:
    total = indices.ZERO
    for position, stride in zip(at, tensor.strides, strict=True):
        total = total + position * stride
    return indices.recombine(total)


def _unused(name: str, taken: Mapping[str, object]) -> str:
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}_at{count}"
    return unique


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
        return indices.map_loaded(change_index(index), inner)

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
