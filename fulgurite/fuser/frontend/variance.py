"""Variances and standard deviations as statements: a sum, then squared distances from the mean.

Same calling convention as `view_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import add, apply, mul, number, sub, where
from fulgurite.fuser.frontend.reductions import count_of, divided_by, finish, reduce, reduced_dims
from fulgurite.fuser.frontend.tensor_value import Axes, Value, cast_to, positions
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import NARROW_FLOATS, Expression, value_type
from fulgurite.fuser.ir.index import Index


def _squared_deviations(
    reader: Reader, node: Node, value: Value, dims: Sequence[int], dtype: torch.dtype
) -> tuple[Value, Value]:
    """Mean, and the sum of squared distances from it, so that nothing cancels.

    Two walks; a generator may do both in one, as long as it takes distances from a mean.
    """
    count = count_of(value, dims)
    total = reduce(reader, f"{node.name}_sum", value, dims, "sum", dtype, cast_to(dtype))
    summed = reader.statements[-1].name
    mean = reader.store(f"{node.name}_mean", dtype, total.axes, divided_by(total.expression, count))

    def distance(expression: Expression, axes: Axes) -> Expression:
        kept = [indices.of_atom(axis) for d, axis in enumerate(axes) if d not in dims]
        return sub(cast_to(dtype)(expression, axes), mean.at(kept))

    def squared(expression: Expression, axes: Axes) -> Expression:
        away = distance(expression, axes)
        return mul(away, away)

    name = f"{node.name}_squares"
    squares = reduce(reader, name, value, dims, "sum", dtype, squared, summed)
    if not reader.corrects or value.dtype in NARROW_FLOATS:
        return mean, squares
    shift = reduce(reader, f"{node.name}_shift", value, dims, "sum", dtype, distance)
    return _corrected(reader, node.name, mean, squares, shift, count)


def _corrected(
    reader: Reader, name: str, mean: Value, squares: Value, shift: Value, count: Index
) -> tuple[Value, Value]:
    """Mean and squares about it, of those about a rounded mean and the distances from that added up.

        sum (x - m)^2 = sum (x - r)^2 - n (m - r)^2        m - r = sum (x - r) / n

    A mean that is off by no more than the rounding of the distances stays as it is.
    """
    axes, at, dtype = squares.axes, positions(squares.axes), squares.dtype
    moved = reader.store(f"{name}_moved", dtype, axes, divided_by(shift.at(at), count))
    less = reader.store(f"{name}_less", dtype, axes, mul(shift.at(at), moved.at(at)))
    noise = mul(squares.at(at), number((4 * torch.finfo(dtype).eps) ** 2, squares.expression))
    exact = where(apply("gt", less.at(at), noise), add(mean.at(at), moved.at(at)), mean.at(at))
    around = sub(squares.at(at), less.at(at))
    return (
        reader.store(f"{name}_exact", dtype, axes, exact),
        reader.store(f"{name}_around", dtype, axes, apply("maximum", around, number(0, around))),
    )


def _correction(correction: Any, unbiased: Any) -> float:
    if unbiased is not None:
        return float(unbiased)
    return 1.0 if correction is None else float(correction)


def _spread(
    reader: Reader,
    node: Node,
    name: str,
    result: torch.dtype,
    source: Any,
    formula: Callable[[Expression], Expression] | None = None,
    dim: Any = None,
    keepdim: bool = False,
    correction: Any = None,
    unbiased: Any = None,
) -> tuple[Value, Value]:
    """The variance, or a formula of it, and the mean."""
    value = reader.value(source)
    dims = reduced_dims(dim, len(value.axes))
    less = _correction(correction, unbiased)
    mean, squares = _squared_deviations(reader, node, value, dims, value_type(result))
    count = count_of(value, dims)

    def variance(total: Expression) -> Expression:
        divided = divided_by(total, count, less)
        return formula(divided) if formula else divided

    spread = finish(reader, name, squares, dims, keepdim, result, variance)
    rounded = finish(reader, f"{node.name}_rounded", mean, dims, keepdim, result, None)
    return spread, rounded


def _var(reader: Reader, node: Node, source: Any, **options: Any) -> Value:
    return _spread(reader, node, node.name, node.meta["val"].dtype, source, **options)[0]


def _std(reader: Reader, node: Node, source: Any, **options: Any) -> Value:
    dtype = node.meta["val"].dtype
    return _spread(reader, node, node.name, dtype, source, lambda e: apply("sqrt", e), **options)[0]


def _var_mean(reader: Reader, node: Node, source: Any, **options: Any) -> tuple[Value, Value]:
    dtype = node.meta["val"][0].dtype
    return _spread(reader, node, f"{node.name}_variance", dtype, source, **options)


RULES: dict[str, Callable[..., Any]] = {"var": _var, "std": _std, "var_mean": _var_mean}
