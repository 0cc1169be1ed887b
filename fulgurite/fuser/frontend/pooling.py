"""Lowerings of pooling. Same calling convention as `views.py`; gradients are in `pooling_gradients.py`.

result[o] = sum or maximum over k of  source[o * stride - padding + k * dilation]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.axis_taps import (
    AxisTaps,
    TapLowering,
    TapReduction,
    integer,
    lower_taps,
    to_float,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype
from fulgurite.fuser.frontend.pooling_windows import (
    check_float,
    make_adaptive_windows,
    make_windows,
    sizes_of,
    window_size,
)
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import add, apply, constant_like, div, mul, where
from fulgurite.fuser.ir.expression import Constant, Expression, opmath_dtype
from fulgurite.fuser.ir.index import Index
from fulgurite.trace.node_meta import fake_value

# ---- averages ------------------------------------------------------------------------------------


def make_average_lowering(rank: int) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext,
        node: Node,
        source: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] | None = None,
        padding: Sequence[int] | int = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> TensorValue:
        fake, value = fake_value(node), ctx.get_value(source)
        check_float(fake)
        windows = make_windows(rank, value.sizes, sizes_of(fake), kernel_size, stride, padding)
        dtype = opmath_dtype(fake.dtype)

        def divide(total: Expression, axes: Axes) -> Expression:
            if divisor_override is not None:
                return div(total, Constant(float(divisor_override), dtype))
            at = axis_indices(axes)[-rank:]
            counts = [
                window_size(w, integer(i), count_include_pad, dtype)
                for w, i in zip(windows, at, strict=True)
            ]
            return div(total, functools.reduce(_multiply, counts))

        return lower_taps(
            ctx, node, value, [w.taps() for w in windows], TapReduction("sum", divide)
        )

    return lower


def _multiply(a: Expression, b: Expression) -> Expression:
    if isinstance(a, Constant) and isinstance(b, Constant):
        return Constant(a.value * b.value, a.dtype)
    return mul(a, b)


def make_adaptive_average_lowering(rank: int) -> Callable[..., TensorValue]:
    def lower(ctx: LoweringContext, node: Node, source: Any, output_size: Any) -> TensorValue:
        fake, value = fake_value(node), ctx.get_value(source)
        check_float(fake)
        windows = make_adaptive_windows(rank, value.sizes, sizes_of(fake))
        dtype = opmath_dtype(fake.dtype)

        def divide(total: Expression, axes: Axes) -> Expression:
            for w, at in zip(windows, axis_indices(axes)[-rank:], strict=True):
                is_even = w.n % w.m == 0
                size = to_float(Index(w.n // w.m), dtype) if is_even else None
                total = div(total, size or convert_dtype(w.size(integer(at)), dtype))
            return total

        return lower_taps(
            ctx, node, value, [w.taps() for w in windows], TapReduction("sum", divide)
        )

    return lower


# ---- maxima --------------------------------------------------------------------------------------


NumberAt = Callable[[list[Index], list[Index]], Expression]  # of a source index and tap numbers
_NOWHERE = -(1 << 62)  # less than any negated index


def number_in_image(value: TensorValue, rank: int) -> NumberAt:
    """Positions as torch numbers them: the index in the flattened image."""

    def number_at(at: list[Index], taps: list[Index]) -> Expression:
        total: Expression = integer(0)
        for size, index in zip(value.sizes[-rank:], at[-rank:], strict=True):
            total = add(mul(total, integer(size)), integer(index))
        return total

    return number_at


def number_in_window(kernel: Sequence[int]) -> NumberAt:
    """Positions as numbers of the taps of a window."""

    def number_at(at: list[Index], taps: list[Index]) -> Expression:
        return integer(_flatten(taps, kernel))

    return number_at


def _flatten(numbers: Sequence[Index], sizes: Sequence[int]) -> Index:
    total = indices.ZERO
    for number, size in zip(numbers, sizes, strict=True):
        total = total * size + number
    return total


def lower_maximum(
    ctx: LoweringContext,
    node: Node,
    value: TensorValue,
    taps: list[AxisTaps],
    number_at: NumberAt,
) -> tuple[TensorValue, TensorValue]:
    """The maximum of each window, and the number of its position.

    As in torch, the first maximum counts, or the last NaN.
    """
    values, positions = fake_value(node)
    lowering = TapLowering(ctx, node.name, value, taps)
    largest = lowering.lower(TapReduction("max"), values, node, "value")
    dtype = opmath_dtype(value.dtype)

    def first_maximum(axes: Axes, at: list[Index], taps: list[Index]) -> Expression:
        element = convert_dtype(value.load_at(at), dtype)
        is_largest = apply("eq", element, convert_dtype(largest.broadcast_to(axes), dtype))
        number = apply("neg", number_at(at, taps))
        return where(is_largest, number, Constant(_NOWHERE, torch.int64))

    def last_nan(axes: Axes, at: list[Index], taps: list[Index]) -> Expression:
        element = convert_dtype(value.load_at(at), dtype)
        is_nan = apply("ne", element, element)
        return where(is_nan, number_at(at, taps), Constant(-1, torch.int64))

    def choose(nan: Expression, axes: Axes) -> Expression:
        number = convert_dtype(apply("neg", first.broadcast_to(axes)), torch.int64)
        return where(apply("ge", nan, constant_like(0, nan)), nan, number)

    first = lowering.lower(TapReduction("max", element_at=first_maximum), positions, node, "first")
    if dtype.is_floating_point:
        number = lowering.lower(TapReduction("max", choose, last_nan), positions, node, "index")
    else:
        number = ctx.add_result(
            node, lambda axes: apply("neg", first.broadcast_to(axes)), positions, "index"
        )
    return largest, number


def make_maximum_lowering(rank: int) -> Callable[..., Any]:
    def lower(
        ctx: LoweringContext,
        node: Node,
        source: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] | None = None,
        padding: Sequence[int] | int = 0,
        dilation: Sequence[int] | int = 1,
        ceil_mode: bool = False,
    ) -> tuple[TensorValue, TensorValue]:
        value = ctx.get_value(source)
        result = sizes_of(fake_value(node)[0])
        windows = make_windows(rank, value.sizes, result, kernel_size, stride, padding, dilation)
        taps = [w.taps() for w in windows]
        return lower_maximum(ctx, node, value, taps, number_in_image(value, rank))

    return lower


def make_adaptive_maximum_lowering(rank: int) -> Callable[..., Any]:
    def lower(
        ctx: LoweringContext, node: Node, source: Any, output_size: Any
    ) -> tuple[TensorValue, TensorValue]:
        value = ctx.get_value(source)
        windows = make_adaptive_windows(rank, value.sizes, sizes_of(fake_value(node)[0]))
        taps = [w.taps() for w in windows]
        return lower_maximum(ctx, node, value, taps, number_in_image(value, rank))

    return lower


def lower_offsets(
    ctx: LoweringContext,
    node: Node,
    x: Any,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> tuple[TensorValue, TensorValue]:
    """Lowers `fulgurite::max_pool2d_offsets`: the maximum, and its position inside the window."""
    value = ctx.get_value(x)
    result = sizes_of(fake_value(node)[0])
    windows = make_windows(2, value.sizes, result, kernel, stride, padding, dilation)
    return lower_maximum(ctx, node, value, [w.taps() for w in windows], number_in_window(kernel))


POOLING_LOWERINGS: dict[str, Callable[..., Any]] = {
    name.format(rank): make(rank)
    for rank in (2, 3)
    for name, make in (
        ("avg_pool{}d", make_average_lowering),
        ("max_pool{}d_with_indices", make_maximum_lowering),
        ("_adaptive_avg_pool{}d", make_adaptive_average_lowering),
        ("adaptive_max_pool{}d", make_adaptive_maximum_lowering),
    )
}
# custom operators of `transforms/max_pool.py`
POOLING_OPERATORS: dict[str, Callable[..., Any]] = {"max_pool2d_offsets": lower_offsets}
