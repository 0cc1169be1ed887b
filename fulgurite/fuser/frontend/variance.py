"""Lowerings of variance and standard deviation: a sum, then squared deviations from the mean.

    var = sum (x - mean)^2 / (n - correction)

Same calling convention as `views.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext, is_symbolic
from fulgurite.fuser.frontend.reductions import (
    add_reduction,
    canonicalize_dims,
    count_reduced,
    divide_by_count,
    finish_reduction,
)
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices, make_cast
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import add, apply, constant_like, mul, sub, where
from fulgurite.fuser.ir.expression import NARROW_FLOATS, Expression, opmath_dtype
from fulgurite.fuser.ir.host_symbols import maximum
from fulgurite.fuser.ir.index import Index
from fulgurite.trace.node_meta import fake_value


def _add_squared_deviations(
    ctx: LoweringContext, node: Node, value: TensorValue, dims: Sequence[int], dtype: torch.dtype
) -> tuple[TensorValue, TensorValue]:
    """Returns the mean and the sum of squared deviations from it, without cancellation.

    These are two passes. A code generator may merge them into one Welford pass.
    """
    count = count_reduced(value, dims)
    total = add_reduction(ctx, f"{node.name}_sum", value, dims, "sum", dtype, make_cast(dtype))
    sum_name = ctx.statements[-1].name
    mean = ctx.add_statement(
        f"{node.name}_mean", dtype, total.axes, divide_by_count(total.expression, count)
    )

    def deviation(expression: Expression, axes: Axes) -> Expression:
        kept_axes = [indices.from_atom(axis) for d, axis in enumerate(axes) if d not in dims]
        return sub(make_cast(dtype)(expression, axes), mean.load_at(kept_axes))

    def squared_deviation(expression: Expression, axes: Axes) -> Expression:
        value = deviation(expression, axes)
        return mul(value, value)

    name = f"{node.name}_squares"
    squares = add_reduction(ctx, name, value, dims, "sum", dtype, squared_deviation, sum_name)
    if not ctx.corrects_means or value.dtype in NARROW_FLOATS:
        return mean, squares
    deviation_sum = add_reduction(
        ctx, f"{node.name}_deviations", value, dims, "sum", dtype, deviation
    )
    return _correct_rounded_mean(ctx, node.name, mean, squares, deviation_sum, count)


def _correct_rounded_mean(
    ctx: LoweringContext,
    name: str,
    mean: TensorValue,
    squares: TensorValue,
    deviation_sum: TensorValue,
    count: Index,
) -> tuple[TensorValue, TensorValue]:
    """Corrects the mean and the squared deviations for the rounding of the mean.

        sum (x - m)^2 = sum (x - r)^2 - n (m - r)^2        m - r = sum (x - r) / n

    m is the exact mean, r the rounded one. The mean stays as it is if its error is not larger than
    the rounding error of the deviations.
    """
    axes, at, dtype = squares.axes, axis_indices(squares.axes), squares.dtype

    def add_pointwise(suffix: str, expression: Expression) -> Expression:
        return ctx.add_statement(f"{name}_{suffix}", dtype, axes, expression).load_at(at)

    mean_error = add_pointwise("mean_error", divide_by_count(deviation_sum.load_at(at), count))
    square_error = add_pointwise("square_error", mul(deviation_sum.load_at(at), mean_error))
    threshold = constant_like((4 * torch.finfo(dtype).eps) ** 2, squares.expression)
    is_large = apply("gt", square_error, mul(squares.load_at(at), threshold))
    exact_mean = where(is_large, add(mean.load_at(at), mean_error), mean.load_at(at))
    exact_squares = sub(squares.load_at(at), square_error)
    exact_squares = apply("maximum", exact_squares, constant_like(0, exact_squares))
    return (
        ctx.add_statement(f"{name}_exact_mean", dtype, axes, exact_mean),
        ctx.add_statement(f"{name}_exact_squares", dtype, axes, exact_squares),
    )


def _divide_by_freedom(
    ctx: LoweringContext, total: Expression, count: Index, correction: Any, unbiased: Any
) -> Expression:
    """Returns `total / max(count - correction, 0)`."""
    if is_symbolic(correction):
        freedom = maximum(count - ctx.to_index(correction), indices.ZERO)
        return divide_by_count(total, freedom)
    if unbiased is not None:
        correction = unbiased
    return divide_by_count(total, count, 1.0 if correction is None else float(correction))


def _square_dtype(node: Node, dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of squares. Eager's var and std of float32 on CPUs have float64's range.

    Not for var_mean, which normalization layers decompose to: eager computes those in float32.
    """
    fake = fake_value(node)
    is_on_cpu = isinstance(fake, torch.Tensor) and fake.device.type == "cpu"
    return torch.float64 if is_on_cpu and dtype == torch.float32 else opmath_dtype(dtype)


def _lower_variance(
    ctx: LoweringContext,
    node: Node,
    name: str,
    dtype: torch.dtype,
    source: Any,
    formula: Callable[[Expression], Expression] | None = None,
    dim: Any = None,
    keepdim: bool = False,
    correction: Any = None,
    unbiased: Any = None,
) -> tuple[TensorValue, TensorValue]:
    """Returns the variance, or a formula of it, and the mean."""
    value = ctx.get_value(source)
    dims = canonicalize_dims(dim, len(value.axes))
    computed = _square_dtype(node, dtype)
    mean, squares = _add_squared_deviations(ctx, node, value, dims, computed)
    count = count_reduced(value, dims)

    def divide(total: Expression) -> Expression:
        divided = _divide_by_freedom(ctx, total, count, correction, unbiased)
        return formula(divided) if formula else divided

    variance = finish_reduction(ctx, name, squares, dims, keepdim, dtype, divide)
    rounded = finish_reduction(ctx, f"{node.name}_rounded", mean, dims, keepdim, dtype, None)
    return variance, rounded


def lower_var(
    ctx: LoweringContext, node: Node, source: Any, correction: Any = None, **options: Any
) -> TensorValue:
    dtype = fake_value(node).dtype
    return _lower_variance(ctx, node, node.name, dtype, source, correction=correction, **options)[0]


def lower_std(
    ctx: LoweringContext, node: Node, source: Any, correction: Any = None, **options: Any
) -> TensorValue:
    dtype, root = fake_value(node).dtype, lambda e: apply("sqrt", e)
    return _lower_variance(
        ctx, node, node.name, dtype, source, root, correction=correction, **options
    )[0]


def lower_var_mean(
    ctx: LoweringContext, node: Node, source: Any, correction: Any = None, **options: Any
) -> tuple[TensorValue, TensorValue]:
    dtype, name = fake_value(node)[0].dtype, f"{node.name}_variance"
    return _lower_variance(ctx, node, name, dtype, source, correction=correction, **options)


VARIANCE_LOWERINGS: dict[str, Callable[..., Any]] = {
    "var": lower_var,
    "std": lower_std,
    "var_mean": lower_var_mean,
}
