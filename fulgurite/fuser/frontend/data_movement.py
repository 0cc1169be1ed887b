"""Lowerings of ops that move elements: flip, roll, cat, pad, slice_scatter.

Each becomes a statement with other indices. Same calling convention as `views.py`.
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
    reshape_value,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import constant_like, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import (
    BoundsCheck,
    Constant,
    Expression,
    IndexValue,
    Operation,
    make_masked,
    opmath_dtype,
)
from fulgurite.fuser.ir.host_symbols import clamp_slice_start, remainder, wrap_position
from fulgurite.fuser.ir.index import Index
from fulgurite.trace.node_meta import fake_value

# of cat and stack: each is a condition of every element, 30 ms to compile
MAX_PARTS = 128


def lower_flip(ctx: LoweringContext, node: Node, source: Any, dims: Sequence[int]) -> TensorValue:
    value = ctx.get_value(source)
    flipped = {canonicalize_dim(d, len(value.axes)) for d in dims} if value.axes else set()

    def expression_at(axes: Axes) -> Expression:
        index = axis_indices(axes)
        for d in flipped:
            index[d] = axes[d].size - 1 - index[d]
        return value.load_at(index)

    return ctx.add_result(node, expression_at)


def lower_repeat(
    ctx: LoweringContext, node: Node, source: Any, repeats: Sequence[Any]
) -> TensorValue:
    value = ctx.get_value(source)
    skipped = len(fake_value(node).shape) - len(value.axes)

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)[skipped:]
        return value.load_at([indices.modulo(i, n) for i, n in zip(at, value.sizes, strict=True)])

    if any(size == 0 for size in value.sizes):
        return ctx.add_result(
            node, lambda axes: constant_like(0, Constant(0, opmath_dtype(value.dtype)))
        )
    return ctx.add_result(node, expression_at)


def lower_roll(
    ctx: LoweringContext, node: Node, source: Any, shifts: Sequence[Any], dims: Sequence[int] = ()
) -> TensorValue:
    """Lowers roll as a masked selection per dimension: shifted or wrapped elements."""
    value = ctx.get_value(source)
    if not value.axes or any(size == 0 for size in value.sizes):
        return ctx.add_result(node, value.broadcast_to)
    shape = value.sizes
    if not dims:
        value, dims = reshape_value(value, (indices.product(shape),)), (0,)
    for shift, d in zip(ctx.to_indices(shifts), dims, strict=True):
        dim = canonicalize_dim(d, len(value.axes))
        value = _roll_dim(value, dim, remainder(shift, value.sizes[dim]))
    value = reshape_value(value, shape)
    return ctx.add_result(node, value.broadcast_to)


def _roll_dim(value: TensorValue, dim: int, shift: Index) -> TensorValue:
    front, wrapped = axis_indices(value.axes), axis_indices(value.axes)
    front[dim] = front[dim] - shift
    wrapped[dim] = front[dim] + value.sizes[dim]
    bound = BoundsCheck(front[dim], value.sizes[dim])
    return TensorValue(
        value.axes, make_masked((bound,), value.load_at(front), value.load_at(wrapped)), value.dtype
    )


def _get_parts(ctx: LoweringContext, tensors: Sequence[Any]) -> list[TensorValue]:
    if len(tensors) > MAX_PARTS:
        raise Unsupported(f"more than {MAX_PARTS} tensors")
    return [ctx.get_value(tensor) for tensor in tensors]


def lower_cat(
    ctx: LoweringContext, node: Node, tensors: Sequence[Any], dim: int = 0
) -> TensorValue:
    parts = _get_parts(ctx, tensors)
    rank = len(fake_value(node).shape)
    parts = [p for p in parts if not (len(p.axes) == 1 and p.sizes[0] == 0 and rank != 1)]
    dim = canonicalize_dim(dim, rank)
    dtype = opmath_dtype(fake_value(node).dtype)

    def expression_at(axes: Axes) -> Expression:
        starts = [indices.ZERO]
        for part in parts:
            starts.append(starts[-1] + part.sizes[dim])
        result: Expression | None = None
        for part, start in reversed(list(zip(parts, starts[:-1], strict=True))):
            if part.sizes[dim] == 0:
                continue
            index = axis_indices(axes)
            index[dim] = index[dim] - start
            element = make_cast(dtype)(part.load_at(index), axes)
            bound = BoundsCheck(index[dim], part.sizes[dim])
            result = element if result is None else make_masked((bound,), element, result)
        return Constant(0, dtype) if result is None else result

    return ctx.add_result(node, expression_at)


def lower_stack(
    ctx: LoweringContext, node: Node, tensors: Sequence[Any], dim: int = 0
) -> TensorValue:
    parts = _get_parts(ctx, tensors)
    dim = canonicalize_dim(dim, len(fake_value(node).shape))
    dtype = opmath_dtype(fake_value(node).dtype)

    def expression_at(axes: Axes) -> Expression:
        index = axis_indices(axes)
        rest = [*index[:dim], *index[dim + 1 :]]
        result: Expression | None = None
        for k, part in reversed(list(enumerate(parts))):
            element = make_cast(dtype)(part.load_at(rest), axes)
            bound = BoundsCheck(index[dim] - k, indices.ONE)
            result = element if result is None else make_masked((bound,), element, result)
        assert result is not None, "stack of no tensors"
        return result

    return ctx.add_result(node, expression_at)


def lower_pad(
    ctx: LoweringContext, node: Node, source: Any, pad: Sequence[Any], value: Any = 0
) -> TensorValue:
    inner = ctx.get_value(source)
    rank = len(inner.axes)
    before = [indices.ZERO] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k] = ctx.to_index(pad[2 * k])

    def expression_at(axes: Axes) -> Expression:
        index = [a - b for a, b in zip(axis_indices(axes), before, strict=True)]
        bounds = tuple(
            BoundsCheck(i, size)
            for i, size, axis in zip(index, inner.sizes, axes, strict=True)
            if not (axis.size == size and i.single_axis is not None)
        )
        fill = ctx.read_operand(value, axes, opmath_dtype(inner.dtype))
        return make_masked(bounds, inner.load_at(index), fill)

    return ctx.add_result(node, expression_at)


def make_triangle_lowering(upper: bool) -> Callable[..., TensorValue]:
    def lower(ctx: LoweringContext, node: Node, source: Any, diagonal: Any = 0) -> TensorValue:
        value = ctx.get_value(source)
        offset = ctx.to_index(diagonal)

        def expression_at(axes: Axes) -> Expression:
            rows, columns = axis_indices(axes)[-2:]
            distance = IndexValue(columns - rows - offset, torch.int64)
            name = "ge" if upper else "le"
            is_kept = Operation(name, (distance, Constant(0, torch.int64)), torch.bool)
            element = value.load_at(axis_indices(axes))
            zero = constant_like(0, Constant(0, opmath_dtype(value.dtype)))
            return where(is_kept, element, zero)

        return ctx.add_result(node, expression_at)

    return lower


def _check_source(written: TensorValue, sizes: Sequence[Index]) -> None:
    """Refuse a source that is not of the size of the slice. FakeTensor rules don't compare them."""
    is_other = len(written.sizes) != len(sizes) or any(
        own.is_constant and size.is_constant and own != size
        for own, size in zip(written.sizes, sizes, strict=True)
    )
    if is_other:
        raise Unsupported("a source of another size than the slice, which torch refuses")


def lower_slice_scatter(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    src: Any,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> TensorValue:
    base, written = ctx.get_value(source), ctx.get_value(src)
    dim = canonicalize_dim(dim, len(base.axes))
    begin = clamp_slice_start(ctx.to_index(0 if start is None else start), base.sizes[dim])
    stride = ctx.to_index(step)
    bounds_of_slice = (0 if start is None else start, end, step)
    sizes = list(base.sizes)
    if sizes[dim].is_constant and all(isinstance(n, int | None) for n in bounds_of_slice):
        covered = range(*slice(*bounds_of_slice).indices(sizes[dim].constant))
        sizes[dim] = Index(len(covered))
    else:
        sizes[dim] = written.sizes[dim]
    _check_source(written, sizes)

    def expression_at(axes: Axes) -> Expression:
        index = axis_indices(axes)
        distance = index[dim] - begin
        position = indices.floordiv(distance, stride)
        bounds = (
            BoundsCheck(position, written.sizes[dim]),
            BoundsCheck(indices.modulo(distance, stride), indices.ONE),
        )
        inner = [*index[:dim], position, *index[dim + 1 :]]
        element = make_cast(opmath_dtype(base.dtype))(written.load_at(inner), axes)
        return make_masked(bounds, element, base.load_at(index))

    return ctx.add_result(node, expression_at)


def lower_select_scatter(
    ctx: LoweringContext, node: Node, source: Any, src: Any, dim: int, index: Any
) -> TensorValue:
    base, written = ctx.get_value(source), ctx.get_value(src)
    dim = canonicalize_dim(dim, len(base.axes))
    position = wrap_position(ctx.to_index(index), base.sizes[dim])
    _check_source(written, (*base.sizes[:dim], *base.sizes[dim + 1 :]))

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        rest = [*at[:dim], *at[dim + 1 :]]
        element = make_cast(opmath_dtype(base.dtype))(written.load_at(rest), axes)
        return make_masked(
            (BoundsCheck(at[dim] - position, indices.ONE),), element, base.load_at(at)
        )

    return ctx.add_result(node, expression_at)


def lower_diagonal_scatter(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    src: Any,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> TensorValue:
    base, written = ctx.get_value(source), ctx.get_value(src)
    rank = len(base.axes)
    first, second = canonicalize_dim(dim1, rank), canonicalize_dim(dim2, rank)
    rows, columns = base.sizes[first], base.sizes[second]
    length = written.sizes[-1] if written.axes else indices.ZERO
    if rows.is_constant and columns.is_constant:
        shorter = min(rows.constant + min(offset, 0), columns.constant - max(offset, 0))
        length = Index(max(shorter, 0))
    others = [size for d, size in enumerate(base.sizes) if d not in (first, second)]
    _check_source(written, (*others, length))

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        along = at[first] - max(-offset, 0)
        rest = [position for d, position in enumerate(at) if d not in (first, second)]
        element = make_cast(opmath_dtype(base.dtype))(written.load_at([*rest, along]), axes)
        bounds = (
            BoundsCheck(at[second] - at[first] - offset, indices.ONE),
            BoundsCheck(along, written.sizes[-1]),
        )
        return make_masked(bounds, element, base.load_at(at))

    return ctx.add_result(node, expression_at)


DATA_MOVEMENT_LOWERINGS: dict[str, Callable[..., Any]] = {
    "flip": lower_flip,
    "repeat": lower_repeat,
    "roll": lower_roll,
    "cat": lower_cat,
    "stack": lower_stack,
    "constant_pad_nd": lower_pad,
    "tril": make_triangle_lowering(upper=False),
    "triu": make_triangle_lowering(upper=True),
    "slice_scatter": lower_slice_scatter,
    "select_scatter": lower_select_scatter,
    "diagonal_scatter": lower_diagonal_scatter,
}
