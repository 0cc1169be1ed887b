"""Rewrites of an expression tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fulgurite.fuser.ir.expression import (
    BoundsCheck,
    Expression,
    IndexValue,
    Load,
    Masked,
    Operation,
)
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.index_rewrites import map_indirect


def rewrite_expression(
    expression: Expression,
    change: Callable[[Expression], Expression | None],
    change_index: Callable[[Index], Index],
) -> Expression:
    """Rewrites an expression top-down.

    `change` returns the replacement of a node, or None to descend into it. `change_index` maps
    every index.
    """
    changed = change(expression)
    if changed is not None:
        return changed

    def inner(part: Expression) -> Expression:
        return rewrite_expression(part, change, change_index)

    def rewrite_index(index: Index) -> Index:
        return map_indirect(change_index(index), inner)

    if isinstance(expression, Load):
        return replace(expression, index=tuple(rewrite_index(i) for i in expression.index))
    if isinstance(expression, Operation):
        return replace(expression, arguments=tuple(inner(a) for a in expression.arguments))
    if isinstance(expression, Masked):
        bounds = tuple(BoundsCheck(rewrite_index(b.index), b.size) for b in expression.bounds)
        return replace(
            expression,
            bounds=bounds,
            inside=inner(expression.inside),
            outside=inner(expression.outside),
        )
    if isinstance(expression, IndexValue):
        return replace(expression, index=rewrite_index(expression.index))
    return expression
