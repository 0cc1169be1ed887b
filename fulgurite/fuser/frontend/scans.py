"""ATen's cumulative ops as scans. Same calling convention as `view_rules`.

The place of a running maximum is a second scan: the last position up to here at which the element is the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import where
from fulgurite.fuser.frontend.tensor_value import (
    Axes,
    Value,
    cast_to,
    dimension,
    fresh_axes,
    from_size,
    from_stride,
    positions,
)
from fulgurite.fuser.ir.expression import Constant, Expression, Operation, Position, value_type
from fulgurite.fuser.ir.statement import Scan


def scanned(
    reader: Reader,
    name: str,
    fake: torch.Tensor,
    dim: int,
    kind: str,
    body: Callable[[Axes], Expression],
) -> Value:
    """The statement name[axes] = kind up to here along dim of body, laid out as `fake`."""
    axes = fresh_axes([from_size(size) for size in fake.shape])
    strides = tuple(from_stride(stride) for stride in fake.stride())
    scan = Scan(kind, axes[dimension(dim, len(axes))]) if axes else None
    return reader.store(name, fake.dtype, axes, body(axes), strides=strides, scan=scan)


def _cumulative(kind: str) -> Callable[..., Value]:
    def rule(reader: Reader, node: Node, source: Any, dim: int, dtype: Any = None) -> Value:
        value, fake = reader.value(source), node.meta["val"]
        wide = value_type(fake.dtype)

        def body(axes: Axes) -> Expression:
            return cast_to(wide)(value.broadcast(axes), axes)

        return scanned(reader, node.name, fake, dim, kind, body)

    return rule


def _extreme(kind: str) -> Callable[..., tuple[Value, Value]]:
    def rule(reader: Reader, node: Node, source: Any, dim: int) -> tuple[Value, Value]:
        value = reader.value(source)
        values, places = node.meta["val"]
        best = scanned(reader, f"{node.name}_values", values, dim, kind, value.broadcast)

        def place(axes: Axes) -> Expression:
            if not axes:
                return Constant(0, torch.int64)
            element, so_far = value.broadcast(axes), best.broadcast(axes)
            hit: Expression = Operation("eq", (element, so_far), torch.bool)
            if element.dtype.is_floating_point:
                missing = Operation("ne", (element, element), torch.bool)
                hit = Operation("or", (hit, missing), torch.bool)
            here = Position(positions(axes)[dimension(dim, len(axes))], torch.int64)
            return where(hit, here, Constant(0, torch.int64))

        return best, scanned(reader, f"{node.name}_indices", places, dim, "max", place)

    return rule


RULES: dict[str, Callable[..., Any]] = {
    "cumsum": _cumulative("sum"),
    "cumprod": _cumulative("prod"),
    "logcumsumexp": _cumulative("logsumexp"),
    "cummax": _extreme("max"),
    "cummin": _extreme("min"),
}
