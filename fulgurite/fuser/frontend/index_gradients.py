"""Lowerings of gradients of lookups, and of histograms: indexed sums on top of zeros.

Same calling convention as `views.py`. The gradients of `gather`, `index` and `index_select` are
`scatter_add`, `index_put` and `index_add` (`scatters.py`); those of bags are in `embedding_bags.py`.
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
from fulgurite.fuser.ir.statement import Reduction
from fulgurite.trace.node_meta import fake_value

ZERO = Constant(0, torch.int64)
ONE = Constant(1, torch.int64)


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
    count = count_rows(ctx, node, rows, layout.sizes[0]) if scale_grad_by_freq else None

    def value_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        value = convert_dtype(gradient.load_at(at), wide)
        return scale_row(value, rows.load_at(at[:-1]), layout.sizes[0], padding_idx, count)

    def index_at(axes: Axes) -> Sequence[Index]:
        at = axis_indices(axes)
        return [make_index(rows.load_at(at[:-1]), layout.sizes[0]), at[-1]]

    store = IndexedStore("sum", gradient.sizes, index_at, value_at)
    return add_indexed_store(ctx, layout, lambda _: make_constant(0, wide), store)


def count_rows(ctx: LoweringContext, node: Node, rows: TensorValue, size: Index) -> TensorValue:
    """How often each row of the weight was looked up."""

    def index_at(axes: Axes) -> Sequence[Index]:
        return [make_index(rows.load_at(axis_indices(axes)), size)]

    store = IndexedStore("sum", rows.sizes, index_at, lambda _: ONE)
    layout = ResultLayout(f"{node.name}_count", torch.int64, (size,))
    return add_indexed_store(ctx, layout, lambda _: ZERO, store)


def scale_row(
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
    "histc": lower_histc,
}
