"""Lowerings of the gradients of `embedding_bag`. Same calling convention as `views.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.embedding_bags import MAX, MEAN, find_bags
from fulgurite.fuser.frontend.index_gradients import ZERO, count_rows, scale_row
from fulgurite.fuser.frontend.indexed_store import (
    IndexedStore,
    add_indexed_store,
    make_index,
    node_layout,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype, make_constant
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices
from fulgurite.fuser.ir.build_expression import apply, div, mul, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Expression, opmath_dtype
from fulgurite.fuser.ir.index import Index, make_axes
from fulgurite.fuser.ir.statement import Reduction
from fulgurite.trace.node_meta import fake_value


def lower_embedding_bag_backward(
    ctx: LoweringContext, node: Node, offsets: Any, offset2bag: Any, sparse: bool, **arguments: Any
) -> TensorValue:
    """The gradient of `embedding_bag`. Its forward may have left out the bag of each index."""
    if sparse:
        raise Unsupported("a sparse gradient")
    rows = ctx.get_value(arguments["indices"])
    bags = _read_bags(ctx, node, offsets, offset2bag, rows.sizes[0])
    return _lower_bags(ctx, node, bags, **arguments)


def _read_bags(
    ctx: LoweringContext, node: Node, offsets: Any, offset2bag: Any, count: Index
) -> TensorValue:
    """The bag of each lookup. The FakeTensor rule may be wrong about bfloat16 on CPUs."""
    bags, fake = ctx.get_value(offset2bag), fake_value(node)
    may_be_empty = fake.device.type == "cpu" and fake.dtype == torch.bfloat16
    if bags.sizes == (count,) and not may_be_empty:
        return bags
    starts = ctx.get_value(offsets)
    return find_bags(ctx, node, starts, count, starts.sizes[0])


def lower_embedding_bag_dense_backward(
    ctx: LoweringContext, node: Node, offset2bag: Any, **arguments: Any
) -> TensorValue:
    return _lower_bags(ctx, node, ctx.get_value(offset2bag), **arguments)


def _lower_bags(
    ctx: LoweringContext,
    node: Node,
    bags: TensorValue,
    grad: Any,
    indices: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: Any,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> TensorValue:
    """grad_weight[indices[k]] += grad[bag of k], divided by the bag's size for means."""
    if mode == MAX:
        return _lower_bag_maxima(ctx, node, grad, maximum_indices, bag_size)
    gradient, rows = ctx.get_value(grad), ctx.get_value(indices)
    layout = node_layout(node, fake_value(node))
    wide = opmath_dtype(layout.dtype)
    weights = ctx.get_value(per_sample_weights) if per_sample_weights is not None else None
    sizes = ctx.get_value(bag_size) if mode == MEAN else None
    count = count_rows(ctx, node, rows, layout.sizes[0]) if scale_grad_by_freq else None

    def value_at(axes: Axes) -> Expression:
        k, column = axis_indices(axes)
        bag = make_index(bags.load_at([k]), gradient.sizes[0])
        value = convert_dtype(gradient.load_at([bag, column]), wide)
        if weights is not None:
            value = mul(value, convert_dtype(weights.load_at([k]), wide))
        if sizes is not None:
            value = div(value, convert_dtype(sizes.load_at([bag]), wide))
        return scale_row(value, rows.load_at([k]), layout.sizes[0], padding_idx, count)

    def index_at(axes: Axes) -> Sequence[Index]:
        k, column = axis_indices(axes)
        return [make_index(rows.load_at([k]), layout.sizes[0]), column]

    store = IndexedStore("sum", (*rows.sizes, layout.sizes[1]), index_at, value_at)
    return add_indexed_store(ctx, layout, lambda _: make_constant(0, wide), store)


def _lower_bag_maxima(
    ctx: LoweringContext, node: Node, grad: Any, maximum_indices: Any, bag_size: Any
) -> TensorValue:
    """grad_weight[maximum_indices[b, j], j] += grad[b, j] for the bags that are not empty.

    The index of an empty bag is 0 on CPUs and -1 on GPUs.
    """
    gradient, rows = ctx.get_value(grad), ctx.get_value(maximum_indices)
    counts = ctx.get_value(bag_size)
    layout = node_layout(node, fake_value(node))
    wide = opmath_dtype(layout.dtype)

    def find_row(axes: Axes) -> tuple[Expression, Expression]:
        """The row, and whether there is one."""
        bag, column = axis_indices(axes)
        row = convert_dtype(rows.load_at([bag, column]), torch.int64)
        count = convert_dtype(counts.load_at([bag]), torch.int64)
        return row, apply("and", apply("gt", count, ZERO), apply("ge", row, ZERO))

    def value_at(axes: Axes) -> Expression:
        _, exists = find_row(axes)
        value = convert_dtype(gradient.load_at(axis_indices(axes)), wide)
        return where(exists, value, make_constant(0, wide))

    def index_at(axes: Axes) -> Sequence[Index]:
        row, exists = find_row(axes)
        return [make_index(where(exists, row, ZERO), layout.sizes[0]), axis_indices(axes)[1]]

    store = IndexedStore("sum", gradient.sizes, index_at, value_at)
    return add_indexed_store(ctx, layout, lambda _: make_constant(0, wide), store)


def lower_per_sample_weights_backward(
    ctx: LoweringContext,
    node: Node,
    grad: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    mode: int,
    padding_idx: int = -1,
) -> TensorValue:
    """grad_scale[k] = sum_j grad[bag of k, j] * weight[indices[k], j], and 0 for the padding."""
    gradient, table, rows = map(ctx.get_value, (grad, weight, indices))
    bags = _read_bags(ctx, node, offsets, offset2bag, rows.sizes[0])
    wide = opmath_dtype(fake_value(node).dtype)
    (axis,) = make_axes(gradient.sizes[1:], "r")
    column = axis_indices((axis,))[0]
    (lookup,) = make_axes(rows.sizes)
    k = axis_indices((lookup,))[0]
    row, bag = (
        make_index(rows.load_at([k]), table.sizes[0]),
        make_index(bags.load_at([k]), gradient.sizes[0]),
    )
    product = mul(
        convert_dtype(gradient.load_at([bag, column]), wide),
        convert_dtype(table.load_at([row, column]), wide),
    )
    total = ctx.add_statement(
        f"{node.name}_sum", wide, (lookup,), product, Reduction("sum", (axis,))
    )

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        value = total.load_at(at)
        return scale_row(value, rows.load_at(at), table.sizes[0], padding_idx, None)

    return ctx.add_result(node, expression_at)


EMBEDDING_BAG_GRADIENT_LOWERINGS: dict[str, Callable[..., Any]] = {
    "_embedding_bag_backward": lower_embedding_bag_backward,
    "_embedding_bag_dense_backward": lower_embedding_bag_dense_backward,
    "_embedding_bag_per_sample_weights_backward": lower_per_sample_weights_backward,
}
