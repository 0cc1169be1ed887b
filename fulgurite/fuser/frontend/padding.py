"""Lowerings of reflecting and replicating pads and their gradients. Same calling convention as `views.py`.

    reflection    result[o] = source[n - 1 - |n - 1 - |o - left||]
    replication   result[o] = source[clamp(o - left, 0, n - 1)]

A gradient gathers. With reflection an input position is read by itself and by at most two mirror images;
with replication the first and the last position are read by the whole pad. A constant pad is in
`data_movement.py`; a circular pad is made of slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.axis_taps import (
    IDENTITY,
    AxisTaps,
    clamp_position,
    integer,
    is_between,
    lower_taps,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.symbolic_sizes import size_to_index
from fulgurite.fuser.frontend.tensor_value import TensorValue
from fulgurite.fuser.ir.build_expression import add, apply, sub, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import BoundsCheck, Constant, Expression
from fulgurite.fuser.ir.index import Index
from fulgurite.trace.node_meta import fake_value

Pad = tuple[Index, Index]  # before and after a dimension
MakeTaps = Callable[[Index, Index, Pad], AxisTaps]  # of source size, result size and pad


def _read_pads(ctx: LoweringContext, padding: Sequence[Any]) -> list[Pad]:
    """The pads of the last dimensions, in the order of the dimensions."""
    numbers = ctx.to_indices(padding)
    return [(numbers[k], numbers[k + 1]) for k in reversed(range(0, len(numbers), 2))]


def _has_pad(pad: Pad) -> bool:
    return not (pad[0] == 0 and pad[1] == 0)


# ---- reflection ----------------------------------------------------------------------------------


def reflect(source: Index, result: Index, pad: Pad) -> AxisTaps:
    def position(at: Index, tap: Index) -> Expression:
        last = integer(source - 1)
        return sub(last, apply("abs", sub(last, apply("abs", integer(at - pad[0])))))

    return AxisTaps(1, position, interior=lambda at: _own_position(at - pad[0], source))


def _own_position(position: Index, size: Index) -> tuple[BoundsCheck, Index]:
    """The interior of a padded dimension: its positions inside the source."""
    return BoundsCheck(position, size), position


def reflect_gradient(source: Index, result: Index, pad: Pad) -> AxisTaps:
    """The taps of input position i: its own result, and its images in the left and right pad."""
    images: list[tuple[Callable[[Index], Index], Callable[[Index], Expression] | None]] = []
    is_cropped = any(not p.is_constant or p.constant < 0 for p in pad)

    def own(at: Index) -> Index:
        return at + pad[0]

    images.append((own, (lambda at: is_between(own(at), 0, result)) if is_cropped else None))
    if not (pad[0].is_constant and pad[0].constant <= 0):
        images.append((lambda at: pad[0] - at, lambda at: is_between(at, 1, pad[0] + 1)))
    if not (pad[1].is_constant and pad[1].constant <= 0):
        images.append(
            (
                lambda at: source * 2 - 2 - at + pad[0],
                lambda at: is_between(at, source - 1 - pad[1], source - 1),
            )
        )

    def position(at: Index, tap: Index) -> Index | Expression:
        image, test = images[tap.constant]
        return image(at) if test is None else clamp_position(integer(image(at)), result)

    def used(at: Index, tap: Index) -> Expression:
        test = images[tap.constant][1]
        return Constant(True, torch.bool) if test is None else test(at)

    def interior(at: Index) -> tuple[BoundsCheck, Index]:
        """Positions without an image: left < i < n - 1 - right."""
        left, right = pad
        return BoundsCheck(at - left - 1, source - left - right - 2), at + left

    return AxisTaps(len(images), position, is_used=used, interior=None if is_cropped else interior)


# ---- replication ---------------------------------------------------------------------------------


def replicate(source: Index, result: Index, pad: Pad) -> AxisTaps:
    return AxisTaps(
        1,
        lambda at, tap: clamp_position(integer(at - pad[0]), source),
        interior=lambda at: _own_position(at - pad[0], source),
    )


def replicate_gradient(source: Index, result: Index, pad: Pad) -> AxisTaps:
    """The taps of input position i: a window as long as the longer pad and itself."""
    if not (pad[0].is_constant and pad[1].is_constant):
        raise Unsupported("the gradient of a replication pad of dynamic length")
    left, right = max(pad[0].constant, 0), max(pad[1].constant, 0)
    if result.is_constant:
        count = result.constant if source == 1 else min(max(left, right) + 1, result.constant)
    elif min(pad[0].constant, pad[1].constant) >= 0:
        count = left + right + 1  # the source may have one element
    else:
        raise Unsupported("the gradient of a pad that crops a dynamic size")

    def start(at: Index) -> Expression:
        is_first = apply("eq", integer(at), integer(0))
        first = where(is_first, integer(0), integer(at + pad[0]))
        return clamp_position(first, result - count + 1)

    def used(at: Index, tap: Index) -> Expression:
        reader = add(start(at), integer(tap))
        read = clamp_position(sub(reader, integer(pad[0])), source)
        return apply("eq", read, integer(at))

    is_cropped = min(pad[0].constant, pad[1].constant) < 0
    return AxisTaps(
        count,
        lambda at, tap: add(start(at), integer(tap)),
        is_used=used,
        interior=None if is_cropped else lambda at: (BoundsCheck(at - 1, source - 2), at + pad[0]),
    )


# ---- lowerings -----------------------------------------------------------------------------------


def make_pad_lowering(make_taps: MakeTaps) -> Callable[..., TensorValue]:
    def lower(ctx: LoweringContext, node: Node, source: Any, padding: Sequence[Any]) -> TensorValue:
        value = ctx.get_value(source)
        pads = _read_pads(ctx, padding)
        result = [size_to_index(size) for size in fake_value(node).shape][-len(pads) :]
        sizes = value.sizes[-len(pads) :]
        taps = [
            make_taps(s, r, pad) if _has_pad(pad) else IDENTITY
            for s, r, pad in zip(sizes, result, pads, strict=True)
        ]
        return lower_taps(ctx, node, value, taps)

    return lower


def make_pad_gradient_lowering(make_taps: MakeTaps) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext, node: Node, grad_output: Any, padding: Sequence[Any], **_: Any
    ) -> TensorValue:
        grad = ctx.get_value(grad_output)
        pads = _read_pads(ctx, padding)
        sizes = [size_to_index(size) for size in fake_value(node).shape][-len(pads) :]
        result = grad.sizes[-len(pads) :]
        taps = [
            make_taps(s, r, pad) if _has_pad(pad) else IDENTITY
            for s, r, pad in zip(sizes, result, pads, strict=True)
        ]
        return lower_taps(ctx, node, grad, taps)

    return lower


PADDING_LOWERINGS: dict[str, Callable[..., Any]] = {
    f"{name}{rank}d{suffix}": make(taps)
    for rank in (1, 2, 3)
    for name, suffix, make, taps in (
        ("reflection_pad", "", make_pad_lowering, reflect),
        ("reflection_pad", "_backward", make_pad_gradient_lowering, reflect_gradient),
        ("replication_pad", "", make_pad_lowering, replicate),
        ("replication_pad", "_backward", make_pad_gradient_lowering, replicate_gradient),
    )
}
