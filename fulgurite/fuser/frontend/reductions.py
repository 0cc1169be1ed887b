"""ATen's reductions as statements. Same calling convention as `view_rules`.

Means and places of the best are several statements each: `sum` and a quotient, a maximum and the least
position that holds it. Variances are in `variance_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import Unsupported, apply, div, number, sub, where
from fulgurite.fuser.frontend.tensor_value import Axes, Value, cast_to, dimension, positions
from fulgurite.fuser.frontend.views import unsqueezed
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Constant, Expression, Operation, Position, value_type
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.statement import Reduction


def reduced_dims(dim: Any, rank: int) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return sorted({dimension(d, rank) for d in dims} if rank else set())


def reduce(
    reader: Reader,
    name: str,
    value: Value,
    dims: Sequence[int],
    kind: str,
    dtype: torch.dtype,
    body: Callable[[Expression, Axes], Expression],
    about: str | None = None,
) -> Value:
    """The statement name[kept] = kind over dims of body(value); the result has no size-1 dims."""
    axes = tuple(
        Axis(f"r{d}" if d in dims else f"i{d}", size) for d, size in enumerate(value.sizes)
    )
    kept = tuple(axis for d, axis in enumerate(axes) if d not in dims)
    over = tuple(axis for d, axis in enumerate(axes) if d in dims)
    expression = body(value.at(positions(axes)), axes)
    return reader.store(name, dtype, kept, expression, Reduction(kind, over, about))


def keep_dims(value: Value, dims: Sequence[int]) -> Value:
    for d in sorted(dims):
        value = unsqueezed(value, d)
    return value


def finish(
    reader: Reader,
    name: str,
    value: Value,
    dims: Sequence[int],
    keepdim: bool,
    dtype: torch.dtype,
    formula: Callable[[Expression], Expression] | None,
) -> Value:
    """Applies a formula to a reduction's result, rounds to the op's dtype, puts size-1 dims back."""
    if formula is not None or dtype != value.dtype:
        axes = value.axes
        expression = value.expression
        expression = formula(expression) if formula else expression
        if value_type(expression.dtype) != value_type(dtype):
            expression = Operation("cast", (expression,), value_type(dtype))
        value = reader.store(name, dtype, axes, expression)
    return keep_dims(value, dims) if keepdim else value


OF_BOOLS = {"sum": "max", "prod": "min"}  # a sum of bools is whether there is one: nothing to count


def _sum(kind: str) -> Callable[..., Value]:
    def rule(
        reader: Reader,
        node: Node,
        source: Any,
        dim: Any = None,
        keepdim: bool = False,
        dtype: Any = None,
    ) -> Value:
        value = reader.value(source)
        dims = reduced_dims(dim, len(value.axes))
        result = node.meta["val"].dtype
        wide = value_type(result)
        narrow = wide != result
        total = reduce(
            reader,
            f"{node.name}_wide" if narrow else node.name,
            value,
            dims,
            OF_BOOLS[kind] if wide == torch.bool else kind,
            wide,
            cast_to(wide),
        )
        return finish(reader, node.name, total, dims, keepdim, result, None)

    return rule


def count_of(value: Value, dims: Sequence[int]) -> Index:
    return indices.product([value.sizes[d] for d in dims])


def divided_by(expression: Expression, count: Index, less: float = 0) -> Expression:
    """expression / max(count - less, 0)."""
    if count.is_constant:
        return div(expression, number(max(count.constant - less, 0.0), expression))
    size: Expression = Operation("cast", (Position(count, torch.int64),), expression.dtype)
    if less:
        size = apply("maximum", sub(size, number(less, size)), number(0, size))
    return div(expression, size)


def _mean(
    reader: Reader,
    node: Node,
    source: Any,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Value:
    value = reader.value(source)
    dims = reduced_dims(dim, len(value.axes))
    result = node.meta["val"].dtype
    wide = value_type(result)
    total = reduce(reader, f"{node.name}_sum", value, dims, "sum", wide, cast_to(wide))
    count = count_of(value, dims)
    return finish(reader, node.name, total, dims, keepdim, result, lambda e: divided_by(e, count))


def _check_not_empty(value: Value, dims: Sequence[int]) -> None:
    """Nothing has no largest number: torch says so."""
    if any(value.sizes[d] == indices.ZERO for d in dims):
        raise Unsupported("an extreme of nothing")


def _extreme(kind: str) -> Callable[..., Value]:
    def rule(
        reader: Reader, node: Node, source: Any, dim: Any = None, keepdim: bool = False
    ) -> Value:
        value = reader.value(source)
        dims = reduced_dims(dim, len(value.axes))
        _check_not_empty(value, dims)
        best = reduce(reader, node.name, value, dims, kind, value.dtype, lambda e, _: e)
        return keep_dims(best, dims) if keepdim else best

    return rule


def _first_place(
    reader: Reader, name: str, value: Value, dims: Sequence[int], best: Value
) -> Value:
    """Where the best value first is: the least position that holds it (or the first NaN)."""
    far = torch.iinfo(torch.int64).max

    def body(expression: Expression, axes: Axes) -> Expression:
        kept = [indices.of_atom(axis) for d, axis in enumerate(axes) if d not in dims]
        position = indices.ZERO
        for d in dims:
            position = position * axes[d].size + indices.of_atom(axes[d])
        hit: Expression = Operation("eq", (expression, best.at(kept)), torch.bool)
        if expression.dtype.is_floating_point:
            missing = Operation("ne", (expression, expression), torch.bool)
            hit = Operation("or", (hit, missing), torch.bool)
        return where(hit, Position(position, torch.int64), Constant(far, torch.int64))

    return reduce(reader, name, value, dims, "min", torch.int64, body)


def _arg_extreme(kind: str) -> Callable[..., Value]:
    def rule(
        reader: Reader, node: Node, source: Any, dim: Any = None, keepdim: bool = False
    ) -> Value:
        value = reader.value(source)
        dims = reduced_dims(dim, len(value.axes))
        if not dims:
            return reader.store(node.name, torch.int64, (), Constant(0, torch.int64))
        _check_not_empty(value, dims)
        best = reduce(reader, f"{node.name}_{kind}", value, dims, kind, value.dtype, lambda e, _: e)
        place = _first_place(reader, node.name, value, dims, best)
        return keep_dims(place, dims) if keepdim else place

    return rule


def _extreme_with_place(kind: str) -> Callable[..., Any]:
    """max and min: of everything, of two tensors, or along a dim with the place of the best."""

    def rule(
        reader: Reader, node: Node, source: Any, dim: Any = None, keepdim: bool = False, **rest: Any
    ) -> Any:
        if rest:
            raise Unsupported(f"{kind} of two tensors")
        if not isinstance(node.meta["val"], tuple | list):
            return _extreme(kind)(reader, node, source)
        value = reader.value(source)
        dims = reduced_dims(dim, len(value.axes))
        if not dims:
            zero = reader.store(f"{node.name}_place", torch.int64, (), Constant(0, torch.int64))
            return value, zero
        _check_not_empty(value, dims)
        best = reduce(reader, node.name, value, dims, kind, value.dtype, lambda e, _: e)
        place = _first_place(reader, f"{node.name}_place", value, dims, best)
        if keepdim:
            return keep_dims(best, dims), keep_dims(place, dims)
        return best, place

    return rule


def _any_all(kind: str) -> Callable[..., Value]:
    def rule(
        reader: Reader, node: Node, source: Any, dim: Any = None, keepdim: bool = False
    ) -> Value:
        value = reader.value(source)
        dims = reduced_dims(dim, len(value.axes))
        if isinstance(dim, list | tuple) and not dim:
            dims = list(range(len(value.axes)))
        result = node.meta["val"].dtype

        def truth(expression: Expression, axes: Axes) -> Expression:
            if expression.dtype == torch.bool:
                return expression
            wide = expression
            return Operation("ne", (wide, number(0, wide)), torch.bool)

        found = reduce(reader, f"{node.name}_found", value, dims, kind, torch.bool, truth)
        return finish(reader, node.name, found, dims, keepdim, result, None)

    return rule


RULES: dict[str, Callable[..., Any]] = {
    "sum": _sum("sum"),
    "prod": _sum("prod"),
    "mean": _mean,
    "amax": _extreme("max"),
    "amin": _extreme("min"),
    "max": _extreme_with_place("max"),
    "min": _extreme_with_place("min"),
    "argmax": _arg_extreme("max"),
    "argmin": _arg_extreme("min"),
    "any": _any_all("max"),
    "all": _any_all("min"),
}
