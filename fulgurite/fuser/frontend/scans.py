"""Lowerings of cumulative ops as scans. Same calling convention as `views.py`.

The indices of cummax are a second scan: the last index so far at which the element equals the
maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.symbolic_sizes import sizes_to_indices, strides_to_indices
from fulgurite.fuser.frontend.tensor_value import (
    Axes,
    TensorValue,
    axis_indices,
    canonicalize_dim,
    make_cast,
)
from fulgurite.fuser.ir.build_expression import where
from fulgurite.fuser.ir.expression import Constant, Expression, IndexValue, Operation, opmath_dtype
from fulgurite.fuser.ir.index import make_axes
from fulgurite.fuser.ir.statement import Scan
from fulgurite.trace.node_meta import fake_value


def add_scan(
    ctx: LoweringContext,
    name: str,
    fake: torch.Tensor,
    dim: int,
    kind: str,
    body: Callable[[Axes], Expression],
) -> TensorValue:
    """Adds the statement that scans `body` along `dim`, with the layout of `fake`."""
    axes = make_axes(sizes_to_indices(fake))
    strides = strides_to_indices(fake)
    scan = Scan(kind, axes[canonicalize_dim(dim, len(axes))]) if axes else None
    return ctx.add_statement(name, fake.dtype, axes, body(axes), strides=strides, scan=scan)


def make_cumulative_lowering(kind: str) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext, node: Node, source: Any, dim: int, dtype: Any = None
    ) -> TensorValue:
        value, fake = ctx.get_value(source), fake_value(node)
        wide = opmath_dtype(fake.dtype)

        def body(axes: Axes) -> Expression:
            return make_cast(wide)(value.broadcast_to(axes), axes)

        return add_scan(ctx, node.name, fake, dim, kind, body)

    return lower


def make_cumulative_extremum_lowering(kind: str) -> Callable[..., tuple[TensorValue, TensorValue]]:
    def lower(
        ctx: LoweringContext, node: Node, source: Any, dim: int
    ) -> tuple[TensorValue, TensorValue]:
        value = ctx.get_value(source)
        value_fake, index_fake = fake_value(node)
        extremum = add_scan(ctx, f"{node.name}_values", value_fake, dim, kind, value.broadcast_to)

        def index_at(axes: Axes) -> Expression:
            if not axes:
                return Constant(0, torch.int64)
            element, so_far = value.broadcast_to(axes), extremum.broadcast_to(axes)
            is_match: Expression = Operation("eq", (element, so_far), torch.bool)
            if element.dtype.is_floating_point:
                is_nan = Operation("ne", (element, element), torch.bool)
                is_match = Operation("or", (is_match, is_nan), torch.bool)
            position = IndexValue(axis_indices(axes)[canonicalize_dim(dim, len(axes))], torch.int64)
            return where(is_match, position, Constant(0, torch.int64))

        return extremum, add_scan(ctx, f"{node.name}_indices", index_fake, dim, "max", index_at)

    return lower


SCAN_LOWERINGS: dict[str, Callable[..., Any]] = {
    "cumsum": make_cumulative_lowering("sum"),
    "cumprod": make_cumulative_lowering("prod"),
    "logcumsumexp": make_cumulative_lowering("logsumexp"),
    "cummax": make_cumulative_extremum_lowering("max"),
    "cummin": make_cumulative_extremum_lowering("min"),
}
