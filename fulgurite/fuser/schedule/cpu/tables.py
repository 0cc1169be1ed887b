"""Tables of CPU kernels: values of one or two axes that a kernel computes once, before its loops.

In: a loop nest. Out: the same nest, in which a value that reads no memory and depends on few of the
loops is a load from a small table. Source positions and weights of an interpolation depend on one axis
of an image; without a table they would be computed for every image and channel, inside the SIMD loop.
Positions are stored as int32, so that a gather takes as many lanes as there are floats in a vector.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import count_elements
from fulgurite.fuser.ir.expression import Expression, Load, Operation, walk
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, Index, IndirectIndex
from fulgurite.fuser.ir.index_rewrites import map_indirect
from fulgurite.fuser.ir.loop_nest import Local, LoopNest, Table, collect_indices
from fulgurite.fuser.ir.statement import Tensor
from fulgurite.fuser.segment.build_loop_nest import flatten_index
from fulgurite.kernels.tuning import fuser_cpu as tuning

INT32_LIMIT = 1 << 31


def hoist_tables(nest: LoopNest) -> LoopNest:
    """Replaces values that are worth it by loads from tables."""
    if nest.is_row_program:
        return nest
    hoisting = _Hoisting(nest)
    if not hoisting.tables:
        return nest
    kept = {name: x for name, x in nest.locals.items() if name not in hoisting.loads}
    return replace(
        nest,
        locals={
            name: replace(x, expression=hoisting.rewrite(x.expression)) for name, x in kept.items()
        },
        stores=tuple(
            replace(
                s,
                value=hoisting.rewrite(s.value),
                index=hoisting.rewrite_index(s.index),
            )
            for s in nest.stores
        ),
        memory=nest.memory | {t.tensor.name: t.tensor for t in hoisting.tables},
        tables=tuple(hoisting.tables),
    )


class _Hoisting:
    """Finds the tables of a nest, and replaces locals by loads from them."""

    def __init__(self, nest: LoopNest) -> None:
        self.nest = nest
        self.tables: list[Table] = []
        self.loads: dict[str, Expression] = {}  # of locals that are in a table
        self.pure: dict[str, tuple[Expression, set[Axis]]] = {}  # locals that read no memory
        self.positions = _find_positions(nest)
        points = count_elements(tuple(axis.size for axis in nest.axes))
        for local in nest.locals.values():
            found = self.find_pure(local)
            if found is None:
                continue
            self.pure[local.name] = found
            expression, axes = found
            ordered = tuple(axis for axis in nest.axes if axis in axes)
            rows = points // max(count_elements(tuple(axis.size for axis in ordered)), 1)
            if ordered and rows >= tuning.MIN_TABLE_USES and self.is_worth_it(local):
                self.add_table(local, expression, ordered)

    def is_worth_it(self, local: Local) -> bool:
        return local.name in self.positions or local.flops >= tuning.MIN_TABLE_FLOPS

    def find_pure(self, local: Local) -> tuple[Expression, set[Axis]] | None:
        """The local's value without references to other locals, and its axes; None if it loads."""
        if local.reduction is not None or local.role == "scan":
            return None
        for part in walk(local.expression):
            if isinstance(part, Load) and (part.index or part.name not in self.pure):
                return None
        expression = rewrite_expression(local.expression, self.inline, lambda index: index)
        return expression, expression.axes()

    def inline(self, part: Expression) -> Expression | None:
        if isinstance(part, Load) and not part.index:
            return self.loads.get(part.name, self.pure[part.name][0])
        return None

    def add_table(self, local: Local, expression: Expression, axes: tuple[Axis, ...]) -> None:
        name = f"{local.name}_table"
        while name in self.nest.memory or name in self.nest.locals:
            name += "_"
        sizes = tuple(axis.size for axis in axes)
        is_int32 = local.dtype == torch.int64 and local.name in self.positions
        dtype = torch.int32 if is_int32 else local.dtype
        tensor = Tensor(name, dtype, sizes, _row_major(sizes))
        at = flatten_index(tensor, tuple(indices.from_atom(axis) for axis in axes))
        load: Expression = Load(name, (at,), dtype)
        if is_int32:
            load = Operation("cast", (load,), torch.int64)
        self.loads[local.name] = load
        self.tables.append(Table(tensor, axes, at, expression))

    def rewrite(self, expression: Expression) -> Expression:
        return rewrite_expression(expression, self.replace_local, lambda index: index)

    def rewrite_index(self, index: Index) -> Index:
        return map_indirect(index, self.rewrite)

    def replace_local(self, part: Expression) -> Expression | None:
        if isinstance(part, Load) and not part.index:
            return self.loads.get(part.name)
        return None


def _find_positions(nest: LoopNest) -> set[str]:
    """Locals that are positions in a gather, known to be in range and to fit 32 bits."""
    found: set[str] = set()
    for index in collect_indices(nest):
        for atom in index.indirect_indices():
            if _fits_int32(atom) and isinstance(atom.value, Load) and not atom.value.index:
                found.add(atom.value.name)
    return found


def _fits_int32(atom: IndirectIndex) -> bool:
    return not atom.is_checked and atom.size.is_constant and atom.size.constant < INT32_LIMIT


def _row_major(sizes: tuple[Index, ...]) -> tuple[Index, ...]:
    strides: list[Index] = []
    inner = indices.ONE
    for size in reversed(sizes):
        strides.insert(0, inner)
        inner = inner * size
    return tuple(strides)
