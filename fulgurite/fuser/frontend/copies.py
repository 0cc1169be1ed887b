"""ATen ops that become statements of their own: casts, copies and factories here, reductions and
moved elements in their own files. Same calling convention as `view_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend import data_movement, random, reductions, scans, variance
from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import Unsupported, apply, number
from fulgurite.fuser.frontend.tensor_value import Axes, Value
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Operation, Position, value_type

# casts and copies


def rounded(expression: Expression, dtype: torch.dtype) -> Expression:
    """A cast that the program asks for: narrow floats round here, and not only when stored."""
    return expression if expression.dtype == dtype else Operation("cast", (expression,), dtype)


def _cast(reader: Reader, node: Node, source: Any = None, a: Any = None, **_: Any) -> Value:
    value = reader.value(source if source is not None else a)
    dtype = node.meta["val"].dtype
    return reader.result(node, lambda axes: rounded(value.broadcast(axes), dtype))


def _clone(reader: Reader, node: Node, source: Any = None, a: Any = None, **_: Any) -> Value:
    value = reader.value(source if source is not None else a)
    return reader.result(node, value.broadcast)


def _copy(reader: Reader, node: Node, source: Any, src: Any, **_: Any) -> Value:
    value = reader.value(src)
    dtype = node.meta["val"].dtype
    return reader.result(node, lambda axes: rounded(value.broadcast(axes), dtype))


# factories


def _filled(fill: float | int) -> Callable[..., Value]:
    def rule(reader: Reader, node: Node, **_: Any) -> Value:
        return _constant(reader, node, fill)

    return rule


def _full(
    reader: Reader, node: Node, fill_value: Any = None, value: Any = None, s: Any = None, **_: Any
) -> Value:
    fill = fill_value if fill_value is not None else value if value is not None else s
    return _constant(reader, node, fill)


def _constant(reader: Reader, node: Node, fill: Any) -> Value:
    dtype = node.meta["val"].dtype
    return reader.result(node, lambda axes: reader.operand(fill, axes, value_type(dtype)))


def _arange(
    reader: Reader, node: Node, start: Any = 0, end: Any = None, step: Any = 1, **_: Any
) -> Value:
    dtype = node.meta["val"].dtype
    if all(isinstance(x, int | torch.SymInt | Node) for x in (start, step)):
        begin, stride = reader.integer(start), reader.integer(step)

        def whole(axes: Axes) -> Expression:
            return Position(indices.of_atom(axes[0]) * stride + begin, torch.int64)

        return reader.result(node, whole)
    if not (isinstance(start, int | float) and isinstance(step, int | float)):
        raise Unsupported("arange with dynamic fractions")

    def fraction(axes: Axes) -> Expression:
        # torch computes start + step * i in double before it rounds
        position = Position(indices.of_atom(axes[0]), torch.int64)
        wide = Operation("cast", (position,), torch.float64)
        line = apply("mul", number(step, wide), wide)
        line = apply("add", number(start, wide), line)
        return Operation("cast", (line,), dtype)

    return reader.result(node, fraction)


def _iota(reader: Reader, node: Node, length: Any, start: Any, step: Any, **_: Any) -> Value:
    return _arange(reader, node, start=start, step=step)


RULES: dict[str, Callable[..., Any]] = {
    **reductions.RULES,
    **variance.RULES,
    **data_movement.RULES,
    **random.RULES,
    **scans.RULES,
    "_to_copy": _cast,
    "convert_element_type": _cast,
    "clone": _clone,
    "contiguous": _clone,
    "lift_fresh_copy": _clone,
    "copy": _copy,
    "empty": _filled(0),
    "empty_like": _filled(0),
    "empty_strided": _filled(0),
    "empty_permuted": _filled(0),
    "new_empty": _filled(0),
    "new_empty_strided": _filled(0),
    "zeros": _filled(0),
    "ones": _filled(1),
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "new_zeros": _filled(0),
    "new_ones": _filled(1),
    "full": _full,
    "full_like": _full,
    "new_full": _full,
    "fill": _full,
    "scalar_tensor": _full,
    "arange": _arange,
    "iota": _iota,
}
