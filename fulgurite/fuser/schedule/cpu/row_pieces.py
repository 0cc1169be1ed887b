"""Split rows where a mask changes: the interior of a pad, the parts of a concatenation.

In: the nest of a pointwise kernel. Out: `RowPiece`s: the same nest for a part of the SIMD loop, where every
mask along it is always or never true, and for the rows on one side of a mask that is constant in a row.

    pad[j,k] = where(0 <= k - 3 < 100, x[j,k - 3], x[j,mirror[k]])     loops over 0..3, 3..103 and 103..106

The interior is then a plain vector loop: it tests nothing and looks up no positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    BoundsCheck,
    Expression,
    Masked,
    make_masked,
    walk,
)
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import LoopNest, substitute_axes
from fulgurite.fuser.schedule.analysis import iter_expressions

MIN_ROW = 32  # points of a row that is split
MAX_PARTS = 6  # of a row
MAX_ROW_CHECKS = 2  # masks that are constant in a row: each doubles the code

Assumption = tuple[BoundsCheck, bool]


@dataclass(frozen=True)
class RowPiece:
    """A part of the rows for which the assumptions hold; its nest has a shorter SIMD loop."""

    assumptions: tuple[Assumption, ...]
    nest: LoopNest


def split_rows(nest: LoopNest) -> tuple[RowPiece, ...]:
    """The pieces of a pointwise nest; empty if there is nothing to split."""
    (axis,) = nest.body
    if not axis.size.is_constant or axis.size.constant < MIN_ROW or _updates_memory(nest):
        return ()
    checks = _collect_checks(nest)
    constant = [c for c in checks if axis not in c.index.axes() and c.index.axes()]
    constant = constant if len(constant) <= MAX_ROW_CHECKS else []
    starts = _find_starts(checks, axis)
    if len(starts) > MAX_PARTS or (len(starts) == 1 and not constant):
        return ()
    pieces = []
    for truths in itertools.product((True, False), repeat=len(constant)):
        assumed = tuple(zip(constant, truths, strict=True))
        chosen = _assume(nest, dict(assumed))
        for start, end in itertools.pairwise((*starts, axis.size.constant)):
            pieces.append(RowPiece(assumed, _take_part(chosen, axis, start, end - start)))
    return tuple(pieces)


def _updates_memory(nest: LoopNest) -> bool:
    """Whether a tensor is both read and written: its pieces could not name it in the same way."""
    written = {store.tensor.name for store in nest.stores}
    return any(not is_store and t.name in written for t, _, is_store in nest.accesses())


def _collect_checks(nest: LoopNest) -> list[BoundsCheck]:
    """The bounds checks of masks that depend on loops only."""
    found = {
        check: None
        for expression in iter_expressions(nest)
        for part in walk(expression)
        if isinstance(part, Masked)
        for check in part.bounds
        if not check.index.indirect_indices() and check.size.is_constant
    }
    return [check for check in found if not check.index.symbols()]


def _find_starts(checks: list[BoundsCheck], axis: Axis) -> list[int]:
    """Where a check along the axis changes, and 0."""
    starts = {0}
    for check in checks:
        rest = check.index - indices.from_atom(axis)
        if rest.is_constant:  # 0 <= axis + rest < size
            starts |= {-rest.constant, check.size.constant - rest.constant}
    return sorted(start for start in starts if 0 <= start < axis.size.constant)


def _assume(nest: LoopNest, truth: Mapping[BoundsCheck, bool]) -> LoopNest:
    """The nest where these checks are known."""

    def choose(part: Expression) -> Expression | None:
        if not isinstance(part, Masked) or not any(check in truth for check in part.bounds):
            return None
        if any(truth.get(check) is False for check in part.bounds):
            return change(part.outside)
        unknown = tuple(check for check in part.bounds if check not in truth)
        return make_masked(unknown, change(part.inside), change(part.outside))

    def change(expression: Expression) -> Expression:
        return rewrite_expression(expression, choose, lambda index: index)

    return replace(
        nest,
        locals={n: replace(x, expression=change(x.expression)) for n, x in nest.locals.items()},
        stores=tuple(replace(store, value=change(store.value)) for store in nest.stores),
    )


def _take_part(nest: LoopNest, axis: Axis, start: int, length: int) -> LoopNest:
    """The nest for `length` points of its SIMD loop."""
    part = Axis(axis.name, Index(length))
    return substitute_axes(nest, {axis: indices.from_atom(part) + start}, nest.grid, (part,))
