"""Lowerings of reductions. Same calling convention as `views.py`.

A mean is a sum and a division. An argmax is a maximum and the first index that holds it. Variances
are in `variance.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.tensor_value import (
    Axes,
    TensorValue,
    axis_indices,
    canonicalize_dim,
    make_cast,
)
from fulgurite.fuser.frontend.views import unsqueeze_value
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, constant_like, div, sub, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression, IndexValue, Operation, opmath_dtype
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.statement import Reduction
from fulgurite.trace.node_meta import fake_value


def canonicalize_dims(dim: Any, rank: int) -> list[int]:
    """Returns the reduced dimensions in order. None and an empty list mean all of them."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return sorted({canonicalize_dim(d, rank) for d in dims} if rank else set())


def add_reduction(
    ctx: LoweringContext,
    name: str,
    value: TensorValue,
    dims: Sequence[int],
    kind: str,
    dtype: torch.dtype,
    body: Callable[[Expression, Axes], Expression],
    welford_sum: str | None = None,
) -> TensorValue:
    """Adds the statement that reduces `body(value)` over `dims`.

    The result lacks those dimensions.
    """
    axes = tuple(
        Axis(f"r{d}" if d in dims else f"i{d}", size) for d, size in enumerate(value.sizes)
    )
    kept_axes = tuple(axis for d, axis in enumerate(axes) if d not in dims)
    reduced_axes = tuple(axis for d, axis in enumerate(axes) if d in dims)
    expression = body(value.load_at(axis_indices(axes)), axes)
    return ctx.add_statement(
        name, dtype, kept_axes, expression, Reduction(kind, reduced_axes, welford_sum)
    )


def restore_reduced_dims(value: TensorValue, dims: Sequence[int]) -> TensorValue:
    """Inserts the reduced dimensions with size 1, for keepdim=True."""
    for d in sorted(dims):
        value = unsqueeze_value(value, d)
    return value


def finish_reduction(
    ctx: LoweringContext,
    name: str,
    value: TensorValue,
    dims: Sequence[int],
    keepdim: bool,
    dtype: torch.dtype,
    formula: Callable[[Expression], Expression] | None,
) -> TensorValue:
    """Applies a formula to a reduction's result, rounds to the op's dtype and handles `keepdim`."""
    if formula is not None or dtype != value.dtype:
        axes = value.axes
        expression = value.expression
        expression = formula(expression) if formula else expression
        if opmath_dtype(expression.dtype) != opmath_dtype(dtype):
            expression = Operation("cast", (expression,), opmath_dtype(dtype))
        value = ctx.add_statement(name, dtype, axes, expression)
    return restore_reduced_dims(value, dims) if keepdim else value


BOOL_KINDS = {"sum": "max", "prod": "min"}  # of bools: a sum with dtype=bool is `any`


def make_sum_lowering(kind: str) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext,
        node: Node,
        source: Any,
        dim: Any = None,
        keepdim: bool = False,
        dtype: Any = None,
    ) -> TensorValue:
        value = ctx.get_value(source)
        dims = canonicalize_dims(dim, len(value.axes))
        result = fake_value(node).dtype
        wide = opmath_dtype(result)
        narrow = wide != result
        total = add_reduction(
            ctx,
            f"{node.name}_wide" if narrow else node.name,
            value,
            dims,
            BOOL_KINDS[kind] if wide == torch.bool else kind,
            wide,
            make_cast(wide),
        )
        return finish_reduction(ctx, node.name, total, dims, keepdim, result, None)

    return lower


def count_reduced(value: TensorValue, dims: Sequence[int]) -> Index:
    """Returns the number of elements per reduction."""
    return indices.product([value.sizes[d] for d in dims])


def divide_by_count(expression: Expression, count: Index, correction: float = 0) -> Expression:
    """Returns `expression / max(count - correction, 0)`."""
    if count.is_constant:
        return div(expression, constant_like(max(count.constant - correction, 0.0), expression))
    size: Expression = Operation("cast", (IndexValue(count, torch.int64),), expression.dtype)
    if correction:
        size = apply("maximum", sub(size, constant_like(correction, size)), constant_like(0, size))
    return div(expression, size)


def lower_mean(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> TensorValue:
    value = ctx.get_value(source)
    dims = canonicalize_dims(dim, len(value.axes))
    result = fake_value(node).dtype
    wide = opmath_dtype(result)
    total = add_reduction(ctx, f"{node.name}_sum", value, dims, "sum", wide, make_cast(wide))
    count = count_reduced(value, dims)
    return finish_reduction(
        ctx, node.name, total, dims, keepdim, result, lambda e: divide_by_count(e, count)
    )


def _check_not_empty(value: TensorValue, dims: Sequence[int]) -> None:
    """Leaves max and min of no elements to torch, which raises an error."""
    if any(value.sizes[d] == indices.ZERO for d in dims):
        raise Unsupported("max or min over an empty dimension")


def make_extremum_lowering(kind: str) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext, node: Node, source: Any, dim: Any = None, keepdim: bool = False
    ) -> TensorValue:
        value = ctx.get_value(source)
        dims = canonicalize_dims(dim, len(value.axes))
        _check_not_empty(value, dims)
        extremum = add_reduction(ctx, node.name, value, dims, kind, value.dtype, lambda e, _: e)
        return restore_reduced_dims(extremum, dims) if keepdim else extremum

    return lower


def _find_first_index(
    ctx: LoweringContext, name: str, value: TensorValue, dims: Sequence[int], extremum: TensorValue
) -> TensorValue:
    """Adds the statement of the first index that holds the extremum (or the first NaN)."""
    no_index = torch.iinfo(torch.int64).max

    def body(expression: Expression, axes: Axes) -> Expression:
        kept_axes = [indices.from_atom(axis) for d, axis in enumerate(axes) if d not in dims]
        position = indices.ZERO
        for d in dims:
            position = position * axes[d].size + indices.from_atom(axes[d])
        is_match: Expression = Operation(
            "eq", (expression, extremum.load_at(kept_axes)), torch.bool
        )
        if expression.dtype.is_floating_point:
            is_nan = Operation("ne", (expression, expression), torch.bool)
            is_match = Operation("or", (is_match, is_nan), torch.bool)
        return where(is_match, IndexValue(position, torch.int64), Constant(no_index, torch.int64))

    return add_reduction(ctx, name, value, dims, "min", torch.int64, body)


def make_arg_extremum_lowering(kind: str) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext, node: Node, source: Any, dim: Any = None, keepdim: bool = False
    ) -> TensorValue:
        value = ctx.get_value(source)
        dims = canonicalize_dims(dim, len(value.axes))
        if not dims:
            return ctx.add_statement(node.name, torch.int64, (), Constant(0, torch.int64))
        _check_not_empty(value, dims)
        extremum = add_reduction(
            ctx, f"{node.name}_{kind}", value, dims, kind, value.dtype, lambda e, _: e
        )
        index = _find_first_index(ctx, node.name, value, dims, extremum)
        return restore_reduced_dims(index, dims) if keepdim else index

    return lower


def make_extremum_with_index_lowering(kind: str) -> Callable[..., Any]:
    """Returns the lowering of max or min: of all elements, or along a dimension with its index."""

    def lower(
        ctx: LoweringContext,
        node: Node,
        source: Any,
        dim: Any = None,
        keepdim: bool = False,
        **rest: Any,
    ) -> Any:
        if rest:
            raise Unsupported(f"{kind} of two tensors")
        if not isinstance(fake_value(node), tuple | list):
            return make_extremum_lowering(kind)(ctx, node, source)
        value = ctx.get_value(source)
        dims = canonicalize_dims(dim, len(value.axes))
        if not dims:
            zero = ctx.add_statement(
                f"{node.name}_index", torch.int64, (), Constant(0, torch.int64)
            )
            return value, zero
        _check_not_empty(value, dims)
        extremum = add_reduction(ctx, node.name, value, dims, kind, value.dtype, lambda e, _: e)
        index = _find_first_index(ctx, f"{node.name}_index", value, dims, extremum)
        if keepdim:
            return restore_reduced_dims(extremum, dims), restore_reduced_dims(index, dims)
        return extremum, index

    return lower


def make_any_all_lowering(kind: str) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext, node: Node, source: Any, dim: Any = None, keepdim: bool = False
    ) -> TensorValue:
        value = ctx.get_value(source)
        dims = canonicalize_dims(dim, len(value.axes))
        if isinstance(dim, list | tuple) and not dim:
            dims = list(range(len(value.axes)))
        result = fake_value(node).dtype

        def to_bool(expression: Expression, axes: Axes) -> Expression:
            if expression.dtype == torch.bool:
                return expression
            return Operation("ne", (expression, constant_like(0, expression)), torch.bool)

        found = add_reduction(ctx, f"{node.name}_found", value, dims, kind, torch.bool, to_bool)
        return finish_reduction(ctx, node.name, found, dims, keepdim, result, None)

    return lower


REDUCTION_LOWERINGS: dict[str, Callable[..., Any]] = {
    "sum": make_sum_lowering("sum"),
    "prod": make_sum_lowering("prod"),
    "mean": lower_mean,
    "amax": make_extremum_lowering("max"),
    "amin": make_extremum_lowering("min"),
    "max": make_extremum_with_index_lowering("max"),
    "min": make_extremum_with_index_lowering("min"),
    "argmax": make_arg_extremum_lowering("max"),
    "argmin": make_arg_extremum_lowering("min"),
    "any": make_any_all_lowering("max"),
    "all": make_any_all_lowering("min"),
}
