"""Lowerings of gathers, whose indices are loaded. Same calling convention as `views.py`."""

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
    reshape_value,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, constant_like, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import (
    Constant,
    Expression,
    IndexValue,
    Load,
    Masked,
    walk,
)
from fulgurite.fuser.ir.index import Axis, Index, IndirectIndex


def _make_indirect_index(
    expression: Expression, size: Index, wraps_negative: bool = False
) -> Index:
    if expression.dtype not in (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8):
        raise Unsupported(f"an index tensor of dtype {expression.dtype}")
    return indices.from_atom(IndirectIndex(expression, size, wraps_negative))


def load_checked(ctx: LoweringContext, value: TensorValue, at: Sequence[Index]) -> Expression:
    """Returns the element of a value at an index with loaded positions.

    Kernels check a loaded position where they compute an address with it. A position that no
    address depends on, such as one of `torch.ones(3)`, is checked on its own.
    """
    element = value.load_at(at)
    for axis, position in zip(value.axes, at, strict=True):
        if position.indirect_indices() and not _is_read_along(ctx, value.expression, axis):
            number = IndexValue(position, torch.int64)
            is_valid = apply("ge", number, Constant(0, torch.int64))
            element = where(is_valid, element, constant_like(0, element))
    return element


def _is_read_along(ctx: LoweringContext, expression: Expression, axis: Axis) -> bool:
    """Whether what an expression reads depends on an axis, also if its operands are inlined."""
    statements = {s.name: s for s in ctx.statements}
    pending = [(expression, axis)] if axis.size != 1 else []
    seen = set(pending)
    while pending:
        expression, axis = pending.pop()
        for part in walk(expression):
            if isinstance(part, Load):
                along = [k for k, index in enumerate(part.index) if axis in index.axes()]
                along = [k for k in along if ctx.tensors[part.name].strides[k] != 0]
                source = statements.get(part.name)
                if along and (source is None or source.scan or source.scatter):
                    return True
                found = [(source.expression, source.axes[k]) for k in along if source]
                pending += [entry for entry in found if entry not in seen]
                seen.update(found)
            elif axis in _own_axes(part):
                return True
    return False


def _own_axes(part: Expression) -> set[Axis]:
    """The axes of the conditions and numbers of an expression itself, without its operands."""
    if isinstance(part, IndexValue):
        return part.index.axes()
    bounds = part.bounds if isinstance(part, Masked) else ()
    return set().union(*(bound.index.axes() for bound in bounds))


def lower_gather(
    ctx: LoweringContext, node: Node, source: Any, dim: int, index: Any, **_: Any
) -> TensorValue:
    value, index_value = ctx.get_value(source), ctx.get_value(index)
    if not value.axes or len(value.axes) != len(index_value.axes):
        raise Unsupported("gather with a 0-d tensor")
    dim = canonicalize_dim(dim, len(value.axes))

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        at[dim] = _make_indirect_index(index_value.load_at(axis_indices(axes)), value.sizes[dim])
        return load_checked(ctx, value, at)

    return ctx.add_result(node, expression_at)


def lower_take(ctx: LoweringContext, node: Node, source: Any, index: Any) -> TensorValue:
    value, index_value = ctx.get_value(source), ctx.get_value(index)
    size = indices.product(value.sizes)
    flat = reshape_value(value, (size,))

    def expression_at(axes: Axes) -> Expression:
        position = _make_indirect_index(index_value.broadcast_to(axes), size, wraps_negative=True)
        return load_checked(ctx, flat, [position])

    return ctx.add_result(node, expression_at)


def lower_index_select(
    ctx: LoweringContext, node: Node, source: Any, dim: int, index: Any
) -> TensorValue:
    value, index_value = ctx.get_value(source), ctx.get_value(index)
    if not value.axes or len(index_value.axes) != 1:
        raise Unsupported("index_select with a 0-d tensor, or an index that is no vector")
    dim = canonicalize_dim(dim, len(value.axes))

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        at[dim] = _make_indirect_index(index_value.load_at([at[dim]]), value.sizes[dim])
        return load_checked(ctx, value, at)

    return ctx.add_result(node, expression_at)


def lower_embedding(
    ctx: LoweringContext, node: Node, weight: Any, indices: Any, **_: Any
) -> TensorValue:
    table, index_value = ctx.get_value(weight), ctx.get_value(indices)

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        row = _make_indirect_index(index_value.load_at(at[:-1]), table.sizes[0])
        return load_checked(ctx, table, [row, at[-1]])

    return ctx.add_result(node, expression_at)


def lower_index(
    ctx: LoweringContext, node: Node, source: Any, indices: Sequence[Any]
) -> TensorValue:
    value = ctx.get_value(source)
    index_values = [None if i is None else ctx.get_value(i) for i in indices]
    index_values += [None] * (len(value.axes) - len(index_values))
    dims = [d for d, i in enumerate(index_values) if i is not None]
    if any(i.dtype == torch.bool for i in index_values if i is not None):
        raise Unsupported("boolean mask indexing, whose output size depends on the data")
    rank = max(len(index_values[d].axes) for d in dims)  # type: ignore[union-attr]
    # Like numpy: the indexed dimensions go to the front unless they are adjacent.
    is_adjacent = dims == list(range(dims[0], dims[-1] + 1))
    front = dims[0] if is_adjacent else 0

    def expression_at(axes: Axes) -> Expression:
        inner = axes[front : front + rank]
        rest = iter([*axes[:front], *axes[front + rank :]])
        at: list[Index] = []
        for d, index_value in enumerate(index_values):
            if index_value is None:
                at.append(axis_indices((next(rest),))[0])
            else:
                at.append(
                    _make_indirect_index(
                        index_value.broadcast_to(inner), value.sizes[d], wraps_negative=True
                    )
                )
        return load_checked(ctx, value, at)

    return ctx.add_result(node, expression_at)


GATHER_LOWERINGS: dict[str, Callable[..., Any]] = {
    "gather": lower_gather,
    "take": lower_take,
    "index_select": lower_index_select,
    "embedding": lower_embedding,
    "index": lower_index,
    "_unsafe_index": lower_index,  # of decompositions; eager checks its range, too
}
