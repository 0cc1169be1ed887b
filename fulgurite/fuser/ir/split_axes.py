"""Splits axes until reshapes are renames, and finds which axes are walked together.

In: a region as read. Out: `refine` gives the region with the common refinement of its factorings:
where one statement reads `x[i//8, i%8]`, `i` becomes two axes, here and in everything that reads it.
`axis_classes` then says which axes of different statements (and dimensions of inputs) are the same
loop: those that some load connects one to one. What can't be refined keeps its `//` and `%`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fulgurite.fuser.frontend.tensor_value import fresh_axes
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Guard, Load, Position, walk
from fulgurite.fuser.ir.index import Axis, Index, Quotient, Remainder
from fulgurite.fuser.ir.index_rewrites import map_loaded
from fulgurite.fuser.ir.statement import Region, Statement, Tensor, statement

MOST_SPLITS = 64  # of one tensor's axes; a graph that asks for more keeps its // and %


def refine(region: Region) -> Region:
    """The region with axes split where reshapes ask for it."""
    work = _Refinement(region)
    work.run()
    inputs = {t.name: work.tensors[t.name] for t in region.inputs}
    statements = tuple(work.statements[s.name] for s in region.statements)
    return replace(region, statements=statements, layouts=inputs, classes={})


class _Refinement:
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
        """Does one split that the statement asks for; the statements to look at again."""
        for axis, inner in _own_splits(s):
            changed = self.split_axis(s, axis, inner)
            if changed:
                return changed
        for load in s.loads:
            for dim, inner in _source_splits(load, self.tensors[load.name]):
                changed = self.split_dimension(load.name, dim, inner)
                if changed:
                    return changed
        return []

    def split_axis(self, s: Statement, axis: Axis, inner: Index) -> list[str]:
        if axis in s.axes:
            return self.split_dimension(s.name, s.axes.index(axis), inner)
        outer = indices.divide_exactly(axis.size, inner)
        if outer is None or s.reduction is None or not self.may_split(s.name):
            return []
        parts = (Axis(f"{axis.name}a", outer), Axis(f"{axis.name}b", inner))
        over = tuple(part for a in s.reduction.axes for part in (parts if a == axis else (a,)))
        joined = indices.of_atom(parts[0]) * inner + indices.of_atom(parts[1])
        self.statements[s.name] = statement(
            s.tensor,
            s.axes,
            s.expression.substitute({axis: joined}),
            replace(s.reduction, axes=over),
            s.origin,
        )
        return [s.name]

    def may_split(self, name: str) -> bool:
        self.splits[name] = self.splits.get(name, 0) + 1
        return self.splits[name] <= MOST_SPLITS

    def split_dimension(self, name: str, dim: int, inner: Index) -> list[str]:
        """Splits a tensor's dimension in two, in the statement that makes it and in its readers."""
        tensor = self.tensors[name]
        outer = indices.divide_exactly(tensor.sizes[dim], inner)
        made = self.statements.get(name)
        if made is not None and made.scan is not None and made.scan.axis == made.axes[dim]:
            return []  # what is scanned along stays one loop
        if outer is None or inner == 1 or outer == 1 or not self.may_split(name):
            return []
        sizes = (*tensor.sizes[:dim], outer, inner, *tensor.sizes[dim + 1 :])
        stride = tensor.strides[dim]
        strides = (*tensor.strides[:dim], stride * inner, stride, *tensor.strides[dim + 1 :])
        self.tensors[name] = replace(tensor, sizes=sizes, strides=strides)
        changed = list(self.readers.get(name, ()))
        if name in self.statements:
            self.statements[name] = self._with_tensor(name, dim, inner)
            changed.append(name)
        for reader in self.readers.get(name, ()):
            s = self.statements[reader]
            self.statements[reader] = statement(
                s.tensor,
                s.axes,
                _split_loads(s.expression, name, dim, inner),
                s.reduction,
                s.origin,
                s.scan,
            )
        return changed

    def _with_tensor(self, name: str, dim: int, inner: Index) -> Statement:
        s, tensor = self.statements[name], self.tensors[name]
        names = fresh_axes(tensor.sizes)
        positions = [indices.of_atom(axis) for axis in names]
        positions[dim : dim + 2] = [positions[dim] * inner + positions[dim + 1]]
        expression = s.expression.substitute(dict(zip(s.axes, positions, strict=True)))
        scan = s.scan
        if scan is not None:
            old = s.axes.index(scan.axis)
            scan = replace(scan, axis=names[old if old < dim else old + 1])
        return statement(tensor, names, expression, s.reduction, s.origin, scan)


def _split_loads(expression, name: str, dim: int, inner: Index):  # type: ignore[no-untyped-def]
    """The expression with every load of `name` indexed by the split dimension's two halves."""

    def in_index(index: Index) -> Index:
        return map_loaded(index, rewrite)

    def rewrite(part):  # type: ignore[no-untyped-def]
        if isinstance(part, Load):
            index = tuple(in_index(i) for i in part.index)
            if part.name == name:
                at = index[dim]
                halves = (indices.floordiv(at, inner), indices.modulo(at, inner))
                index = (*index[:dim], *halves, *index[dim + 1 :])
            return replace(part, index=index)
        if isinstance(part, Guard):
            inside, outside = rewrite(part.inside), rewrite(part.outside)
            bounds = tuple(replace(b, index=in_index(b.index)) for b in part.bounds)
            return replace(part, bounds=bounds, inside=inside, outside=outside)
        if isinstance(part, Position):
            return replace(part, index=in_index(part.index))
        if hasattr(part, "arguments"):
            return replace(part, arguments=tuple(rewrite(a) for a in part.arguments))
        return part

    return rewrite(expression)


def _all_indices(s: Statement) -> Iterator[Index]:
    for part in walk(s.expression):
        if isinstance(part, Load):
            yield from part.index
        elif isinstance(part, Position):
            yield part.index
        elif isinstance(part, Guard):
            for bound in part.bounds:
                yield bound.index


def _own_splits(s: Statement) -> Iterator[tuple[Axis, Index]]:
    """Axes that the statement itself takes apart with // and %."""
    for index in _all_indices(s):
        for atom in index.atoms():
            if isinstance(atom, Quotient | Remainder):
                axis = atom.numerator.plain
                if axis is not None and axis in s.all_axes:
                    yield axis, atom.denominator


def _source_splits(load: Load, tensor: Tensor) -> Iterator[tuple[int, Index]]:
    """Dimensions of the loaded tensor that are read as outer*n + inner with inner < n."""
    for dim, index in enumerate(load.index):
        if index.constant or len(index.terms) < 2:
            continue
        for monomial, coefficient in index.terms:
            if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Axis):
                inner = monomial[0].size
                rest = indices.divide_exactly(index - indices.of_atom(monomial[0]), inner)
                if rest is not None and indices.divide_exactly(tensor.sizes[dim], inner):
                    yield dim, inner
                    break


Member = tuple[str, Axis]


class _Classes:
    """Union-find over axes that refuses to make two axes of one statement the same loop."""

    def __init__(self) -> None:
        self.parent: dict[Member, Member] = {}
        self.owners: dict[Member, set[str]] = {}

    def find(self, member: Member) -> Member:
        if member not in self.parent:
            self.parent[member] = member
            self.owners[member] = {member[0]}
        root = member
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[member] != root:
            self.parent[member], member = root, self.parent[member]
        return root

    def union(self, a: Member, b: Member) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        if len(self.owners[a]) < len(self.owners[b]):
            a, b = b, a
        if not self.owners[a].isdisjoint(self.owners[b]):
            return
        self.parent[b] = a
        self.owners[a] |= self.owners.pop(b)


def axis_classes(region: Region) -> dict[Member, int]:
    """For every (statement, axis) the number of the loop it is walked by."""
    if region.classes:
        return region.classes
    classes = _Classes()
    axes_of = {t.name: fresh_axes(t.sizes) for t in region.tensors.values()}
    axes_of.update({s.name: s.axes for s in region.statements})
    # statements first, then inputs: what is computed here should meet what reads it
    for through_inputs in (False, True):
        inputs = {t.name for t in region.inputs}
        for s in region.statements:
            for load in s.loads:
                if (load.name in inputs) != through_inputs:
                    continue
                for dim, index in enumerate(load.index):
                    axis = index.plain
                    source = axes_of[load.name][dim]
                    if axis is not None and axis in s.all_axes and axis.size == source.size:
                        classes.union((s.name, axis), (load.name, source))
    # the two parts of complex results are one loop, which kernels write out
    woven = [(s.name, s.axes[-1]) for s in region.statements if s.tensor.pairs]
    for member in woven[1:]:
        classes.union(woven[0], member)
    numbers: dict[Member, int] = {}
    result: dict[Member, int] = {}
    for s in region.statements:
        for axis in s.all_axes:
            root = classes.find((s.name, axis))
            result[(s.name, axis)] = numbers.setdefault(root, len(numbers))
    region.classes.update(result)
    return result
