"""Lowerings of gradients of lookups, and of histograms: indexed sums on top of zeros.

Same calling convention as `views.py`. The gradients of `gather`, `index` and `index_select` are
`scatter_add`, `index_put` and `index_add` (`scatters.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.indexed_store import (
    IndexedStore,
    ResultLayout,
    add_indexed_store,
    make_index,
    node_layout,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype, make_constant
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices, reshape_value
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, div, mul, sub, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression, opmath_dtype
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import Reduction, Scan
from fulgurite.trace.node_meta import fake_value

ZERO = Constant(0, torch.int64)
ONE = Constant(1, torch.int64)
MEAN, MAX = 1, 2  # modes of embedding_bag


def lower_embedding_dense_backward(
    ctx: LoweringContext,
    node: Node,
    grad_output: Any,
    indices: Any,
    num_weights: Any,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> TensorValue:
    """grad_weight[indices[k]] += grad_output[k], without the rows of `padding_idx`."""
    gradient, rows = ctx.get_value(grad_output), ctx.get_value(indices)
    layout = node_layout(node, fake_value(node))
    wide = opmath_dtype(layout.dtype)
    count = _count_rows(ctx, node, rows, layout.sizes[0]) if scale_grad_by_freq else None

    def value_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        value = convert_dtype(gradient.load_at(at), wide)
        return _scale_row(value, rows.load_at(at[:-1]), layout.sizes[0], padding_idx, count)

    def index_at(axes: Axes) -> Sequence[Index]:
        at = axis_indices(axes)
        return [make_index(rows.load_at(at[:-1]), layout.sizes[0]), at[-1]]

    store = IndexedStore("sum", gradient.sizes, index_at, value_at)
    return add_indexed_store(ctx, layout, lambda _: make_constant(0, wide), store)


def _count_rows(ctx: LoweringContext, node: Node, rows: TensorValue, size: Index) -> TensorValue:
    """How often each row of the weight was looked up."""

    def index_at(axes: Axes) -> Sequence[Index]:
        return [make_index(rows.load_at(axis_indices(axes)), size)]

    store = IndexedStore("sum", rows.sizes, index_at, lambda _: ONE)
    layout = ResultLayout(f"{node.name}_count", torch.int64, (size,))
    return add_indexed_store(ctx, layout, lambda _: ZERO, store)


def lower_embedding_bag_backward(
    ctx: LoweringContext, node: Node, offsets: Any, offset2bag: Any, sparse: bool, **arguments: Any
) -> TensorValue:
    """The gradient of `embedding_bag`. Its forward may have left out the bag of each index."""
    if sparse:
        raise Unsupported("a sparse gradient")
    fake = fake_value(node)
    if fake.device.type == "cpu" and fake.dtype == torch.bfloat16:
        raise Unsupported("bags of bfloat16: the FakeTensor rule does not know which are left out")
    bags, rows = ctx.get_value(offset2bag), ctx.get_value(arguments["indices"])
    if bags.sizes != rows.sizes:
        bags = _find_bags(ctx, node, ctx.get_value(offsets), rows.sizes[0])
    return _lower_bags(ctx, node, bags, **arguments)


def lower_embedding_bag_dense_backward(
    ctx: LoweringContext, node: Node, offset2bag: Any, **arguments: Any
) -> TensorValue:
    return _lower_bags(ctx, node, ctx.get_value(offset2bag), **arguments)


def _find_bags(ctx: LoweringContext, node: Node, offsets: TensorValue, count: Index) -> TensorValue:
    """The bag of each index: how many bags start there or before, less one."""

    def index_at(axes: Axes) -> Sequence[Index]:
        return [make_index(offsets.load_at(axis_indices(axes)), count + 1)]

    store = IndexedStore("sum", offsets.sizes, index_at, lambda _: ONE)
    layout = ResultLayout(f"{node.name}_starts", torch.int64, (count + 1,))
    starts = add_indexed_store(ctx, layout, lambda _: ZERO, store)
    (axis,) = axes = indices.make_axes((count,))
    started = starts.load_at(axis_indices(axes))
    name = f"{node.name}_started"
    scanned = ctx.add_statement(name, torch.int64, axes, started, scan=Scan("sum", axis))
    bag = apply("sub", scanned.broadcast_to(axes), ONE)
    return TensorValue(axes, bag, torch.int64)


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
    count = _count_rows(ctx, node, rows, layout.sizes[0]) if scale_grad_by_freq else None

    def value_at(axes: Axes) -> Expression:
        k, column = axis_indices(axes)
        bag = make_index(bags.load_at([k]), gradient.sizes[0])
        value = convert_dtype(gradient.load_at([bag, column]), wide)
        if weights is not None:
            value = mul(value, convert_dtype(weights.load_at([k]), wide))
        if sizes is not None:
            value = div(value, convert_dtype(sizes.load_at([bag]), wide))
        return _scale_row(value, rows.load_at([k]), layout.sizes[0], padding_idx, count)

    def index_at(axes: Axes) -> Sequence[Index]:
        k, column = axis_indices(axes)
        return [make_index(rows.load_at([k]), layout.sizes[0]), column]

    store = IndexedStore("sum", (*rows.sizes, layout.sizes[1]), index_at, value_at)
    return add_indexed_store(ctx, layout, lambda _: make_constant(0, wide), store)


def _scale_row(
    value: Expression, row: Expression, size: Index, padding_idx: int, count: TensorValue | None
) -> Expression:
    """The gradient of a row: divided by how often it was looked up, or 0 for the padding."""
    if count is not None:
        repeats = count.load_at([make_index(row, size)])
        value = div(value, convert_dtype(repeats, value.dtype))
    if padding_idx < 0:
        return value
    is_padding = apply("eq", convert_dtype(row, torch.int64), Constant(padding_idx, torch.int64))
    return where(is_padding, make_constant(0, value.dtype), value)


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


def lower_histc(
    ctx: LoweringContext, node: Node, source: Any, bins: int = 100, min: Any = 0, max: Any = 0
) -> TensorValue:
    """How many elements are in each of `bins` equal intervals; NaN and others count nowhere."""
    value, layout = ctx.get_value(source), node_layout(node, fake_value(node))
    wide = layout.dtype
    if wide not in (torch.float32, torch.float64):
        raise Unsupported(f"histc of {wide}")  # torch rounds the interval's number
    if not (isinstance(min, int | float) and isinstance(max, int | float)):
        raise Unsupported("histc with symbolic bounds")
    low, high = _histogram_bounds(ctx, node, value, min, max)

    def find_bin(axes: Axes) -> tuple[Expression, Expression]:
        """The number of the interval, and whether there is one."""
        element = convert_dtype(value.load_at(axis_indices(axes)), wide)
        start, end = low(), high()
        inside = apply("and", apply("ge", element, start), apply("le", element, end))
        offset = mul(sub(element, start), make_constant(bins, wide))
        position = convert_dtype(div(offset, sub(end, start)), torch.int64)
        last = apply("minimum", position, Constant(bins - 1, torch.int64))
        return where(inside, last, ZERO), inside

    def index_at(axes: Axes) -> Sequence[Index]:
        return [make_index(find_bin(axes)[0], layout.sizes[0])]

    def value_at(axes: Axes) -> Expression:
        return where(find_bin(axes)[1], ONE, ZERO)

    store = IndexedStore("sum", value.sizes, index_at, value_at)
    counted = replace(layout, name=f"{node.name}_count", dtype=torch.int64)
    count = add_indexed_store(ctx, counted, lambda _: ZERO, store)
    return ctx.add_result(node, lambda axes: convert_dtype(count.broadcast_to(axes), layout.dtype))


def _histogram_bounds(
    ctx: LoweringContext, node: Node, value: TensorValue, low: float, high: float
) -> tuple[Callable[[], Expression], Callable[[], Expression]]:
    """The ends of the histogram: given, or of equal ones the smallest and the largest element."""
    wide = opmath_dtype(value.dtype)
    total = indices.product(value.sizes)
    if low != high or total == 0:
        if low == high:
            low, high = low - 1, high + 1
        first, last = make_constant(low, wide), make_constant(high, wide)
        return lambda: first, lambda: last
    if not total.is_constant:
        raise Unsupported("histc of a dynamic size without bounds")
    (axis,) = indices.make_axes((total,), "r")
    flat = reshape_value(value, (total,)).load_at(axis_indices((axis,)))
    ends = [
        ctx.add_statement(f"{node.name}_{kind}", wide, (), flat, Reduction(kind, (axis,)))
        for kind in ("min", "max")
    ]

    def end(k: int) -> Expression:
        smallest, largest = (e.broadcast_to(()) for e in ends)
        one = make_constant(1, wide)
        widened = apply("add", largest, one) if k else sub(smallest, one)
        return where(apply("eq", smallest, largest), widened, (smallest, largest)[k])

    return lambda: end(0), lambda: end(1)


INDEX_GRADIENT_LOWERINGS: dict[str, Callable[..., Any]] = {
    "embedding_dense_backward": lower_embedding_dense_backward,
    "_embedding_bag_backward": lower_embedding_bag_backward,
    "_embedding_bag_dense_backward": lower_embedding_bag_dense_backward,
    "histc": lower_histc,
}
