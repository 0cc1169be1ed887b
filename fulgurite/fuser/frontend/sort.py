"""Lowerings of sort, topk, kthvalue and median as argsorts. Same calling convention as `views.py`.

An argsort reduces integer keys, in the order of the values, to positions. The values are gathered
at these positions, so they keep their bits: the sign of a zero, the payload of a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype
from fulgurite.fuser.frontend.reductions import add_reduction
from fulgurite.fuser.frontend.symbolic_sizes import strides_to_indices
from fulgurite.fuser.frontend.tensor_value import (
    Axes,
    TensorValue,
    axis_indices,
    canonicalize_dim,
    reshape_value,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression, IndexValue, Operation
from fulgurite.fuser.ir.index import Axis, Index, IndirectIndex
from fulgurite.fuser.ir.statement import Reduction
from fulgurite.kernels.tuning import fuser_cpu, fuser_gpu
from fulgurite.trace.node_meta import fake_value

# The dtype that holds the bits of a float, in which they are compared as integers.
BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
# The dtype of a key of an integer: the next one of `ARGSORT_KEY_DTYPES` that holds all values.
INTEGER_KEYS = {
    torch.bool: torch.int16,
    torch.uint8: torch.int16,
    torch.int8: torch.int16,
    torch.int16: torch.int16,
    torch.uint16: torch.int32,
    torch.int32: torch.int32,
    torch.uint32: torch.int64,
    torch.int64: torch.int64,
}


def make_sort_key(value: Expression, dtype: torch.dtype, descending: bool) -> Expression:
    """Returns an integer with the order of the values; NaN is the largest, -0.0 equals 0.0."""
    if dtype.is_floating_point:
        key = _make_float_key(value, dtype)
    elif dtype in INTEGER_KEYS:
        key = convert_dtype(value, INTEGER_KEYS[dtype])
    else:
        raise Unsupported(f"a sort of {dtype}")
    return apply("not", key) if descending else key


def _make_float_key(value: Expression, dtype: torch.dtype) -> Expression:
    """Returns the bits of a float, with those below the sign flipped where it is negative."""
    stored = dtype if dtype in BITS else torch.float32
    integer = BITS[stored]
    info = torch.iinfo(integer)
    if stored in (torch.float16, torch.bfloat16):
        bits: Expression = Operation("bitcast", (Operation("cast", (value,), stored),), integer)
    else:
        bits = Operation("bitcast", (value,), integer)
    is_negative = apply("lt", bits, Constant(0, integer))
    flipped = apply("xor", bits, Constant(info.max, integer))
    is_minus_zero = apply("eq", bits, Constant(info.min, integer))
    ordered = where(is_negative, where(is_minus_zero, Constant(0, integer), flipped), bits)
    is_nan = apply("ne", value, value)
    return where(is_nan, Constant(info.max, integer), ordered)


def add_argsort(
    ctx: LoweringContext,
    name: str,
    value: TensorValue,
    dim: int,
    descending: bool,
    start: Index,
    count: Index,
    strides: tuple[Index, ...] | None = None,
) -> TensorValue:
    """Adds the statement of the positions with ranks `start` to `start + count` along `dim`."""
    _check_length(ctx, value.sizes[dim], start + count)
    sizes = [count if d == dim else size for d, size in enumerate(value.sizes)]
    axes = indices.make_axes(sizes)
    sorted_axis = Axis(f"r{dim}", value.sizes[dim])
    at = axis_indices(axes)
    rank, at[dim] = at[dim] + start, indices.from_atom(sorted_axis)
    key = make_sort_key(value.load_at(at), value.dtype, descending)
    _check_key(ctx, key)
    reduction = Reduction("argsort", (sorted_axis,), rank=rank)
    return ctx.add_statement(name, torch.int64, axes, key, reduction, strides=strides)


def _check_length(ctx: LoweringContext, size: Index, num_ranks: Index) -> None:
    """Leaves rows to torch that are too long for a generated kernel."""
    limit = fuser_cpu.MAX_SORTED_ROW
    if ctx.uses_atomics:
        if not (size.is_constant and num_ranks.is_constant):
            raise Unsupported("a sort along a dimension of dynamic size on a GPU")
        is_extracted = num_ranks.constant <= fuser_gpu.MAX_EXTRACTED_RANKS
        limit = fuser_gpu.MAX_EXTRACTED_ROW if is_extracted else fuser_gpu.MAX_SORTED_ROW
    if size.is_constant and size.constant > limit:
        raise Unsupported(
            f"a sort of {size} elements (a generated kernel sorts rows of at most {limit})"
        )


def _check_key(ctx: LoweringContext, key: Expression) -> None:
    if key.dtype == torch.int64 and ctx.uses_atomics:
        raise Unsupported("a sort of 64-bit values on a GPU")


def gather_along(value: TensorValue, dim: int, position: Expression, axes: Axes) -> Expression:
    """Returns the element at a position of a row; the other dimensions are those of `axes`."""
    at = axis_indices(axes)
    at[dim] = indices.from_atom(
        IndirectIndex(position, value.sizes[dim], wraps_negative=False, is_checked=False)
    )
    return value.load_at(at)


def lower_ordered(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    dim: int,
    descending: bool,
    count: Index | None = None,
) -> tuple[TensorValue, TensorValue]:
    """Lowers the first `count` (None: all) elements in order, and their positions."""
    value = ctx.get_value(source)
    value_fake, index_fake = fake_value(node)
    if not value.axes:
        return _lower_scalar(ctx, node, value)
    dim = canonicalize_dim(dim, len(value.axes))
    count = value.sizes[dim] if count is None else count
    order = add_argsort(
        ctx,
        f"{node.name}_indices",
        value,
        dim,
        descending,
        indices.ZERO,
        count,
        strides_to_indices(index_fake),
    )

    def value_at(axes: Axes) -> Expression:
        return gather_along(value, dim, order.load_at(axis_indices(axes)), axes)

    return ctx.add_result(node, value_at, value_fake, "values"), order


def _lower_scalar(
    ctx: LoweringContext, node: Node, value: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """Lowers the sort of a 0-d tensor."""
    value_fake, index_fake = fake_value(node)
    zero = ctx.add_result(node, lambda _: Constant(0, torch.int64), index_fake, "indices")
    return ctx.add_result(node, lambda _: value.expression, value_fake, "values"), zero


def lower_sort(
    ctx: LoweringContext, node: Node, source: Any, dim: int = -1, descending: bool = False, **_: Any
) -> tuple[TensorValue, TensorValue]:
    return lower_ordered(ctx, node, source, dim, descending)


def lower_topk(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    k: Any,
    dim: int = -1,
    largest: bool = True,
    **_: Any,
) -> tuple[TensorValue, TensorValue]:
    return lower_ordered(ctx, node, source, dim, largest, ctx.to_index(k))


def lower_argsort(
    ctx: LoweringContext, node: Node, source: Any, dim: int = -1, descending: bool = False, **_: Any
) -> TensorValue:
    value, fake = ctx.get_value(source), fake_value(node)
    if not value.axes:
        return ctx.add_result(node, lambda _: Constant(0, torch.int64))
    dim = canonicalize_dim(dim, len(value.axes))
    strides = strides_to_indices(fake)
    return add_argsort(
        ctx, node.name, value, dim, descending, indices.ZERO, value.sizes[dim], strides
    )


def _lower_selected(
    ctx: LoweringContext,
    node: Node,
    value: TensorValue,
    dim: int,
    keepdim: bool,
    position_at: Callable[[list[Index]], Expression],
) -> tuple[TensorValue, TensorValue]:
    """Lowers one element of each row: `position_at` is where, at an index without `dim`."""
    value_fake, index_fake = fake_value(node)

    def kept(axes: Axes) -> list[Index]:
        at = axis_indices(axes)
        return [i for d, i in enumerate(at) if d != dim] if keepdim else at

    position = ctx.add_result(node, lambda axes: position_at(kept(axes)), index_fake, "indices")

    def value_at(axes: Axes) -> Expression:
        found = position.load_at(axis_indices(axes))
        at = kept(axes)
        row = indices.from_atom(
            IndirectIndex(found, value.sizes[dim], wraps_negative=False, is_checked=False)
        )
        return value.load_at([*at[:dim], row, *at[dim:]])

    return ctx.add_result(node, value_at, value_fake, "values"), position


def lower_kthvalue(
    ctx: LoweringContext, node: Node, source: Any, k: Any, dim: int = -1, keepdim: bool = False
) -> tuple[TensorValue, TensorValue]:
    value = ctx.get_value(source)
    if not value.axes:
        return _lower_scalar(ctx, node, value)
    dim = canonicalize_dim(dim, len(value.axes))
    name = f"{node.name}_order"
    start = ctx.to_index(k) - 1
    order = add_argsort(ctx, name, value, dim, False, start, indices.ONE)

    def position_at(at: list[Index]) -> Expression:
        return order.load_at([*at[:dim], indices.ZERO, *at[dim:]])

    return _lower_selected(ctx, node, value, dim, keepdim, position_at)


def add_median_position(
    ctx: LoweringContext, node: Node, value: TensorValue, dim: int, ignores_nan: bool
) -> Callable[[list[Index]], Expression]:
    """Adds the statements of a median; returns its position at an index without `dim`."""
    if value.sizes[dim] == 0:
        raise Unsupported("the median of no elements")
    if ignores_nan and value.dtype.is_floating_point:
        return _add_nanmedian_position(ctx, node, value, dim)
    middle = indices.floordiv(value.sizes[dim] - 1, Index(2))
    order = add_argsort(ctx, f"{node.name}_order", value, dim, False, middle, indices.ONE)
    first_nan = None
    if value.dtype.is_floating_point:
        size = IndexValue(value.sizes[dim], torch.int64)

        def nan_position(element: Expression, axes: Axes) -> Expression:
            here = IndexValue(indices.from_atom(axes[dim]), torch.int64)
            return where(apply("ne", element, element), here, size)

        first_nan = add_reduction(
            ctx, f"{node.name}_nan", value, [dim], "min", torch.int64, nan_position
        )

    def position_at(at: list[Index]) -> Expression:
        found = order.load_at([*at[:dim], indices.ZERO, *at[dim:]])
        if first_nan is None:
            return found
        nan = first_nan.load_at(at)
        return where(apply("lt", nan, IndexValue(value.sizes[dim], torch.int64)), nan, found)

    return position_at


def _add_nanmedian_position(
    ctx: LoweringContext, node: Node, value: TensorValue, dim: int
) -> Callable[[list[Index]], Expression]:
    """The same without NaNs. They are last in order, so their number gives the rank."""
    order = add_argsort(
        ctx, f"{node.name}_order", value, dim, False, indices.ZERO, value.sizes[dim]
    )

    def is_number(element: Expression, axes: Axes) -> Expression:
        return convert_dtype(apply("eq", element, element), torch.int64)

    count = add_reduction(ctx, f"{node.name}_count", value, [dim], "sum", torch.int64, is_number)

    def position_at(at: list[Index]) -> Expression:
        one = Constant(1, torch.int64)
        above = apply("maximum", count.load_at(at), one)  # the median of NaNs is a NaN
        middle = apply("shift_right", apply("sub", above, one), one)
        rank = IndirectIndex(middle, value.sizes[dim], wraps_negative=False, is_checked=False)
        return order.load_at([*at[:dim], indices.from_atom(rank), *at[dim:]])

    return position_at


def make_median_lowering(ignores_nan: bool) -> Callable[..., Any]:
    """Returns the lowering of median or nanmedian: of all elements, or along a dimension."""

    def lower(
        ctx: LoweringContext, node: Node, source: Any, dim: int | None = None, keepdim: bool = False
    ) -> Any:
        value = ctx.get_value(source)
        if dim is not None:
            if not value.axes:
                return _lower_scalar(ctx, node, value)
            dim = canonicalize_dim(dim, len(value.axes))
            position_at = add_median_position(ctx, node, value, dim, ignores_nan)
            return _lower_selected(ctx, node, value, dim, keepdim, position_at)
        if not value.axes:
            return ctx.add_result(node, lambda _: value.expression)
        flat = reshape_value(value, (indices.product(value.sizes),))
        position = add_median_position(ctx, node, flat, 0, ignores_nan)([])
        return ctx.add_result(node, lambda _: gather_flat(flat, position))

    return lower


def gather_flat(flat: TensorValue, position: Expression) -> Expression:
    """Returns the element of a vector at a position."""
    (size,) = flat.sizes
    return flat.load_at(
        [indices.from_atom(IndirectIndex(position, size, wraps_negative=False, is_checked=False))]
    )


SORT_LOWERINGS: dict[str, Callable[..., Any]] = {
    "sort": lower_sort,
    "topk": lower_topk,
    "argsort": lower_argsort,
    "kthvalue": lower_kthvalue,
    "median": make_median_lowering(ignores_nan=False),
    "nanmedian": make_median_lowering(ignores_nan=True),
}
