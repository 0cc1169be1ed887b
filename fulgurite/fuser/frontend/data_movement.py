"""ATen ops that move elements: flips, joins, pads and gathers, as statements with other indices.

Same calling convention as `view_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import Unsupported, number, where
from fulgurite.fuser.frontend.tensor_value import (
    Axes,
    Value,
    cast_to,
    dimension,
    positions,
    reshape,
)
from fulgurite.fuser.frontend.views import clamped_start
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    Bound,
    Constant,
    Expression,
    Operation,
    Position,
    guard,
    value_type,
)
from fulgurite.fuser.ir.index import Index, Loaded

# moved elements


def _flip(reader: Reader, node: Node, source: Any, dims: Sequence[int]) -> Value:
    value = reader.value(source)
    flipped = {dimension(d, len(value.axes)) for d in dims} if value.axes else set()

    def expression_at(axes: Axes) -> Expression:
        index = positions(axes)
        for d in flipped:
            index[d] = axes[d].size - 1 - index[d]
        return value.at(index)

    return reader.result(node, expression_at)


def _repeat(reader: Reader, node: Node, source: Any, repeats: Sequence[Any]) -> Value:
    value = reader.value(source)
    skipped = len(node.meta["val"].shape) - len(value.axes)

    def expression_at(axes: Axes) -> Expression:
        at = positions(axes)[skipped:]
        return value.at([indices.modulo(i, n) for i, n in zip(at, value.sizes, strict=True)])

    if any(size == 0 for size in value.sizes):
        return reader.result(node, lambda axes: number(0, Constant(0, value_type(value.dtype))))
    return reader.result(node, expression_at)


def _roll(
    reader: Reader, node: Node, source: Any, shifts: Sequence[Any], dims: Sequence[int] = ()
) -> Value:
    """Each dim in two runs of neighbours: what comes from the front, what comes around the end."""
    value = reader.value(source)
    if not value.axes or any(size == 0 for size in value.sizes):
        return reader.result(node, value.broadcast)
    shape = value.sizes
    if not dims:
        value, dims = reshape(value, (indices.product(shape),)), (0,)
    for shift, d in zip(reader.sizes(shifts), dims, strict=True):
        dim = dimension(d, len(value.axes))
        size = value.sizes[dim]
        if not (shift.is_constant and size.is_constant):
            raise Unsupported("a roll of or by a dynamic size")
        value = _rolled(value, dim, shift.constant % size.constant)
    value = reshape(value, shape)
    return reader.result(node, value.broadcast)


def _rolled(value: Value, dim: int, shift: int) -> Value:
    front, around = positions(value.axes), positions(value.axes)
    front[dim] = front[dim] - shift
    around[dim] = front[dim] + value.sizes[dim]
    bound = Bound(front[dim], value.sizes[dim])
    return Value(value.axes, guard((bound,), value.at(front), value.at(around)), value.dtype)


def _cat(reader: Reader, node: Node, tensors: Sequence[Any], dim: int = 0) -> Value:
    parts = [reader.value(t) for t in tensors]
    rank = len(node.meta["val"].shape)
    parts = [p for p in parts if not (len(p.axes) == 1 and p.sizes[0] == 0 and rank != 1)]
    dim = dimension(dim, rank)
    dtype = value_type(node.meta["val"].dtype)

    def expression_at(axes: Axes) -> Expression:
        starts = [indices.ZERO]
        for part in parts:
            starts.append(starts[-1] + part.sizes[dim])
        result: Expression | None = None
        for part, start in reversed(list(zip(parts, starts[:-1], strict=True))):
            if part.sizes[dim] == 0:
                continue
            index = positions(axes)
            index[dim] = index[dim] - start
            element = cast_to(dtype)(part.at(index), axes)
            bound = Bound(index[dim], part.sizes[dim])
            result = element if result is None else guard((bound,), element, result)
        return Constant(0, dtype) if result is None else result

    return reader.result(node, expression_at)


def _stack(reader: Reader, node: Node, tensors: Sequence[Any], dim: int = 0) -> Value:
    parts = [reader.value(t) for t in tensors]
    dim = dimension(dim, len(node.meta["val"].shape))
    dtype = value_type(node.meta["val"].dtype)

    def expression_at(axes: Axes) -> Expression:
        index = positions(axes)
        rest = [*index[:dim], *index[dim + 1 :]]
        result: Expression | None = None
        for k, part in reversed(list(enumerate(parts))):
            element = cast_to(dtype)(part.at(rest), axes)
            bound = Bound(index[dim] - k, indices.ONE)
            result = element if result is None else guard((bound,), element, result)
        assert result is not None, "stack of nothing"
        return result

    return reader.result(node, expression_at)


def _pad(reader: Reader, node: Node, source: Any, pad: Sequence[Any], value: Any = 0) -> Value:
    inner = reader.value(source)
    rank = len(inner.axes)
    before = [indices.ZERO] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k] = reader.integer(pad[2 * k])

    def expression_at(axes: Axes) -> Expression:
        index = [a - b for a, b in zip(positions(axes), before, strict=True)]
        bounds = tuple(
            Bound(i, size)
            for i, size, axis in zip(index, inner.sizes, axes, strict=True)
            if not (axis.size == size and i.plain is not None)
        )
        fill = reader.operand(value, axes, value_type(inner.dtype))
        return guard(bounds, inner.at(index), fill)

    return reader.result(node, expression_at)


def _triangle(upper: bool) -> Callable[..., Value]:
    def rule(reader: Reader, node: Node, source: Any, diagonal: Any = 0) -> Value:
        value = reader.value(source)
        offset = reader.integer(diagonal)

        def expression_at(axes: Axes) -> Expression:
            rows, columns = positions(axes)[-2:]
            distance = Position(columns - rows - offset, torch.int64)
            name = "ge" if upper else "le"
            kept = Operation(name, (distance, Constant(0, torch.int64)), torch.bool)
            element = value.at(positions(axes))
            zero = number(0, Constant(0, value_type(value.dtype)))
            return where(kept, element, zero)

        return reader.result(node, expression_at)

    return rule


def _slice_scatter(
    reader: Reader,
    node: Node,
    source: Any,
    src: Any,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Value:
    base, written = reader.value(source), reader.value(src)
    dim = dimension(dim, len(base.axes))
    begin = clamped_start(reader, start, base.sizes[dim])

    def expression_at(axes: Axes) -> Expression:
        index = positions(axes)
        distance = index[dim] - begin
        place = indices.floordiv(distance, indices.of(step))
        bounds = (
            Bound(place, written.sizes[dim]),
            Bound(indices.modulo(distance, indices.of(step)), indices.ONE),
        )
        inner = [*index[:dim], place, *index[dim + 1 :]]
        element = cast_to(value_type(base.dtype))(written.at(inner), axes)
        return guard(bounds, element, base.at(index))

    return reader.result(node, expression_at)


def _select_scatter(
    reader: Reader, node: Node, source: Any, src: Any, dim: int, index: Any
) -> Value:
    base, written = reader.value(source), reader.value(src)
    dim = dimension(dim, len(base.axes))
    place = reader.integer(index)
    if not place.is_constant:
        raise Unsupported("select_scatter at a dynamic position")
    if place.constant < 0:
        place = place + base.sizes[dim]

    def expression_at(axes: Axes) -> Expression:
        at = positions(axes)
        rest = [*at[:dim], *at[dim + 1 :]]
        element = cast_to(value_type(base.dtype))(written.at(rest), axes)
        return guard((Bound(at[dim] - place, indices.ONE),), element, base.at(at))

    return reader.result(node, expression_at)


def _diagonal_scatter(
    reader: Reader,
    node: Node,
    source: Any,
    src: Any,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Value:
    base, written = reader.value(source), reader.value(src)
    rank = len(base.axes)
    first, second = dimension(dim1, rank), dimension(dim2, rank)

    def expression_at(axes: Axes) -> Expression:
        at = positions(axes)
        along = at[first] - max(-offset, 0)
        rest = [position for d, position in enumerate(at) if d not in (first, second)]
        element = cast_to(value_type(base.dtype))(written.at([*rest, along]), axes)
        bounds = (
            Bound(at[second] - at[first] - offset, indices.ONE),
            Bound(along, written.sizes[-1]),
        )
        return guard(bounds, element, base.at(at))

    return reader.result(node, expression_at)


# gathered elements


def _loaded(expression: Expression, size: Index, wraps: bool = False) -> Index:
    if expression.dtype not in (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8):
        raise Unsupported(f"an index of dtype {expression.dtype}")
    return indices.of_atom(Loaded(expression, size, wraps))


def _gather(reader: Reader, node: Node, source: Any, dim: int, index: Any, **_: Any) -> Value:
    value, where_to = reader.value(source), reader.value(index)
    if not value.axes or len(value.axes) != len(where_to.axes):
        raise Unsupported("gather from or with a number")
    dim = dimension(dim, len(value.axes))

    def expression_at(axes: Axes) -> Expression:
        at = positions(axes)
        at[dim] = _loaded(where_to.at(positions(axes)), value.sizes[dim])
        return value.at(at)

    return reader.result(node, expression_at)


def _take(reader: Reader, node: Node, source: Any, index: Any) -> Value:
    value, where_to = reader.value(source), reader.value(index)
    size = indices.product(value.sizes)
    flat = reshape(value, (size,)) if value.axes else None

    def expression_at(axes: Axes) -> Expression:
        place = _loaded(where_to.broadcast(axes), size, wraps=True)
        return value.expression if flat is None else flat.at([place])

    return reader.result(node, expression_at)


def _index_select(reader: Reader, node: Node, source: Any, dim: int, index: Any) -> Value:
    value, where_to = reader.value(source), reader.value(index)
    if not value.axes or not where_to.axes:
        raise Unsupported("index_select of a number")
    dim = dimension(dim, len(value.axes))

    def expression_at(axes: Axes) -> Expression:
        at = positions(axes)
        at[dim] = _loaded(where_to.at([at[dim]]), value.sizes[dim])
        return value.at(at)

    return reader.result(node, expression_at)


def _embedding(reader: Reader, node: Node, weight: Any, indices: Any, **_: Any) -> Value:
    table, where_to = reader.value(weight), reader.value(indices)

    def expression_at(axes: Axes) -> Expression:
        at = positions(axes)
        return table.at([_loaded(where_to.at(at[:-1]), table.sizes[0]), at[-1]])

    return reader.result(node, expression_at)


def _index(reader: Reader, node: Node, source: Any, indices: Sequence[Any]) -> Value:
    value = reader.value(source)
    chosen = [None if i is None else reader.value(i) for i in indices]
    chosen += [None] * (len(value.axes) - len(chosen))
    dims = [d for d, i in enumerate(chosen) if i is not None]
    if any(i.dtype == torch.bool for i in chosen if i is not None):
        raise Unsupported("an index by a mask, whose size depends on the data")
    rank = max(len(chosen[d].axes) for d in dims)  # type: ignore[union-attr]
    together = dims == list(range(dims[0], dims[-1] + 1))
    front = dims[0] if together else 0

    def expression_at(axes: Axes) -> Expression:
        inner = axes[front : front + rank]
        rest = iter([*axes[:front], *axes[front + rank :]])
        at: list[Index] = []
        for d, which in enumerate(chosen):
            if which is None:
                at.append(positions((next(rest),))[0])
            else:
                at.append(_loaded(which.broadcast(inner), value.sizes[d], wraps=True))
        return value.at(at)

    return reader.result(node, expression_at)


RULES: dict[str, Callable[..., Any]] = {
    "flip": _flip,
    "repeat": _repeat,
    "roll": _roll,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "tril": _triangle(upper=False),
    "triu": _triangle(upper=True),
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "diagonal_scatter": _diagonal_scatter,
    "gather": _gather,
    "take": _take,
    "index_select": _index_select,
    "embedding": _embedding,
    "index": _index,
}
