"""Lowerings of ops that create tensors. Same calling convention as `views.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import (
    LoweringContext,
    convert_dtype,
    make_constant,
    round_to_storage,
)
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, constant_like, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import (
    Constant,
    Expression,
    IndexValue,
    Operation,
    opmath_dtype,
)
from fulgurite.fuser.ir.index import Index
from fulgurite.trace.node_meta import fake_value


def lower_zeros(ctx: LoweringContext, node: Node, **_: Any) -> TensorValue:
    return _fill(ctx, node, 0)


def lower_ones(ctx: LoweringContext, node: Node, **_: Any) -> TensorValue:
    return _fill(ctx, node, 1)


def lower_full(
    ctx: LoweringContext,
    node: Node,
    fill_value: Any = None,
    value: Any = None,
    s: Any = None,
    **_: Any,
) -> TensorValue:
    fill = fill_value if fill_value is not None else value if value is not None else s
    return _fill(ctx, node, fill)


def _fill(ctx: LoweringContext, node: Node, fill: Any) -> TensorValue:
    dtype = fake_value(node).dtype
    return ctx.add_result(node, lambda axes: ctx.read_operand(fill, axes, opmath_dtype(dtype)))


def lower_arange(
    ctx: LoweringContext, node: Node, start: Any = 0, end: Any = None, step: Any = 1, **_: Any
) -> TensorValue:
    dtype = fake_value(node).dtype
    if not dtype.is_floating_point:  # torch truncates first: arange(2.1, -2.9, -1.5) is 2, 1, 0, -1
        start, step = (int(x) if isinstance(x, float) else x for x in (start, step))
    if all(isinstance(x, int | torch.SymInt | Node) for x in (start, step)):
        begin, stride = ctx.to_index(start), ctx.to_index(step)

        def integers_at(axes: Axes) -> Expression:
            return IndexValue(indices.from_atom(axes[0]) * stride + begin, torch.int64)

        return ctx.add_result(node, integers_at)
    if not (isinstance(start, int | float) and isinstance(step, int | float)):
        raise Unsupported("arange with symbolic floating-point arguments")

    def floats_at(axes: Axes) -> Expression:
        # torch computes start + step * i in double before it rounds.
        position = IndexValue(indices.from_atom(axes[0]), torch.int64)
        wide = Operation("cast", (position,), torch.float64)
        line = apply("mul", constant_like(step, wide), wide)
        line = apply("add", constant_like(start, wide), line)
        return Operation("cast", (line,), dtype)

    return ctx.add_result(node, floats_at)


def lower_iota(
    ctx: LoweringContext, node: Node, length: Any, start: Any, step: Any, **_: Any
) -> TensorValue:
    return lower_arange(ctx, node, start=start, step=step)


def lower_linspace(
    ctx: LoweringContext, node: Node, start: Any, end: Any, steps: int, **_: Any
) -> TensorValue:
    """`steps` numbers from start to end, counted from the nearer end as torch's kernels do.

    torch computes integers in double.
    """
    dtype = fake_value(node).dtype
    wide = opmath_dtype(dtype) if dtype.is_floating_point else torch.float64

    def number(argument: Any) -> Expression:
        return convert_dtype(round_to_storage(ctx.read_operand(argument, (), dtype), dtype), wide)

    def expression_at(axes: Axes) -> Expression:
        first, last = number(start), number(end)
        if steps <= 1:
            return first
        step = apply("div", apply("sub", last, first), make_constant(steps - 1, wide))
        position = indices.from_atom(axes[0])

        def offset(count: Index) -> Expression:
            return apply("mul", step, convert_dtype(IndexValue(count, torch.int64), wide))

        from_first = apply("add", first, offset(position))
        from_last = apply("sub", last, offset(Index(steps - 1) - position))
        middle = Constant(steps // 2, torch.int64)
        is_first_half = apply("lt", IndexValue(position, torch.int64), middle)
        return where(is_first_half, from_first, from_last)

    return ctx.add_result(node, expression_at)


FACTORY_LOWERINGS: dict[str, Callable[..., Any]] = {
    "empty": lower_zeros,
    "empty_like": lower_zeros,
    "empty_strided": lower_zeros,
    "empty_permuted": lower_zeros,
    "new_empty": lower_zeros,
    "new_empty_strided": lower_zeros,
    "zeros": lower_zeros,
    "ones": lower_ones,
    "zeros_like": lower_zeros,
    "ones_like": lower_ones,
    "new_zeros": lower_zeros,
    "new_ones": lower_ones,
    "full": lower_full,
    "full_like": lower_full,
    "new_full": lower_full,
    "fill": lower_full,
    "scalar_tensor": lower_full,
    "arange": lower_arange,
    "iota": lower_iota,
    "linspace": lower_linspace,
}
