"""Loop nests: the loops of one kernel, the values local to an iteration, and the stores.

In: what `segment/build_loop_nest.py` builds from a segment. Out: nests with reordered, collapsed or
renamed loops. Grid and body loops have axes of their own. `Local` values are in an order in which
they can be computed. Memory is addressed by one flat index. A nest has no threads and no target
language: schedules order and split the loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.expression import (
    Expression,
    IndexValue,
    Load,
    iter_indices,
    walk,
)
from fulgurite.fuser.ir.index import Axis, Index, Symbol
from fulgurite.fuser.ir.statement import Tensor

LOOP_NAMES = "ijklmnopqrstuvw"
# Where a value is computed in the loops; `segment/loop_structure.py` defines each.
Role = Literal[
    "body",
    "row",
    "row_reduction",
    "column_reduction",
    "full_reduction",
    "scan",
    "finalize",
    "row_step",
    "inline",
]


@dataclass(frozen=True, slots=True)
class Local:
    """A value of one iteration or, if `reduction` is set, its accumulation over other loops."""

    name: str
    expression: Expression
    dtype: torch.dtype
    reduction: str | None = None  # sum, prod, max or min; a scan also logsumexp
    role: Role = "body"
    flops: int = 0
    over_body: bool = True  # of a full reduction: over all points, or over one value per row
    # Set for sums of squared deviations: the local that sums the same values, for the mean.
    welford_sum: str | None = None
    # Of a step of a row program: the loops of the row that it has a value for, those that it
    # reduces over, and the rank of an argsort. Other steps load it at an index over `axes`.
    axes: tuple[Axis, ...] = ()
    reduced_axes: tuple[Axis, ...] = ()
    rank: Index | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """`memory[index] = value`, or with `combine` an indexed store `memory[index] combine= value`."""

    tensor: Tensor
    index: Index
    value: Expression
    combine: str | None = None  # of an indexed store: set, sum, prod, max or min
    # of an indexed store: loops whose iterations write different elements
    disjoint: frozenset[Axis] = frozenset()
    statement: str = ""  # of a store into a slice or another buffer: the statement it stores

    @property
    def name(self) -> str:
        """The statement that it stores."""
        return self.statement or self.tensor.name

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """The value and, of an indexed store, its computed position."""
        if self.combine is None:
            return (self.value,)
        return (self.value, IndexValue(self.index, torch.int64))


@dataclass(frozen=True, slots=True)
class Table:
    """`tensor[index] = value` at all points of its own axes, computed before the loops."""

    tensor: Tensor
    axes: tuple[Axis, ...]
    index: Index
    value: Expression


@dataclass(frozen=True)
class LoopNest:
    """The loops of one kernel."""

    grid: tuple[Axis, ...]
    body: tuple[Axis, ...]
    locals: dict[str, Local]
    stores: tuple[Store, ...]
    memory: dict[str, Tensor]  # every tensor that is read or written, by name
    formulas: tuple[str, ...]
    initial: LoopNest | None = None  # runs before: stores what an indexed store adds to
    tables: tuple[Table, ...] = ()  # of CPU kernels; other expressions load them as memory

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.grid + self.body

    @property
    def is_row_program(self) -> bool:
        """Whether locals are steps of a row, which others load at an index."""
        return any(local.role == "row_step" for local in self.locals.values())

    @property
    def computes_index(self) -> bool:
        """Whether an index of a gather is computed here, not loaded as it is.

        On made-up inputs it may be out of range, which is an assert on a GPU.
        """
        expressions = [local.expression for local in self.locals.values()]
        expressions += [store.value for store in self.stores]
        indices = [index for e in expressions for index in iter_indices(e)]
        indices += [store.index for store in self.stores]
        return any(
            not (isinstance(atom.value, Load) and not self.is_local(atom.value))
            for index in indices
            for atom in index.indirect_indices()
        )

    def symbols(self) -> set[Symbol]:
        """Every symbol that the kernel's code names; tensors' strides are in the indices."""
        parts: list[Index | Expression] = [axis.size for axis in self.axes]
        for local in self.locals.values():
            parts += [local.expression] if local.rank is None else [local.expression, local.rank]
        for store in self.stores:
            parts += [store.index, store.value]
        for table in self.tables:
            parts += [table.index, table.value]
        return {symbol for part in parts for symbol in part.symbols()}

    def is_local(self, load: Load) -> bool:
        """Whether a load reads a local, not memory."""
        if not load.index:
            return True
        local = self.locals.get(load.name)
        return local is not None and local.role == "row_step"

    def references(self, expression: Expression) -> list[Local]:
        """Returns the locals that an expression uses directly."""
        found: dict[str, Local] = {}
        for part in walk(expression):
            if isinstance(part, Load) and self.is_local(part):
                found[part.name] = self.locals[part.name]
        return list(found.values())

    def accesses(self) -> Iterator[tuple[Tensor, Index, bool]]:
        """Yields (tensor, flat index, is_store) for every memory access."""
        for local in self.locals.values():
            for part in walk(local.expression):
                if isinstance(part, Load) and not self.is_local(part):
                    yield self.memory[part.name], part.index[0], False
        for store in self.stores:
            yield store.tensor, store.index, True
            if store.combine is not None:  # keeps or adds to what is there
                yield store.tensor, store.index, False
            for part in (part for expression in store.expressions for part in walk(expression)):
                if isinstance(part, Load) and not self.is_local(part):
                    yield self.memory[part.name], part.index[0], False


def substitute_axes(
    nest: LoopNest, axes: Mapping[Axis, Index], grid: tuple[Axis, ...], body: tuple[Axis, ...]
) -> LoopNest:
    """Replaces axes by indices over the new grid and body loops."""
    return replace(
        nest,
        grid=grid,
        body=body,
        locals={
            name: replace(local, expression=local.expression.substitute(axes))
            for name, local in nest.locals.items()
        },
        stores=tuple(
            replace(
                s,
                index=s.index.substitute(axes),
                value=s.value.substitute(axes),
                disjoint=frozenset().union(*(_image(axis, axes) for axis in s.disjoint)),
            )
            for s in nest.stores
        ),
    )


def _image(axis: Axis, axes: Mapping[Axis, Index]) -> set[Axis]:
    return axes[axis].axes() if axis in axes else {axis}


def collect_indices(nest: LoopNest) -> list[Index]:
    """Returns every index of the nest: addresses, index values, bounds checks, gathers."""
    found: list[Index] = [s.index for s in nest.stores]
    expressions = [local.expression for local in nest.locals.values()]
    expressions += [expression for s in nest.stores for expression in s.expressions]
    for expression in expressions:
        found += iter_indices(expression)
    return found


def order_axes(nest: LoopNest, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Orders axes by decreasing stride of the access that uses most of them. Stores break ties."""
    best: dict[Axis, tuple[int, int]] = {}
    ranked = sorted(
        nest.accesses(),
        key=lambda access: (-sum(_abs_stride(access[1], a) != 0 for a in axes), not access[2]),
    )
    for rank, (_, index, _) in enumerate(ranked):
        for axis in axes:
            step = _abs_stride(index, axis)
            if axis not in best and step:
                best[axis] = (rank, step)
    # Axes of one access are ordered by stride. Axes that the widest access lacks go outside.
    return tuple(
        sorted(axes, key=lambda a: (-best.get(a, (999, 0))[0], -best.get(a, (999, 0))[1], a.name))
    )


def _abs_stride(index: Index, axis: Axis) -> int:
    """Returns the absolute stride of an axis: 0 if unused, a large number if not linear."""
    step = index.coefficient(axis)
    if step is None:
        return 1 << 20
    return abs(size_hint(step))


def collapse_loops(nest: LoopNest) -> LoopNest:
    """Merges neighboring loops that every index traverses as one."""
    changed = True
    while changed:
        changed = False
        for group in ("grid", "body"):
            axes: tuple[Axis, ...] = getattr(nest, group)
            for outer, inner in itertools.pairwise(axes):
                if any((outer in s.disjoint) != (inner in s.disjoint) for s in nest.stores):
                    continue
                if all(_can_collapse(index, outer, inner) for index in collect_indices(nest)):
                    merged = Axis(inner.name, outer.size * inner.size)
                    axes = tuple(merged if a == inner else a for a in axes if a != outer)
                    loops = {"grid": nest.grid, "body": nest.body, group: axes}
                    mapping = {outer: indices.ZERO, inner: indices.from_atom(merged)}
                    nest = substitute_axes(nest, mapping, loops["grid"], loops["body"])
                    changed = True
                    break
            if changed:
                break
    return nest


def _can_collapse(index: Index, outer: Axis, inner: Axis) -> bool:
    a, b = index.coefficient(outer), index.coefficient(inner)
    return a is not None and b is not None and a == b * inner.size


def rename_loops(nest: LoopNest) -> LoopNest:
    """Names loops i, j, k … from the outside in."""
    names = iter(LOOP_NAMES)
    mapping: dict[Axis, Index] = {}
    renamed: list[Axis] = []
    for k, axis in enumerate(nest.axes):
        name = next(names, f"i{k}")
        new = Axis(name, axis.size)
        renamed.append(new)
        mapping[axis] = indices.from_atom(new)
    count = len(nest.grid)
    return substitute_axes(nest, mapping, tuple(renamed[:count]), tuple(renamed[count:]))
