"""Splits statements where a mask changes, and stores the pieces in slices of one buffer.

In: a region as lowered, and the statements to split. Out: a region in which each of them is several
statements. A piece has no mask any more, so it shares a kernel with what it reads.

    cat[i0,i1] = where(0 <= i1 < 64, a[i0,i1], b[i0,i1-64])
    y[i0,i1]   = bfloat16(cat[i0,i1])

becomes, with `y_0` and `y_1` in the slices `y[:, :64]` and `y[:, 64:]` (`Region.slices`)

    y_0[i0,i1] = bfloat16(a[i0,i1])
    y_1[i0,i1] = bfloat16(b[i0,i1])

Pointwise readers of a split statement are split as well. Other readers load its pieces under masks.
A part of a cat that is copied as it is has no piece: its own statement stores into the slice.
An input that the region overwrites and does not read is such a buffer too. What keeps its value
(`input.copy_(slice_scatter(input, value))`) is then not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    BoundsCheck,
    Constant,
    Expression,
    Load,
    Masked,
    collect_loads,
    make_masked,
    opmath_dtype,
    walk,
)
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.index_rewrites import map_indirect
from fulgurite.fuser.ir.statement import (
    Region,
    Scatter,
    Slice,
    Statement,
    Tensor,
    make_statement,
)

MAX_PIECES = 16  # of a statement; with more, its readers keep their masks


def find_split_candidates(region: Region) -> list[str]:
    """Returns the statements that select between values: cat, stack, pad, slice_scatter.

    Splitting those that select between inputs only would save nothing, unless one is overwritten.
    """
    known = {s.name for s in region.statements} | {target for _, target in region.writes}
    return [
        s.name
        for s in region.statements
        if _is_splittable(s)
        and any(
            load.name in known
            for part in walk(s.expression)
            if isinstance(part, Masked)
            for side in (part.inside, part.outside)
            for load in collect_loads(side)
        )
        and next(_find_cuts(s.expression, s.axes), None) is not None
    ]


def split_statements(region: Region, roots: set[str]) -> Region:
    """Splits these statements, and the pointwise ones that read them."""
    returned = {output.name for output in region.outputs}
    sources, targets = ([pair[k] for pair in region.writes] for k in range(2))
    # statements that write an input and have no other use of it, by name
    overwritten = {
        source: target
        for source, target in region.writes
        if not {source, target} & returned
        and sources.count(source) == 1
        and targets.count(target) == 1
    }
    while True:
        splitter = _Splitter(region, overwritten)
        for s in region.statements:
            splitter.add(s, s.name in roots)
        split = splitter.finish()
        loaded = {load.name for s in split.statements for load in s.loads}
        places = {place.buffer for place in split.slices.values()}
        unsafe = {source for source, target in overwritten.items() if target in loaded & places}
        if not unsafe:
            return split
        overwritten = {k: target for k, target in overwritten.items() if k not in unsafe}


def _is_pointwise(s: Statement) -> bool:
    """Whether the expression is the result: a scatter stores values on top of it."""
    return s.reduction is None and s.scan is None and s.scatter is None


def _is_splittable(s: Statement) -> bool:
    return _is_pointwise(s) and not s.tensor.is_view_as_real and not s.tensor.is_empty


@dataclass(frozen=True, slots=True)
class _Box:
    """A part of a statement's points: where it starts and its size, for each axis."""

    starts: tuple[Index, ...]
    axes: tuple[Axis, ...]
    expression: Expression

    def split(self, dim: int, cut: Index) -> tuple[_Box, _Box]:
        """Returns the parts before and after a cut along an axis."""
        axis = self.axes[dim]
        return self._take(dim, indices.ZERO, cut), self._take(dim, cut, axis.size - cut)

    def _take(self, dim: int, start: Index, size: Index) -> _Box:
        axis = Axis(self.axes[dim].name, size)
        position = start if size == 1 else indices.from_atom(axis) + start
        return _Box(
            (*self.starts[:dim], self.starts[dim] + start, *self.starts[dim + 1 :]),
            (*self.axes[:dim], axis, *self.axes[dim + 1 :]),
            self.expression.substitute({self.axes[dim]: position}),
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a split statement. `value` is over `axes`, which has None for dimensions of size 1."""

    starts: tuple[Index, ...]
    sizes: tuple[Index, ...]
    axes: tuple[Axis | None, ...]
    value: Expression

    def load_at(self, at: tuple[Index, ...]) -> Expression:
        """Returns the element at an index of the whole tensor."""
        inner = zip(self.axes, at, self.starts, strict=True)
        return self.value.substitute(
            {axis: index - start for axis, index, start in inner if axis is not None}
        )

    def bounds_at(self, at: tuple[Index, ...], whole: Tensor) -> tuple[BoundsCheck, ...]:
        """Returns the condition that an index of the whole tensor is in this piece."""
        return tuple(
            BoundsCheck(index - start, size)
            for index, start, size, full in zip(
                at, self.starts, self.sizes, whole.sizes, strict=True
            )
            if size != full
        )


@dataclass
class _Splitter:
    region: Region
    overwritten: dict[str, str]  # inputs that statements write to, in slices if these are split
    statements: dict[str, Statement] = field(default_factory=dict)
    pieces: dict[str, list[_Piece]] = field(default_factory=dict)  # of split statements
    slices: dict[str, Slice] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def add(self, s: Statement, is_root: bool) -> None:
        """Adds a statement of the region, in pieces where it is split."""
        reads_pieces = any(load.name in self.pieces for load in s.loads)
        changed = self.rewrite(s) if reads_pieces else s
        written = {name for name, _ in self.region.writes} - self.overwritten.keys()
        if (is_root or reads_pieces) and _is_splittable(s) and s.name not in written:
            boxes = _split_box(changed)
            if boxes is not None:
                self.add_pieces(changed, boxes)
                return
        self.statements[s.name] = changed

    def rewrite(self, s: Statement) -> Statement:
        """Returns the statement with loads of pieces instead of split statements."""

        def load_piece(part: Expression) -> Expression | None:
            if not isinstance(part, Load) or part.name not in self.pieces:
                return None
            whole = self.region.tensors[part.name]
            at = tuple(map_indirect(index, load_pieces) for index in part.index)
            *others, last = self.pieces[part.name]
            result = last.load_at(at)
            for piece in reversed(others):
                result = make_masked(piece.bounds_at(at, whole), piece.load_at(at), result)
            return result

        def load_pieces(expression: Expression) -> Expression:
            return rewrite_expression(expression, load_piece, lambda index: index)

        return make_statement(
            s.tensor,
            s.axes,
            load_pieces(s.expression),
            s.reduction,
            s.origin,
            s.scan,
            _rewrite_scatter(s.scatter, load_pieces),
        )

    def add_pieces(self, s: Statement, boxes: list[_Box]) -> None:
        """Adds a statement for each part that is more than a copy."""
        is_result = s.name in self.region.results
        if is_result and s.name not in self.overwritten:
            self.buffers[s.name] = s.tensor
        self.pieces[s.name] = [self.add_piece(s, box, is_result) for box in boxes]

    def add_piece(self, s: Statement, box: _Box, is_result: bool) -> _Piece:
        loops = [k for k, axis in enumerate(box.axes) if axis.size != 1]
        axes = tuple(box.axes[k] for k in loops)
        sizes = tuple(axis.size for axis in box.axes)
        piece_axes = tuple(None if axis.size == 1 else axis for axis in box.axes)
        value = self.inline_constants(box.expression)
        if not is_result and isinstance(value, Load) and value.dtype == s.tensor.dtype:
            return _Piece(box.starts, sizes, piece_axes, value)
        strides = tuple(s.tensor.strides[k] for k in loops)
        buffer = self.overwritten.get(s.name, s.name)
        place = Slice(buffer, _dot(box.starts, s.tensor.strides))
        at = tuple(indices.from_atom(axis) for axis in axes)
        if is_result and (
            self.keeps(value, place, _dot(at, strides)) or self.move(value, at, s, strides, place)
        ):
            return _Piece(box.starts, sizes, piece_axes, value)
        name = self.make_name(s.name)
        if not is_result:
            strides = _contiguous_strides(axes)
        tensor = Tensor(name, s.tensor.dtype, tuple(axis.size for axis in axes), strides)
        self.statements[name] = make_statement(tensor, axes, value, origin=s.origin)
        if is_result:
            self.slices[name] = place
        return _Piece(box.starts, sizes, piece_axes, Load(name, at, s.tensor.dtype))

    def inline_constants(self, expression: Expression) -> Expression:
        """Returns the expression with numbers instead of loads of statements that fill with one."""

        def inline(part: Expression) -> Expression | None:
            s = self.statements.get(part.name) if isinstance(part, Load) else None
            if s is None or not isinstance(s.expression, Constant) or not _is_pointwise(s):
                return None
            return _round_constant(s.expression, s.tensor.dtype)

        return rewrite_expression(expression, inline, lambda index: index)

    def keeps(self, value: Expression, place: Slice, position: Index) -> bool:
        """Whether the piece is what the overwritten input has at the same place."""
        if not isinstance(value, Load) or value.name != place.buffer:
            return False
        old = self.region.tensors[value.name]
        return _dot(value.index, old.strides) == place.offset + position

    def move(
        self,
        value: Expression,
        at: tuple[Index, ...],
        whole: Statement,
        strides: tuple[Index, ...],
        place: Slice,
    ) -> bool:
        """Stores the statement that the piece copies into the slice. Returns whether it can be."""
        if not isinstance(value, Load) or value.index != at or value.dtype != whole.tensor.dtype:
            return False
        s = self.statements.get(value.name)
        if s is None or s.name in self.slices or s.name in self.region.results:
            return False
        sizes = tuple(axis.size for index in at if (axis := index.single_axis) is not None)
        if s.scatter is not None or not s.loads or s.tensor.sizes != sizes:
            return False
        self.statements[s.name] = replace(s, tensor=replace(s.tensor, strides=strides))
        self.slices[s.name] = place
        return True

    def make_name(self, name: str) -> str:
        taken = self.region.tensors
        count = 0
        while (unique := f"{name}_{count}") in taken or unique in self.statements:
            count += 1
        return unique

    def finish(self) -> Region:
        """Returns the region with the statements that its outputs need."""
        stored = {place.buffer for place in self.slices.values()}
        writes = tuple(
            (target, target) if name in self.pieces else (name, target)
            for name, target in self.region.writes
            if name not in self.pieces or target in stored
        )
        live = self.region.results | self.slices.keys()
        statements: list[Statement] = []
        for s in reversed(self.statements.values()):
            if s.name in live:
                statements.append(s)
                live |= {load.name for load in s.loads}
        return replace(
            self.region,
            statements=tuple(reversed(statements)),
            writes=writes,
            slices=self.slices,
            buffers=tuple(self.buffers.values()),
            loop_ids={},
        )


def _rewrite_scatter(
    scatter: Scatter | None, change: Callable[[Expression], Expression]
) -> Scatter | None:
    if scatter is None:
        return None
    index = tuple(map_indirect(i, change) for i in scatter.index)
    return replace(scatter, index=index, value=change(scatter.value))


def _round_constant(constant: Constant, dtype: torch.dtype) -> Constant:
    """Returns the number that is read back after it was stored with this dtype."""
    if dtype not in NARROW_FLOATS:
        return constant
    rounded = torch.tensor(constant.value, dtype=torch.float64).to(dtype)
    return Constant(float(rounded), opmath_dtype(dtype))


def _split_box(s: Statement) -> list[_Box] | None:
    """Returns the parts between the cuts of all masks; None if there is nothing to split."""
    done: list[_Box] = []
    pending = [_Box((indices.ZERO,) * len(s.axes), s.axes, s.expression)]
    while pending:
        box = pending.pop()
        found = next(_find_cuts(box.expression, box.axes), None)
        if found is None:
            done.append(box)
        else:
            first, second = box.split(*found)
            pending += [second, first]
        if len(done) + len(pending) > MAX_PIECES:
            return None
    return done if len(done) > 1 else None


def _find_cuts(expression: Expression, axes: tuple[Axis, ...]) -> Iterator[tuple[int, Index]]:
    """Yields (dimension, position) where a mask changes along an axis."""
    for part in walk(expression):
        for bound in part.bounds if isinstance(part, Masked) else ():
            if bound.index.indirect_indices():
                continue
            for dim, axis in enumerate(axes):
                for cut in _cuts_of_bound(bound, axis):
                    yield dim, cut


def _cuts_of_bound(bound: BoundsCheck, axis: Axis) -> Iterator[Index]:
    """Yields the positions at which `0 <= step * axis + inner + rest < size` changes.

    With 0 <= inner < step, the condition changes only between two positions of the axis.
    """
    step = bound.index.coefficient(axis)
    if step is None or not step.is_constant or step.constant < 1:
        return
    others = bound.index - indices.from_atom(axis) * step
    terms = [Index(0, (term,)) for term in others.terms]
    inner = indices.sum_of([term for term in terms if term.axes()])
    if inner != 0 and not indices.is_within(inner, step):
        return
    rest = others - inner
    for end in (-rest, bound.size - rest):
        cut = indices.divide_exactly(end, step)
        if cut is not None and cut != 0 and cut != axis.size and not cut.axes():
            if _is_nonnegative(cut) and _is_nonnegative(axis.size - cut):
                yield cut


def _is_nonnegative(index: Index) -> bool:
    low, _ = index.bounds()
    return low is not None and low >= 0


def _dot(at: tuple[Index, ...], strides: tuple[Index, ...]) -> Index:
    return indices.sum_of([i * stride for i, stride in zip(at, strides, strict=True)])


def _contiguous_strides(axes: tuple[Axis, ...]) -> tuple[Index, ...]:
    inner = indices.ONE
    backwards: list[Index] = []
    for axis in reversed(axes):
        backwards.append(inner)
        inner = inner * axis.size
    return tuple(reversed(backwards))
