"""Lowerings of gathers, whose indices are loaded. Same calling convention as `views.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.symbolic_sizes import sizes_to_indices
from fulgurite.fuser.frontend.tensor_value import (
    Axes,
    TensorValue,
    axis_indices,
    canonicalize_dim,
    reshape_value,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Expression
from fulgurite.fuser.ir.index import Index, IndirectIndex
from fulgurite.trace.node_meta import fake_value


def _make_indirect_index(
    expression: Expression, size: Index, wraps_negative: bool = False
) -> Index:
    if expression.dtype not in (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8):
        raise Unsupported(f"an index tensor of dtype {expression.dtype}")
    return indices.from_atom(IndirectIndex(expression, size, wraps_negative))


def _check_addresses(source: Node, dims: Sequence[int]) -> None:
    """Raises Unsupported if addresses don't depend on the position along one of the dimensions.

    Kernels check a position where they compute an address with it. Along a dimension of one element, or
    an expanded one, there is nothing to compute: torch runs the op, and checks.
    """
    fake = fake_value(source)
    sizes, strides = sizes_to_indices(fake), fake.stride()
    if any(sizes[dim] == 1 or (isinstance(strides[dim], int) and not strides[dim]) for dim in dims):
        raise Unsupported("an index along a dimension of one element, or an expanded one")


def lower_gather(
    ctx: LoweringContext, node: Node, source: Any, dim: int, index: Any, **_: Any
) -> TensorValue:
    value, index_value = ctx.get_value(source), ctx.get_value(index)
    if not value.axes or len(value.axes) != len(index_value.axes):
        raise Unsupported("gather with a 0-d tensor")
    dim = canonicalize_dim(dim, len(value.axes))
    _check_addresses(source, [dim])

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        at[dim] = _make_indirect_index(index_value.load_at(axis_indices(axes)), value.sizes[dim])
        return value.load_at(at)

    return ctx.add_result(node, expression_at)


def lower_take(ctx: LoweringContext, node: Node, source: Any, index: Any) -> TensorValue:
    value, index_value = ctx.get_value(source), ctx.get_value(index)
    size = indices.product(value.sizes)
    if size == 1:
        raise Unsupported("take of a tensor of one element")
    _check_addresses(source, [d for d, length in enumerate(value.sizes) if length != 1])
    flat = reshape_value(value, (size,))

    def expression_at(axes: Axes) -> Expression:
        position = _make_indirect_index(index_value.broadcast_to(axes), size, wraps_negative=True)
        return flat.load_at([position])

    return ctx.add_result(node, expression_at)


def lower_index_select(
    ctx: LoweringContext, node: Node, source: Any, dim: int, index: Any
) -> TensorValue:
    value, index_value = ctx.get_value(source), ctx.get_value(index)
    if not value.axes or len(index_value.axes) != 1:
        raise Unsupported("index_select with a 0-d tensor, or an index that is no vector")
    dim = canonicalize_dim(dim, len(value.axes))
    _check_addresses(source, [dim])

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        at[dim] = _make_indirect_index(index_value.load_at([at[dim]]), value.sizes[dim])
        return value.load_at(at)

    return ctx.add_result(node, expression_at)


def lower_embedding(
    ctx: LoweringContext, node: Node, weight: Any, indices: Any, **_: Any
) -> TensorValue:
    table, index_value = ctx.get_value(weight), ctx.get_value(indices)
    _check_addresses(weight, [0])

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        return table.load_at(
            [_make_indirect_index(index_value.load_at(at[:-1]), table.sizes[0]), at[-1]]
        )

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
    _check_addresses(source, dims)
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
        return value.load_at(at)

    return ctx.add_result(node, expression_at)


GATHER_LOWERINGS: dict[str, Callable[..., Any]] = {
    "gather": lower_gather,
    "take": lower_take,
    "index_select": lower_index_select,
    "embedding": lower_embedding,
    "index": lower_index,
}
