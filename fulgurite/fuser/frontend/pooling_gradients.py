"""Lowerings of the gradients of pooling. Same calling convention as `views.py`.

A gradient gathers: an input position sums the results whose windows contain it. The gradient of a
maximum takes those whose saved index is this position.

On CPUs the gradient of a maximum of planes (NCHW) is an indexed sum instead: each result adds to the
position that it came from. It reads every index once, and threads split the planes, so the result does
not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.axis_taps import (
    AxisTaps,
    TapLowering,
    TapReduction,
    ValueOf,
    integer,
    lower_taps,
)
from fulgurite.fuser.frontend.indexed_store import (
    IndexedStore,
    add_indexed_store,
    make_index,
    node_layout,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype, make_constant
from fulgurite.fuser.frontend.pooling_windows import (
    AdaptiveWindows,
    Windows,
    check_float,
    make_adaptive_windows,
    make_windows,
    sizes_of,
    window_size,
)
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import add, apply, constant_like, div, mul, sub, where
from fulgurite.fuser.ir.expression import Constant, Expression, opmath_dtype
from fulgurite.fuser.ir.index import Index
from fulgurite.trace.node_meta import fake_value

# ---- averages ------------------------------------------------------------------------------------


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
        check_float(fake)
        windows = make_windows(rank, sizes_of(fake), grad.sizes, kernel_size, stride, padding)
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


def make_adaptive_average_gradient_lowering(rank: int) -> Callable[..., TensorValue]:
    def lower(ctx: LoweringContext, node: Node, grad_output: Any, source: Any) -> TensorValue:
        fake, grad = fake_value(node), ctx.get_value(grad_output)
        check_float(fake)
        windows = make_adaptive_windows(rank, sizes_of(fake), grad.sizes)
        dtype = opmath_dtype(fake.dtype)

        def share(w: AdaptiveWindows) -> Callable[[Expression], Expression]:
            one = Constant(1.0, dtype)
            return lambda reader: div(one, convert_dtype(w.size(reader), dtype))

        return lower_taps(ctx, node, grad, [w.reader_taps(share(w)) for w in windows])

    return lower


# ---- maxima --------------------------------------------------------------------------------------


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
        sizes = sizes_of(fake_value(node))
        windows = make_windows(rank, sizes, grad.sizes, kernel_size, stride, padding, dilation)
        taps = [w.reader_taps(None) for w in windows]
        return lower_selected_gradient(ctx, node, grad, ctx.get_value(indices), taps)

    return lower


def make_adaptive_maximum_gradient_lowering(rank: int) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext, node: Node, grad_output: Any, source: Any, indices: Any
    ) -> TensorValue:
        grad = ctx.get_value(grad_output)
        windows = make_adaptive_windows(rank, sizes_of(fake_value(node)), grad.sizes)
        taps = [w.reader_taps(None) for w in windows]
        return lower_selected_gradient(ctx, node, grad, ctx.get_value(indices), taps)

    return lower


def is_scattered(ctx: LoweringContext, node: Node) -> bool:
    """Whether an indexed sum is the faster form: of planes, on a CPU, without rounding each sum."""
    fake = fake_value(node)
    is_plane = fake.dim() < 3 or fake.stride(-1) == 1
    return not ctx.uses_atomics and is_plane and fake.dtype in (torch.float32, torch.float64)


def scatter_gradient(
    ctx: LoweringContext,
    node: Node,
    grad: TensorValue,
    rank: int,
    position_at: Callable[[Axes], list[Expression]],
) -> TensorValue:
    """Adds each result's gradient at the position of its plane that it came from."""
    layout = node_layout(node, fake_value(node))

    def index_at(axes: Axes) -> Sequence[Index]:
        places = zip(position_at(axes), layout.sizes[-rank:], strict=True)
        return [
            *axis_indices(axes)[: len(axes) - rank],
            *(make_index(place, size) for place, size in places),
        ]

    def value_at(axes: Axes) -> Expression:
        return convert_dtype(grad.load_at(axis_indices(axes)), layout.dtype)

    store = IndexedStore("sum", grad.sizes, index_at, value_at)
    return add_indexed_store(ctx, layout, lambda _: make_constant(0, layout.dtype), store)


def _unflatten(number: Expression, sizes: Sequence[Index]) -> list[Expression]:
    """A position of a flattened plane as one number a dimension."""
    found: list[Expression] = []
    for size in reversed(sizes[1:]):
        found.append(apply("remainder", number, integer(size)))
        number = apply("floor_divide", number, integer(size))
    return [number, *reversed(found)]


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
    if is_scattered(ctx, node):
        width = sizes_of(fake_value(node))[-rank:]
        return scatter_gradient(ctx, node, grad, rank, lambda axes: _unflatten(
            convert_dtype(positions.load_at(axis_indices(axes)), torch.int64), width
        ))  # fmt: skip

    def element_at(axes: Axes, at: list[Index], taps: list[Index]) -> Expression:
        here = indices.ZERO
        for axis, index in zip(axes[-rank:], axis_indices(axes)[-rank:], strict=True):
            here = here * axis.size + index
        is_here = apply("eq", convert_dtype(positions.load_at(at), torch.int64), integer(here))
        value = convert_dtype(grad.load_at(at), dtype)
        return where(is_here, value, constant_like(0, value))

    return lower_taps(ctx, node, grad, taps, TapReduction("sum", element_at=element_at))


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
    sizes = sizes_of(fake_value(node))
    windows = make_windows(2, sizes, value.sizes, kernel, stride, padding, dilation)
    if is_scattered(ctx, node):
        return scatter_gradient(
            ctx, node, value, 2, lambda axes: _places_in_image(numbers, windows, kernel, axes)
        )
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


def _places_in_image(
    numbers: TensorValue, windows: list[Windows], kernel: list[int], axes: Axes
) -> list[Expression]:
    """The position in the image that an offset inside a window stands for."""
    at = axis_indices(axes)
    offset = convert_dtype(numbers.load_at(at), torch.int64)
    parts = (
        apply("floor_divide", offset, integer(kernel[1])),
        apply("remainder", offset, integer(kernel[1])),
    )
    return [
        add(w.start(integer(i)), mul(part, integer(w.dilation)))
        for w, i, part in zip(windows, at[-2:], parts, strict=True)
    ]


POOLING_GRADIENT_LOWERINGS: dict[str, Callable[..., Any]] = {
    name.format(rank): make(rank)
    for rank in (2, 3)
    for name, make in (
        ("avg_pool{}d_backward", make_average_gradient_lowering),
        ("max_pool{}d_with_indices_backward", make_maximum_gradient_lowering),
        ("_adaptive_avg_pool{}d_backward", make_adaptive_average_gradient_lowering),
        ("adaptive_max_pool{}d_backward", make_adaptive_maximum_gradient_lowering),
    )
}
# custom operators of `transforms/max_pool.py`
POOLING_GRADIENT_OPERATORS: dict[str, Callable[..., Any]] = {
    "max_pool2d_offsets_backward": lower_offsets_gradient,
}
