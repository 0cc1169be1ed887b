"""Builds the loop nest of a row program.

In: a segment that is a row program (`row_program.py`). Out: a `LoopNest` whose locals are the steps
of a row, in order. A step has the loops of its own values (`Local.axes`). It loads earlier steps at
an index over their axes. Elementwise steps with one reader become part of it.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import count_elements
from fulgurite.fuser.ir.expression import Expression, Load, opmath_dtype
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.index_rewrites import map_indirect
from fulgurite.fuser.ir.loop_ids import assign_loop_ids
from fulgurite.fuser.ir.loop_nest import LOOP_NAMES, Local, LoopNest, Store, order_axes
from fulgurite.fuser.ir.statement import Region, Statement
from fulgurite.fuser.segment.scatter_nest import flatten_index
from fulgurite.fuser.segment.state import Segment


def build_row_program(region: Region, segment: Segment) -> LoopNest:
    """Builds the nest of a row program, its grid ordered by stride."""
    nest = _RowProgramBuilder(region, segment).build()
    return replace(nest, grid=order_axes(nest, nest.grid))


class _RowProgramBuilder:
    def __init__(self, region: Region, segment: Segment) -> None:
        self.segment, self.tensors = segment, region.tensors
        names = set(segment.structure.statements)
        self.members = {s.name: s for s in region.statements if s.name in names}
        self.loop_ids = assign_loop_ids(region)
        grid = segment.structure.grid
        used = {self.loop_ids[(s.name, a)] for s in self.members.values() for a in s.all_axes}
        ordered = sorted(used, key=lambda loop: (loop not in grid, loop))
        names_of = {
            loop: LOOP_NAMES[k] if k < len(LOOP_NAMES) else f"i{k}"
            for k, loop in enumerate(ordered)
        }
        self.loops: dict[int, Axis] = {}
        for s in self.members.values():
            for axis in s.all_axes:
                loop = self.loop_ids[(s.name, axis)]
                self.loops.setdefault(loop, Axis(names_of[loop], axis.size))
        self.grid = tuple(self.loops[loop] for loop in ordered if loop in grid)
        self.body = tuple(self.loops[loop] for loop in ordered if loop not in grid)
        self.memory = {name: self.tensors[name] for name in segment.stored}
        self.inlined: set[str] = set()
        for name in self.members:  # in program order
            self.inlined |= {name} if self.is_inlined(name) else set()

    def build(self) -> LoopNest:
        steps = {
            name: self.make_step(s) for name, s in self.members.items() if name not in self.inlined
        }
        stores = tuple(self.make_store(self.members[name]) for name in self.segment.stored)
        formulas = tuple(str(s) for s in self.members.values())
        return LoopNest(self.grid, self.body, steps, stores, self.memory, formulas)

    def axis(self, s: Statement, axis: Axis) -> Axis:
        return self.loops[self.loop_ids[(s.name, axis)]]

    def rename(self, s: Statement) -> dict[Axis, Index]:
        return {axis: indices.from_atom(self.axis(s, axis)) for axis in s.all_axes}

    def row_axes(self, s: Statement, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Returns those of a statement's axes that are loops of the row."""
        renamed = (self.axis(s, axis) for axis in axes)
        return tuple(axis for axis in renamed if axis not in self.grid)

    def count_row_points(self, s: Statement) -> int:
        return count_elements(tuple(axis.size for axis in self.row_axes(s, s.all_axes)))

    def is_inlined(self, name: str) -> bool:
        """Whether a step is computed where it is read: once, and at no more points.

        A single operation on another step, such as an absolute value, is computed at every reader.
        """
        s = self.members[name]
        if s.reduction is not None or name in self.segment.stored:
            return False
        loads = [(m, load) for m in self.members.values() for load in m.loads if load.name == name]
        is_trivial = len(s.loads) == 1 and self.segment.structure.statements[name].flops <= 1
        if is_trivial and s.loads[0].name in self.members.keys() - self.inlined:
            return True
        return len(loads) == 1 and self.count_row_points(loads[0][0]) <= self.count_row_points(s)

    def make_step(self, s: Statement) -> Local:
        renamed = self.rename(s)
        reduction, rank = s.reduction, None
        if reduction is not None and reduction.rank is not None:
            rank = reduction.rank.substitute(renamed)
        over = reduction.axes if reduction is not None else ()
        return Local(
            s.name,
            self.rewrite(s.expression.substitute(renamed)),
            opmath_dtype(s.tensor.dtype if rank is not None else s.expression.dtype),
            reduction.kind if reduction is not None else None,
            "row_step",
            self.segment.structure.statements[s.name].flops,
            axes=self.row_axes(s, s.axes),
            reduced_axes=self.row_axes(s, over),
            rank=rank,
        )

    def make_store(self, s: Statement) -> Store:
        at = tuple(indices.from_atom(self.axis(s, axis)) for axis in s.axes)
        own = tuple(indices.from_atom(axis) for axis in self.row_axes(s, s.axes))
        tensor = self.tensors[s.name]
        value = Load(s.name, own, opmath_dtype(s.expression.dtype))
        if s.reduction is not None and s.reduction.rank is not None:
            value = replace(value, dtype=tensor.dtype)
        return Store(tensor, flatten_index(tensor, at), value)

    def rewrite(self, expression: Expression) -> Expression:
        """Turns loads of members into loads of steps, other loads into flat addresses."""

        def rewrite_load(part: Expression) -> Expression | None:
            if not isinstance(part, Load):
                return None
            member = self.members.get(part.name)
            if member is not None:
                return self.load_member(member, part.index)
            at = tuple(map_indirect(i, self.rewrite) for i in part.index)
            tensor = self.tensors[part.name]
            self.memory[part.name] = tensor
            return Load(part.name, (flatten_index(tensor, at),), part.dtype)

        return rewrite_expression(expression, rewrite_load, lambda index: index)

    def load_member(self, s: Statement, index: tuple[Index, ...]) -> Expression:
        if s.name in self.inlined:
            return self.rewrite(s.expression.substitute(dict(zip(s.axes, index, strict=True))))
        at = tuple(
            map_indirect(position, self.rewrite)
            for axis, position in zip(s.axes, index, strict=True)
            if self.axis(s, axis) not in self.grid
        )
        is_argsort = s.reduction is not None and s.reduction.rank is not None
        dtype = s.tensor.dtype if is_argsort else s.expression.dtype
        return Load(s.name, at, opmath_dtype(dtype))
