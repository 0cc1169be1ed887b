"""Lowerings of casts and copies. Same calling convention as `views.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.tensor_value import TensorValue
from fulgurite.fuser.ir.expression import Expression, Operation
from fulgurite.trace.node_meta import fake_value


def round_to(expression: Expression, dtype: torch.dtype) -> Expression:
    """Casts as the program asks for it: a narrow float rounds here, not only when it is stored."""
    return expression if expression.dtype == dtype else Operation("cast", (expression,), dtype)


def lower_cast(
    ctx: LoweringContext, node: Node, source: Any = None, a: Any = None, **_: Any
) -> TensorValue:
    value = ctx.get_value(source if source is not None else a)
    dtype = fake_value(node).dtype
    return ctx.add_result(node, lambda axes: round_to(value.broadcast_to(axes), dtype))


def lower_clone(
    ctx: LoweringContext, node: Node, source: Any = None, a: Any = None, **_: Any
) -> TensorValue:
    value = ctx.get_value(source if source is not None else a)
    return ctx.add_result(node, value.broadcast_to)


def lower_copy(ctx: LoweringContext, node: Node, source: Any, src: Any, **_: Any) -> TensorValue:
    value = ctx.get_value(src)
    dtype = fake_value(node).dtype
    return ctx.add_result(node, lambda axes: round_to(value.broadcast_to(axes), dtype))


COPY_LOWERINGS: dict[str, Callable[..., Any]] = {
    "_to_copy": lower_cast,
    "convert_element_type": lower_cast,
    "clone": lower_clone,
    "contiguous": lower_clone,
    "lift_fresh_copy": lower_clone,
    "copy": lower_copy,
}
