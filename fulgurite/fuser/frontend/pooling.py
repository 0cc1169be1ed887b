"""Lowerings of pooling and its gradients. Same calling convention as `views.py`.

    result[o] = sum or maximum over k of  source[o * stride - padding + k * dilation]

A gradient gathers: an input position sums the results whose windows contain it. The gradient of a
maximum takes those whose saved index is this position. Adaptive pooling has windows from
floor(o * n / m) to ceil((o + 1) * n / m), with n input and m result positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.axis_taps import (
    AxisTaps,
    TapLowering,
    TapReduction,
    ValueOf,
    clamp_position,
    integer,
    lower_taps,
    to_float,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype
from fulgurite.fuser.frontend.symbolic_sizes import size_to_index
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import add, apply, constant_like, div, mul, sub, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression, opmath_dtype
from fulgurite.fuser.ir.index import Index
from fulgurite.trace.node_meta import fake_value


@dataclass(frozen=True)
class Windows:
    """The windows of one dimension: o reads `start(o) + k * dilation` for k below `count`."""

    source: Index  # sizes
    result: Index
    count: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        return (self.count - 1) * self.dilation + 1

    def start(self, at: Expression) -> Expression:
        first = mul(at, integer(self.stride)) if self.stride != 1 else at
        return sub(first, integer(self.padding)) if self.padding else first

    def is_inside(self) -> bool:
        """Whether all windows are certainly inside the source."""
        if self.padding or not (self.source.is_constant and self.result.is_constant):
            return False
        return (self.result.constant - 1) * self.stride + self.span <= self.source.constant

    def taps(self) -> AxisTaps:
        """The positions that a window reads."""

        def place(at: Index, tap: Index) -> Index:
            return at * self.stride + tap * self.dilation - self.padding

        if self.is_inside():
            return AxisTaps(self.count, place)
        return AxisTaps(
            self.count,
            lambda at, tap: clamp_position(integer(place(at, tap)), self.source),
            is_used=lambda at, tap: _in_range(integer(place(at, tap)), self.source),
        )

    # the windows that contain a position

    @property
    def num_readers(self) -> int:
        """The most windows that contain one position."""
        most = -(-self.span // self.stride)
        return min(most, self.result.constant) if self.result.is_constant else most

    def reader(self, at: Index, tap: Index) -> Expression:
        """The tap-th window that may contain a position; any one if there are fewer."""
        first = indices.floordiv(at + (self.padding - self.span), Index(self.stride)) + 1
        if self.result.is_constant:
            begin = clamp_position(integer(first), self.result - self.num_readers + 1)
            return add(begin, integer(tap))
        return integer(first + tap)

    def reader_taps(self, weight: Callable[[Expression], Expression] | None) -> AxisTaps:
        """The windows that contain a position, each with the `weight` of the window."""

        def used(at: Index, tap: Index) -> Expression:
            reader = self.reader(at, tap)
            offset = sub(integer(at), self.start(reader))
            is_inside = apply("and", _in_range(offset, Index(self.span)), _is_valid(self, reader))
            if self.dilation == 1:
                return is_inside
            rest = apply("remainder", offset, integer(self.dilation))
            return apply("and", is_inside, apply("eq", rest, integer(0)))

        return AxisTaps(
            max(self.num_readers, 1),
            lambda at, tap: clamp_position(self.reader(at, tap), self.result),
            None if weight is None else lambda at, tap: weight(self.reader(at, tap)),
            used,
        )


def _in_range(value: Expression, size: Index) -> Expression:
    above = apply("ge", value, integer(0))
    return apply("and", above, apply("lt", value, integer(size)))


def _is_valid(windows: Windows, reader: Expression) -> Expression:
    if windows.result.is_constant:
        return Constant(True, torch.bool)
    return _in_range(reader, windows.result)


# ---- arguments -----------------------------------------------------------------------------------


def _repeat(argument: Sequence[int] | int | None, rank: int, default: Sequence[int]) -> list[int]:
    """An argument for each dimension. One number is for all of them; none is the default."""
    numbers = [argument] if isinstance(argument, int) else list(argument or default)
    if any(not isinstance(n, int) for n in numbers):
        raise Unsupported("pooling with symbolic windows")
    return numbers * rank if len(numbers) == 1 else numbers


def _make_windows(
    rank: int,
    source: Sequence[Index],
    result: Sequence[Index],
    kernel_size: Sequence[int],
    stride: Sequence[int] | None,
    padding: Sequence[int] | int,
    dilation: Sequence[int] | int = 1,
) -> list[Windows]:
    kernel = _repeat(kernel_size, rank, ())
    return [
        Windows(*each)
        for each in zip(
            source[-rank:],
            result[-rank:],
            kernel,
            _repeat(stride, rank, kernel),
            _repeat(padding, rank, (0,)),
            _repeat(dilation, rank, (1,)),
            strict=True,
        )
    ]


def _sizes(fake: torch.Tensor) -> list[Index]:
    return [size_to_index(size) for size in fake.shape]


def _check_float(fake: torch.Tensor) -> None:
    if not fake.dtype.is_floating_point or fake.dtype.itemsize == 1:
        raise Unsupported(f"pooling of {fake.dtype}")


# ---- averages ------------------------------------------------------------------------------------


def window_size(
    windows: Windows, at: Expression, include_pad: bool, dtype: torch.dtype
) -> Expression:
    """The number of positions that torch divides by, along one dimension."""
    if windows.is_inside():
        return Constant(float(windows.count), dtype)
    start = windows.start(at)
    end = add(start, integer(windows.count))
    last = windows.source + windows.padding if include_pad else windows.source
    end = apply("minimum", end, integer(last))
    first = start if include_pad else apply("maximum", start, integer(0))
    return convert_dtype(sub(end, first), dtype)


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
        _check_float(fake)
        windows = _make_windows(rank, value.sizes, _sizes(fake), kernel_size, stride, padding)
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


def make_average_gradient_lowering(rank: int) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext,
        node: Node,
        grad_output: Any,
        source: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] | None,
        padding: Sequence[int] | int,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> TensorValue:
        fake, grad = fake_value(node), ctx.get_value(grad_output)
        _check_float(fake)
        windows = _make_windows(rank, _sizes(fake), grad.sizes, kernel_size, stride, padding)
        dtype = opmath_dtype(fake.dtype)

        def share(w: Windows, is_first: bool) -> Callable[[Expression], Expression] | None:
            def weight(reader: Expression) -> Expression:
                one = Constant(1.0, dtype)
                if divisor_override is not None:
                    return Constant(1.0 / divisor_override, dtype) if is_first else one
                size = window_size(w, reader, count_include_pad, dtype)
                if isinstance(size, Constant):
                    return Constant(1.0 / size.value, dtype)
                return div(one, size)

            return weight

        taps = [w.reader_taps(share(w, k == 0)) for k, w in enumerate(windows)]
        return lower_taps(ctx, node, grad, taps)

    return lower


# ---- maxima --------------------------------------------------------------------------------------


NumberAt = Callable[[list[Index], list[Index]], Expression]  # of a source index and tap numbers


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


_NOWHERE = -(1 << 62)  # less than any negated index


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
        result = _sizes(fake_value(node)[0])
        windows = _make_windows(rank, value.sizes, result, kernel_size, stride, padding, dilation)
        taps = [w.taps() for w in windows]
        return lower_maximum(ctx, node, value, taps, number_in_image(value, rank))

    return lower


def make_maximum_gradient_lowering(rank: int) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext,
        node: Node,
        grad_output: Any,
        source: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] | None,
        padding: Sequence[int] | int,
        dilation: Sequence[int] | int,
        ceil_mode: bool,
        indices: Any,
    ) -> TensorValue:
        grad = ctx.get_value(grad_output)
        sizes = _sizes(fake_value(node))
        windows = _make_windows(rank, sizes, grad.sizes, kernel_size, stride, padding, dilation)
        taps = [w.reader_taps(None) for w in windows]
        return lower_selected_gradient(ctx, node, grad, ctx.get_value(indices), taps)

    return lower


def lower_selected_gradient(
    ctx: LoweringContext,
    node: Node,
    grad: TensorValue,
    positions: TensorValue,
    taps: list[AxisTaps],
) -> TensorValue:
    """Sums the gradients of the windows whose saved index is this position."""
    dtype = opmath_dtype(grad.dtype)
    rank = len(taps)

    def element_at(axes: Axes, at: list[Index], taps: list[Index]) -> Expression:
        here = indices.ZERO
        for axis, index in zip(axes[-rank:], axis_indices(axes)[-rank:], strict=True):
            here = here * axis.size + index
        is_here = apply("eq", convert_dtype(positions.load_at(at), torch.int64), integer(here))
        value = convert_dtype(grad.load_at(at), dtype)
        return where(is_here, value, constant_like(0, value))

    return lower_taps(ctx, node, grad, taps, TapReduction("sum", element_at=element_at))


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
    result = _sizes(fake_value(node)[0])
    windows = _make_windows(2, value.sizes, result, kernel, stride, padding, dilation)
    return lower_maximum(ctx, node, value, [w.taps() for w in windows], number_in_window(kernel))


def lower_offsets_gradient(
    ctx: LoweringContext,
    node: Node,
    grad: Any,
    offsets: Any,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    **_: Any,
) -> TensorValue:
    """Lowers `fulgurite::max_pool2d_offsets_backward`.

    A window counts if its offset is the place of this position in the window.
    """
    value, numbers = ctx.get_value(grad), ctx.get_value(offsets)
    dtype = opmath_dtype(value.dtype)
    sizes = _sizes(fake_value(node))
    windows = _make_windows(2, sizes, value.sizes, kernel, stride, padding, dilation)
    lowering = TapLowering(ctx, node.name, value, [w.reader_taps(None) for w in windows])

    def place(w: Windows, factor: int) -> ValueOf:
        def place_at(at: Index, tap: Index) -> Expression:
            offset = sub(integer(at), w.start(w.reader(at, tap)))
            if w.dilation != 1:
                offset = apply("floor_divide", offset, integer(w.dilation))
            return convert_dtype(mul(offset, integer(factor)), torch.int32)

        return place_at

    def element_at(axes: Axes, at: list[Index], taps: list[Index]) -> Expression:
        places = [
            lowering.table(
                f"place{d}", place(w, factor), lowering.loops(axes, d, tap), tap, torch.int32
            )
            for d, (w, factor, tap) in enumerate(zip(windows, (kernel[1], 1), taps, strict=True))
        ]
        number = convert_dtype(numbers.load_at(at), torch.int32)
        element = convert_dtype(value.load_at(at), dtype)
        is_here = apply("eq", number, add(places[0], places[1]))
        return where(is_here, element, constant_like(0, element))

    return lowering.lower(TapReduction("sum", element_at=element_at), fake_value(node), node)


# ---- adaptive pooling ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AdaptiveWindows:
    """Windows that cover n input positions with m results."""

    n: int
    m: int

    def start(self, at: Expression) -> Expression:
        return apply("floor_divide", mul(at, integer(self.n)), integer(self.m))

    def end(self, at: Expression) -> Expression:
        covered = mul(add(at, integer(1)), integer(self.n))
        return apply("floor_divide", add(covered, integer(self.m - 1)), integer(self.m))

    def size(self, at: Expression) -> Expression:
        return sub(self.end(at), self.start(at))

    @property
    def count(self) -> int:
        """The length of the longest window."""
        n, m = self.n, self.m
        return max(-(-(o + 1) * n // m) - o * n // m for o in range(min(m, n)))

    @property
    def num_readers(self) -> int:
        """The most windows that contain one position."""
        n, m = self.n, self.m
        return max(-(-(i + 1) * m // n) - i * m // n for i in range(min(m, n)))

    def taps(self) -> AxisTaps:
        if self.n % self.m == 0:
            step = self.n // self.m
            return AxisTaps(step, lambda at, tap: at * step + tap)

        def place(at: Index, tap: Index) -> Expression:
            return add(self.start(integer(at)), integer(tap))

        return AxisTaps(
            self.count,
            lambda at, tap: clamp_position(place(at, tap), Index(self.n)),
            is_used=lambda at, tap: apply("lt", integer(tap), self.size(integer(at))),
        )

    def reader(self, at: Index, tap: Index) -> Expression:
        first = indices.floordiv(at * self.m, Index(self.n))
        return integer(first + tap)

    def reader_taps(self, weight: Callable[[Expression], Expression] | None) -> AxisTaps:
        def used(at: Index, tap: Index) -> Expression:
            reader = self.reader(at, tap)
            is_window = apply("lt", reader, integer(self.m))
            begins = apply("le", self.start(reader), integer(at))
            return apply("and", is_window, begins)

        return AxisTaps(
            self.num_readers,
            lambda at, tap: clamp_position(self.reader(at, tap), Index(self.m)),
            None if weight is None else lambda at, tap: weight(self.reader(at, tap)),
            used,
        )


def _make_adaptive(
    rank: int, source: Sequence[Index], result: Sequence[Index]
) -> list[AdaptiveWindows]:
    sizes = [*source[-rank:], *result[-rank:]]
    if not all(size.is_constant and size.constant > 0 for size in sizes):
        raise Unsupported("adaptive pooling with dynamic or empty image sizes")
    return [
        AdaptiveWindows(s.constant, r.constant)
        for s, r in zip(source[-rank:], result[-rank:], strict=True)
    ]


def make_adaptive_average_lowering(rank: int) -> Callable[..., TensorValue]:
    def lower(ctx: LoweringContext, node: Node, source: Any, output_size: Any) -> TensorValue:
        fake, value = fake_value(node), ctx.get_value(source)
        _check_float(fake)
        windows = _make_adaptive(rank, value.sizes, _sizes(fake))
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


def make_adaptive_average_gradient_lowering(rank: int) -> Callable[..., TensorValue]:
    def lower(ctx: LoweringContext, node: Node, grad_output: Any, source: Any) -> TensorValue:
        fake, grad = fake_value(node), ctx.get_value(grad_output)
        _check_float(fake)
        windows = _make_adaptive(rank, _sizes(fake), grad.sizes)
        dtype = opmath_dtype(fake.dtype)

        def share(w: AdaptiveWindows) -> Callable[[Expression], Expression]:
            one = Constant(1.0, dtype)
            return lambda reader: div(one, convert_dtype(w.size(reader), dtype))

        return lower_taps(ctx, node, grad, [w.reader_taps(share(w)) for w in windows])

    return lower


def make_adaptive_maximum_lowering(rank: int) -> Callable[..., Any]:
    def lower(
        ctx: LoweringContext, node: Node, source: Any, output_size: Any
    ) -> tuple[TensorValue, TensorValue]:
        value = ctx.get_value(source)
        windows = _make_adaptive(rank, value.sizes, _sizes(fake_value(node)[0]))
        taps = [w.taps() for w in windows]
        return lower_maximum(ctx, node, value, taps, number_in_image(value, rank))

    return lower


def make_adaptive_maximum_gradient_lowering(rank: int) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext, node: Node, grad_output: Any, source: Any, indices: Any
    ) -> TensorValue:
        grad = ctx.get_value(grad_output)
        windows = _make_adaptive(rank, _sizes(fake_value(node)), grad.sizes)
        taps = [w.reader_taps(None) for w in windows]
        return lower_selected_gradient(ctx, node, grad, ctx.get_value(indices), taps)

    return lower


POOLING_LOWERINGS: dict[str, Callable[..., Any]] = {
    name.format(rank): make(rank)
    for rank in (2, 3)
    for name, make in (
        ("avg_pool{}d", make_average_lowering),
        ("avg_pool{}d_backward", make_average_gradient_lowering),
        ("max_pool{}d_with_indices", make_maximum_lowering),
        ("max_pool{}d_with_indices_backward", make_maximum_gradient_lowering),
        ("_adaptive_avg_pool{}d", make_adaptive_average_lowering),
        ("_adaptive_avg_pool{}d_backward", make_adaptive_average_gradient_lowering),
        ("adaptive_max_pool{}d", make_adaptive_maximum_lowering),
        ("adaptive_max_pool{}d_backward", make_adaptive_maximum_gradient_lowering),
    )
}
# custom operators of `transforms/max_pool.py`
POOLING_OPERATORS: dict[str, Callable[..., Any]] = {
    "max_pool2d_offsets": lower_offsets,
    "max_pool2d_offsets_backward": lower_offsets_gradient,
}
