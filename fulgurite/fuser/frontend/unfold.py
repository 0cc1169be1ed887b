"""Lowerings of `im2col` and `col2im`: `F.unfold`, `F.fold` and their gradients.

Same calling convention as `views.py`. With windows o * stride - padding + k * dilation:

    im2col    columns[n, (c, ky, kx), (oy, ox)] = image[n, c, window_y(oy, ky), window_x(ox, kx)]
    col2im    image[n, c, y, x] = sum of the columns that a window has read from (y, x)

Both gather: nothing is scattered, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from fulgurite.fuser.frontend.axis_taps import (
    AxisTaps,
    TapReduction,
    clamp_position,
    integer,
    is_between,
    lower_taps,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype
from fulgurite.fuser.frontend.pooling_windows import Windows, make_windows, sizes_of
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices, reshape_value
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, constant_like
from fulgurite.fuser.ir.expression import BoundsCheck, Expression, make_masked, opmath_dtype
from fulgurite.fuser.ir.index import Index
from fulgurite.trace.node_meta import fake_value


def lower_im2col(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> TensorValue:
    image = ctx.get_value(source)
    windows = _windows(image.sizes[-2:], kernel_size, stride, padding, dilation)
    counts = [w.count for w in windows]

    def element_at(axes: Axes) -> Expression:
        *batch, column, window = axis_indices(axes)
        channel, *taps = _unflatten(column, [None, *map(Index, counts)])
        positions = _unflatten(window, [w.result for w in windows])
        at = [
            o * w.stride - w.padding + tap * w.dilation
            for w, o, tap in zip(windows, positions, taps, strict=True)
        ]
        checks = tuple(BoundsCheck(i, w.source) for i, w in zip(at, windows, strict=True))
        element = image.load_at([*batch, channel, *at])
        return make_masked(checks, element, constant_like(0, element))

    return ctx.add_result(node, element_at)


def lower_col2im(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    output_size: Sequence[Any],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> TensorValue:
    columns, fake = ctx.get_value(source), fake_value(node)
    windows = _windows(sizes_of(fake)[-2:], kernel_size, stride, padding, dilation)
    *batch, rows, _ = columns.sizes
    folded = reshape_value(columns, (*batch, rows, *(w.result for w in windows)))
    counts = [w.count for w in windows]
    dtype = opmath_dtype(fake.dtype)

    def element_at(axes: Axes, at: list[Index], taps: list[Index]) -> Expression:
        *outer, channel = at[:-2]
        row = (channel * counts[0] + taps[0]) * counts[1] + taps[1]
        return convert_dtype(folded.load_at([*outer, row, *at[-2:]]), dtype)

    taps = [_reader_taps(w) for w in windows]
    return lower_taps(ctx, node, folded, taps, TapReduction("sum", element_at=element_at))


def _reader_taps(w: Windows) -> AxisTaps:
    """For position i and tap k the window o with o * stride = i + padding - k * dilation."""

    def numerator(at: Index, tap: Index) -> Index:
        return at + w.padding - tap * w.dilation

    def used(at: Index, tap: Index) -> Expression:
        inside = is_between(numerator(at, tap), 0, (w.result - 1) * w.stride + 1)
        if w.stride == 1:
            return inside
        rest = apply("remainder", integer(numerator(at, tap)), integer(w.stride))
        return apply("and", inside, apply("eq", rest, integer(0)))

    def position(at: Index, tap: Index) -> Expression:
        quotient = indices.floordiv(numerator(at, tap), Index(w.stride))
        return clamp_position(integer(quotient), w.result)

    return AxisTaps(w.count, position, is_used=used)


def _windows(
    image: Sequence[Index],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Windows]:
    """The windows of both dimensions. Their number follows from the size of the image."""
    windows = make_windows(2, image, image, kernel_size, stride, padding, dilation)
    return [
        Windows(
            w.source,
            indices.floordiv(w.source + 2 * w.padding - w.span, Index(w.stride)) + 1,
            w.count,
            w.stride,
            w.padding,
            w.dilation,
        )
        for w in windows
    ]


def _unflatten(number: Index, sizes: Sequence[Index | None]) -> list[Index]:
    """A row-major number as one index a dimension; the first may have any size."""
    found: list[Index] = []
    for size in reversed(sizes[1:]):
        assert size is not None, "only the first size may be unknown"
        found.append(indices.modulo(number, size))
        number = indices.floordiv(number, size)
    return [number, *reversed(found)]


UNFOLD_LOWERINGS: dict[str, Callable[..., Any]] = {"im2col": lower_im2col, "col2im": lower_col2im}
