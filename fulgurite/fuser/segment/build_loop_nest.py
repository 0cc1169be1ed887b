"""Builds the loop nest of a segment.

In: a segment of a region with split axes. Out: a `LoopNest`. A statement that is read at several
indices becomes several locals. Axes with the same loop id become one axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    BoundsCheck,
    Constant,
    Expression,
    IndexValue,
    Load,
    Masked,
    Operation,
    opmath_dtype,
    walk,
)
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.index_rewrites import map_indirect
from fulgurite.fuser.ir.loop_ids import assign_loop_ids
from fulgurite.fuser.ir.loop_nest import Local, LoopNest, Store
from fulgurite.fuser.ir.statement import Region, Statement, Tensor
from fulgurite.fuser.segment import Segment
from fulgurite.fuser.segment.build_row_program import build_row_program
from fulgurite.fuser.segment.scatter_nest import (
    build_initial_nest,
    find_disjoint_axes,
    flatten_index,
)


def build_loop_nest(region: Region, segment: Segment) -> LoopNest:
    """Builds the nest of a segment. Its axes are in no particular order yet."""
    if segment.structure.is_row_program:
        return build_row_program(region, segment)
    return _LoopNestBuilder(region, segment).build()


class _LoopNestBuilder:
    def __init__(self, region: Region, segment: Segment) -> None:
        self.segment = segment
        self.tensors = region.tensors
        self.members = {f.name: f.statement for f in segment.structure.statements.values()}
        self.loop_ids = assign_loop_ids(region)
        self.loops: dict[int, Axis] = {}
        for s in self.members.values():
            for axis in s.all_axes:
                key = self.loop_ids[(s.name, axis)]
                self.loops.setdefault(key, Axis(f"a{key}", axis.size))
        self.locals: dict[str, Local] = {}
        self.known: dict[tuple[str, tuple[Index, ...]], Expression] = {}
        self.memory: dict[str, Tensor] = {}

    def build(self) -> LoopNest:
        structure = self.segment.structure
        if structure.has_scatter:
            return self.build_scatter()
        stores = []
        parts = self.find_complex_loop()
        for name in self.segment.stored:
            s = self.members[name]
            at = tuple(self.loop(s, axis) for axis in s.axes)
            tensor = self.tensors[name]
            self.memory[name] = tensor
            points = [at] if parts is None else [(*at[:-1], Index(k)) for k in range(2)]
            stores += [
                Store(tensor, flatten_index(tensor, at), self.value(name, at)) for at in points
            ]
        grid = tuple(self.loops[c] for c in sorted(structure.grid - {parts}) if c in self.loops)
        body = tuple(self.loops[c] for c in sorted(structure.body) if c in self.loops)
        formulas = tuple(str(self.members[name]) for name in self.members)
        return LoopNest(grid, body, self.locals, tuple(stores), self.memory, formulas)

    def build_scatter(self) -> LoopNest:
        """Builds the nest of an indexed store. Its loops keep the order in which points store."""
        (name,) = self.segment.stored
        s, tensor = self.members[name], self.tensors[name]
        assert s.scatter is not None, f"{s} is no indexed store"
        axes = {axis: self.loop(s, axis) for axis in s.scatter.axes}
        self.memory[name] = tensor
        value = self.rewrite(s.scatter.value.substitute(axes))
        positions = tuple(self.rewrite_index(i.substitute(axes)) for i in s.scatter.index)
        store = Store(
            tensor,
            flatten_index(tensor, positions),
            value,
            s.scatter.kind,
            find_disjoint_axes(positions),
        )
        grid = tuple(self.loops[self.loop_ids[(name, axis)]] for axis in s.scatter.axes)
        formulas = tuple(str(member) for member in self.members.values())
        initial = build_initial_nest(s, self.tensors)
        return LoopNest(grid, (), self.locals, (store,), self.memory, formulas, initial)

    def find_complex_loop(self) -> int | None:
        """Returns the loop over real and imaginary parts if the nest can unroll it, otherwise None.

        No other statement may use the loop or select between values. GCC 12 miscompiles neighbors
        that are loaded under a mask and stored in pairs (-O2 -ftree-vectorize -fno-trapping-math).
        """
        complex_results = [s for s in self.members.values() if s.tensor.is_view_as_real]
        if not complex_results or {s.name for s in complex_results} != set(self.segment.stored):
            return None
        (loop,) = {self.loop_ids[(s.name, s.axes[-1])] for s in complex_results}
        other_statements = [s for s in self.members.values() if not s.tensor.is_view_as_real]
        if any(_is_select(part) for s in other_statements for part in walk(s.expression)):
            return None
        used = {self.loop_ids[(s.name, axis)] for s in other_statements for axis in s.all_axes}
        used |= {self.loop_ids[(s.name, axis)] for s in complex_results for axis in s.axes[:-1]}
        return None if loop in used else loop

    def loop(self, s: Statement, axis: Axis) -> Index:
        return indices.from_atom(self.loops[self.loop_ids[(s.name, axis)]])

    def value(self, name: str, at: tuple[Index, ...]) -> Expression:
        """Returns the statement's value at an index: a constant or a reference to a local."""
        key = (name, at)
        if key in self.known:
            return self.known[key]
        s = self.members[name]
        axes = dict(zip(s.axes, at, strict=True))
        if s.reduction is not None:
            axes.update({axis: self.loop(s, axis) for axis in s.reduction.axes})
        expression = self.rewrite(s.expression.substitute(axes))
        role = self.segment.structure.roles[name]
        reduction = s.reduction.kind if s.reduction else s.scan.kind if s.scan else None
        is_reference = isinstance(expression, Load) and not expression.index
        if reduction is None and (is_reference or isinstance(expression, Constant)):
            self.known[key] = expression
            return expression
        unique = _make_unique(name, self.locals)
        dtype = opmath_dtype(s.expression.dtype)
        info = self.segment.structure.statements[name]
        over_body = bool(info.reduced_loops & self.segment.structure.body)
        sum_name = s.reduction.welford_sum if s.reduction else None
        welford_sum = self.known.get((sum_name, at)) if sum_name is not None else None
        self.locals[unique] = Local(
            unique,
            expression,
            dtype,
            reduction,
            role,
            info.flops,
            over_body=over_body,
            welford_sum=welford_sum.name if isinstance(welford_sum, Load) else None,
        )
        self.known[key] = Load(unique, (), dtype)
        return self.known[key]

    def rewrite(self, expression: Expression) -> Expression:
        """Turns loads of this segment's statements into locals, other loads into flat addresses."""
        if isinstance(expression, Load):
            if expression.name in self.members:
                return self.value(expression.name, expression.index)
            at = tuple(self.rewrite_index(i) for i in expression.index)
            tensor = self.tensors[expression.name]
            self.memory[expression.name] = tensor
            return Load(expression.name, (flatten_index(tensor, at),), expression.dtype)
        if isinstance(expression, Operation):
            return replace(
                expression, arguments=tuple(self.rewrite(a) for a in expression.arguments)
            )
        if isinstance(expression, Masked):
            bounds = tuple(
                BoundsCheck(self.rewrite_index(b.index), self.rewrite_index(b.size))
                for b in expression.bounds
            )
            return replace(
                expression,
                bounds=bounds,
                inside=self.rewrite_masked(expression.inside),
                outside=self.rewrite_masked(expression.outside),
            )
        if isinstance(expression, IndexValue):
            return replace(expression, index=self.rewrite_index(expression.index))
        return expression

    def rewrite_masked(self, expression: Expression) -> Expression:
        """Rewrites a side of a `Masked` into one expression.

        A local would be loaded without the mask.
        """
        rewritten = self.rewrite(expression)
        return self.inline_locals(rewritten)

    def inline_locals(self, expression: Expression) -> Expression:
        """Replaces references to locals that load memory by their expressions."""

        def expanded(part: Expression) -> Expression | None:
            if isinstance(part, Load) and not part.index:
                local = self.locals[part.name]
                if local.reduction is None and _reads_memory(local.expression, self.locals):
                    return self.inline_locals(local.expression)
            return None

        return rewrite_expression(expression, expanded, lambda index: index)

    def rewrite_index(self, index: Index) -> Index:
        return map_indirect(index, self.rewrite)


def _is_select(part: Expression) -> bool:
    return isinstance(part, Masked) or (isinstance(part, Operation) and part.name == "where")


def _reads_memory(expression: Expression, known: Mapping[str, Local]) -> bool:
    """Whether it loads memory, itself or through locals that are not reductions."""
    for part in walk(expression):
        if isinstance(part, Load):
            if part.index:
                return True
            local = known[part.name]
            if local.reduction is None and _reads_memory(local.expression, known):
                return True
    return False


def _make_unique(name: str, taken: Mapping[str, object]) -> str:
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}_at{count}"
    return unique
