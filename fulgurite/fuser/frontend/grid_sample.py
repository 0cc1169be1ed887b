"""Lowering of `F.grid_sample` of images (2-D), forward. Same calling convention as `views.py`.

    real position   align_corners: (g + 1) / 2 * (n - 1)          otherwise ((g + 1) * n - 1) / 2
    padding         zeros: outside counts as 0     border: clamped     reflection: mirrored, then clamped
    bilinear        the four neighbours of the real position; nearest: the one it rounds to (half to even)

Real positions are statements of their own: all channels share them. A NaN in the grid reads
position 0; with zeros the result is NaN on a CPU and 0 on a GPU, as in eager. torch runs the
bicubic mode, 3-D images, narrow dtypes and the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.axis_taps import integer, make_position, to_float
from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype
from fulgurite.fuser.frontend.pooling_windows import sizes_of
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import add, apply, constant_like, div, mul, sub, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Expression, Operation
from fulgurite.fuser.ir.index import Index
from fulgurite.trace.node_meta import fake_value

BILINEAR, NEAREST = 0, 1
ZEROS, BORDER, REFLECTION = 0, 1, 2


def lower_grid_sampler_2d(
    ctx: LoweringContext,
    node: Node,
    input: Any,
    grid: Any,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> TensorValue:
    image, points, fake = ctx.get_value(input), ctx.get_value(grid), fake_value(node)
    if interpolation_mode not in (BILINEAR, NEAREST):
        raise Unsupported("grid_sample with bicubic interpolation")
    if fake.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"grid_sample of {fake.dtype}")
    height, width = image.sizes[-2:]
    batch, _, rows, columns = sizes_of(fake)
    axes = indices.make_axes((batch, rows, columns))

    def add_positions(name: str, component: int, size: Index) -> TensorValue:
        coordinate = points.load_at([*axis_indices(axes), Index(component)])
        real = _pad(
            _unnormalize(coordinate, size, align_corners), size, padding_mode, align_corners
        )
        return ctx.add_statement(f"{node.name}_{name}", fake.dtype, axes, real)

    real = (add_positions("y", 1, height), height), (add_positions("x", 0, width), width)

    def value_at(result: Axes) -> Expression:
        n, c, oy, ox = axis_indices(result)
        y, x = ((position.load_at([n, oy, ox]), size) for position, size in real)

        def element(y: Expression, x: Expression, weight: Expression | None) -> Expression:
            """A neighbour, 0 outside of the image."""
            inside = apply("and", _is_inside(y, height), _is_inside(x, width))
            at = [_to_position(part, size) for part, size in ((y, height), (x, width))]
            value = convert_dtype(image.load_at([n, c, *at]), fake.dtype)
            zero = constant_like(0, value)
            if weight is None:
                return where(inside, value, zero)
            if ctx.uses_atomics:  # eager's GPU kernel leaves out what is outside
                return where(inside, mul(value, weight), zero)
            return mul(where(inside, value, zero), weight)

        if interpolation_mode == NEAREST:
            return element(apply("round", y[0]), apply("round", x[0]), None)
        total: Expression | None = None
        for top, weight_y in _neighbours(y[0]):
            for left, weight_x in _neighbours(x[0]):
                part = element(top, left, mul(weight_x, weight_y))
                total = part if total is None else add(total, part)
        assert total is not None, "four neighbours"
        return total

    return ctx.add_result(node, value_at)


def _neighbours(real: Expression) -> list[tuple[Expression, Expression]]:
    """The positions before and after a real one, as floats, with their weights."""
    before = apply("floor", real)
    after = add(before, constant_like(1, before))
    return [(before, sub(after, real)), (after, sub(real, before))]


def _is_inside(position: Expression, size: Index) -> Expression:
    """Whether a whole number, as a float, is a position of the image; not if it is NaN."""
    above = apply("ge", position, constant_like(0, position))
    return apply("and", above, apply("lt", position, to_float(size, position.dtype)))


def _to_position(position: Expression, size: Index) -> Index:
    """The index of a whole number that may be outside of the image: then 0."""
    known = where(_is_inside(position, size), position, constant_like(0, position))
    number = Operation("cast", (known,), torch.int64)
    return make_position(number, size)


def _unnormalize(coordinate: Expression, size: Index, align_corners: bool) -> Expression:
    one, two = constant_like(1, coordinate), constant_like(2, coordinate)
    shifted = add(coordinate, one)
    if align_corners:
        return mul(div(shifted, two), convert_dtype(integer(size - 1), coordinate.dtype))
    return div(sub(mul(shifted, to_float(size, coordinate.dtype)), one), two)


def _pad(real: Expression, size: Index, mode: int, align_corners: bool) -> Expression:
    if mode == REFLECTION:
        real = _reflect(real, size, align_corners)
    return real if mode == ZEROS else _clamp(real, size)


def _clamp(real: Expression, size: Index) -> Expression:
    """Between 0 and size - 1; 0 if it is NaN."""
    zero = constant_like(0, real)
    positive = where(apply("gt", real, zero), real, zero)
    return apply("minimum", positive, to_float(size - 1, real.dtype))


def _reflect(real: Expression, size: Index, align_corners: bool) -> Expression:
    """Mirrored at the centres (`align_corners`) or the borders of the first and last position."""
    zero = constant_like(0, real)
    if align_corners and size == 1:
        return zero
    low = zero if align_corners else constant_like(-0.5, real)
    span = to_float(size - 1 if align_corners else size, real.dtype)
    distance = apply("abs", sub(real, low))
    flips = apply("floor", div(distance, span))
    rest = apply("fmod", distance, span)
    is_even = apply("eq", apply("fmod", flips, constant_like(2, flips)), zero)
    reflected = where(is_even, add(rest, low), add(sub(span, rest), low))
    if not align_corners or size.is_constant:
        return reflected
    return where(apply("eq", span, zero), zero, reflected)


def lower_cudnn_grid_sampler(
    ctx: LoweringContext, node: Node, input: Any, grid: Any
) -> TensorValue:
    """What torch calls on a GPU for bilinear sampling, zeros outside and aligned corners."""
    return lower_grid_sampler_2d(ctx, node, input, grid, BILINEAR, ZEROS, True)


GRID_SAMPLE_LOWERINGS: dict[str, Callable[..., Any]] = {
    "grid_sampler_2d": lower_grid_sampler_2d,
    "cudnn_grid_sampler": lower_cudnn_grid_sampler,
}
