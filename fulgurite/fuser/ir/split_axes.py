"""Splits axes so that reshapes become renamed axes.

In: a region as lowered. Out: a region with the common refinement of all its reshapes. If one
statement reads `x[i//8, i%8]`, then `i` becomes two axes, in that statement and in everything that
reads it. An index that can't be split this way keeps its `//` and `%`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Load, iter_indices
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, FloorDiv, Index, Mod, make_axes
from fulgurite.fuser.ir.index_rewrites import map_indirect
from fulgurite.fuser.ir.statement import Region, Scatter, Statement, Tensor, make_statement

MAX_SPLITS = 64  # per tensor; beyond it, indices keep their // and %


def split_axes(region: Region) -> Region:
    """Splits the axes that reshapes split or merge."""
    splitter = _AxisSplitter(region)
    splitter.run()
    inputs = {t.name: splitter.tensors[t.name] for t in region.inputs}
    statements = tuple(splitter.statements[s.name] for s in region.statements)
    return replace(region, statements=statements, input_layouts=inputs, loop_ids={})


class _AxisSplitter:
    def __init__(self, region: Region) -> None:
        self.tensors: dict[str, Tensor] = dict(region.tensors)
        self.statements: dict[str, Statement] = {s.name: s for s in region.statements}
        self.readers: dict[str, dict[str, None]] = {}
        self.splits: dict[str, int] = {}
        for s in region.statements:
            for load in s.loads:
                self.readers.setdefault(load.name, {})[s.name] = None

    def run(self) -> None:
        pending = dict.fromkeys(self.statements)
        while pending:
            name = next(iter(pending))
            del pending[name]
            changed = self.step(self.statements[name])
            pending.update(dict.fromkeys(changed))

    def step(self, s: Statement) -> list[str]:
        """Does one split that the statement needs. Returns the statements to visit again."""
        for axis, inner in _find_axis_splits(s):
            changed = self.split_axis(s, axis, inner)
            if changed:
                return changed
        for load in s.loads:
            for dim, inner in _find_dimension_splits(load, self.tensors[load.name]):
                changed = self.split_dimension(load.name, dim, inner)
                if changed:
                    return changed
        return []

    def split_axis(self, s: Statement, axis: Axis, inner: Index) -> list[str]:
        if axis in s.axes:
            return self.split_dimension(s.name, s.axes.index(axis), inner)
        outer = indices.divide_exactly(axis.size, inner)
        if s.reduction is not None and s.reduction.rank is not None:
            return []  # a sorted axis stays one loop
        if outer is None or not (s.reduction or s.scatter) or not self.count_split(s.name):
            return []
        parts = (Axis(f"{axis.name}a", outer), Axis(f"{axis.name}b", inner))
        merged = indices.from_atom(parts[0]) * inner + indices.from_atom(parts[1])
        if s.scatter is not None:
            scatter = _split_scatter_axis(s.scatter, axis, parts, merged)
            self.statements[s.name] = _replace_scatter(s, scatter)
            return [s.name]
        assert s.reduction is not None, f"{axis} is no axis of {s}"
        over = tuple(part for a in s.reduction.axes for part in (parts if a == axis else (a,)))
        self.statements[s.name] = make_statement(
            s.tensor,
            s.axes,
            s.expression.substitute({axis: merged}),
            replace(s.reduction, axes=over),
            s.origin,
        )
        return [s.name]

    def count_split(self, name: str) -> bool:
        """Counts a split of the tensor. Returns False when there were too many."""
        self.splits[name] = self.splits.get(name, 0) + 1
        return self.splits[name] <= MAX_SPLITS

    def split_dimension(self, name: str, dim: int, inner: Index) -> list[str]:
        """Splits a dimension of a tensor in two, in its statement and in all readers."""
        tensor = self.tensors[name]
        outer = indices.divide_exactly(tensor.sizes[dim], inner)
        producer = self.statements.get(name)
        if producer is not None and producer.scan is not None:
            if producer.scan.axis == producer.axes[dim]:
                return []  # a scanned axis stays one loop
        if producer is not None and producer.scatter is not None:
            return []  # what is stored at computed indices keeps its dimensions
        if outer is None or inner == 1 or outer == 1 or not self.count_split(name):
            return []
        sizes = (*tensor.sizes[:dim], outer, inner, *tensor.sizes[dim + 1 :])
        stride = tensor.strides[dim]
        strides = (*tensor.strides[:dim], stride * inner, stride, *tensor.strides[dim + 1 :])
        self.tensors[name] = replace(tensor, sizes=sizes, strides=strides)
        changed = list(self.readers.get(name, ()))
        if name in self.statements:
            self.statements[name] = self._split_statement(name, dim, inner)
            changed.append(name)
        for reader in self.readers.get(name, ()):
            s = self.statements[reader]
            self.statements[reader] = make_statement(
                s.tensor,
                s.axes,
                _split_loads(s.expression, name, dim, inner),
                s.reduction,
                s.origin,
                s.scan,
                _split_scatter_loads(s.scatter, name, dim, inner),
            )
        return changed

    def _split_statement(self, name: str, dim: int, inner: Index) -> Statement:
        s, tensor = self.statements[name], self.tensors[name]
        names = make_axes(tensor.sizes)
        positions = [indices.from_atom(axis) for axis in names]
        positions[dim : dim + 2] = [positions[dim] * inner + positions[dim + 1]]
        mapping = dict(zip(s.axes, positions, strict=True))
        expression = s.expression.substitute(mapping)
        reduction = s.reduction
        if reduction is not None and reduction.rank is not None:
            reduction = replace(reduction, rank=reduction.rank.substitute(mapping))
        scan = s.scan
        if scan is not None:
            old = s.axes.index(scan.axis)
            scan = replace(scan, axis=names[old if old < dim else old + 1])
        return make_statement(tensor, names, expression, reduction, s.origin, scan)


def _split_scatter_axis(
    scatter: Scatter, axis: Axis, parts: tuple[Axis, Axis], merged: Index
) -> Scatter:
    """Replaces an axis of an indexed store by two."""
    axes = tuple(part for a in scatter.axes for part in (parts if a == axis else (a,)))
    index = tuple(i.substitute({axis: merged}) for i in scatter.index)
    return replace(scatter, axes=axes, index=index, value=scatter.value.substitute({axis: merged}))


def _replace_scatter(s: Statement, scatter: Scatter) -> Statement:
    return make_statement(s.tensor, s.axes, s.expression, origin=s.origin, scatter=scatter)


def _split_scatter_loads(
    scatter: Scatter | None, name: str, dim: int, inner: Index
) -> Scatter | None:
    """Splits the index of dimension `dim` in every load of `name`, by a value or an index."""
    if scatter is None:
        return None

    def split(part: Expression) -> Expression:
        return _split_loads(part, name, dim, inner)

    index = tuple(map_indirect(i, split) for i in scatter.index)
    return replace(scatter, index=index, value=split(scatter.value))


def _split_loads(expression: Expression, name: str, dim: int, inner: Index) -> Expression:
    """Splits the index of dimension `dim` in every load of `name`."""

    def split(part: Expression) -> Expression | None:
        if not isinstance(part, Load) or part.name != name:
            return None
        index = tuple(map_indirect(i, split_all) for i in part.index)
        both = (indices.floordiv(index[dim], inner), indices.modulo(index[dim], inner))
        return replace(part, index=(*index[:dim], *both, *index[dim + 1 :]))

    def split_all(part: Expression) -> Expression:
        return rewrite_expression(part, split, lambda index: index)

    return split_all(expression)


def _find_axis_splits(s: Statement) -> Iterator[tuple[Axis, Index]]:
    """Yields the axes that the statement itself splits with // and %."""
    for index in (index for part in s.expressions for index in iter_indices(part)):
        for atom in index.atoms():
            if isinstance(atom, FloorDiv | Mod):
                axis = atom.numerator.single_axis
                if axis is not None and axis in s.all_axes:
                    yield axis, atom.denominator


def _find_dimension_splits(load: Load, tensor: Tensor) -> Iterator[tuple[int, Index]]:
    """Yields the dimensions that are read as outer*n + inner with inner < n."""
    for dim, index in enumerate(load.index):
        if index.constant or len(index.terms) < 2:
            continue
        for monomial, coefficient in index.terms:
            if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Axis):
                inner = monomial[0].size
                rest = indices.divide_exactly(index - indices.from_atom(monomial[0]), inner)
                if rest is not None and indices.divide_exactly(tensor.sizes[dim], inner):
                    yield dim, inner
                    break
