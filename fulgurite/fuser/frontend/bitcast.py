"""Lowers view(dtype): the same bytes as elements of another dtype."""

from __future__ import annotations

import torch

from fulgurite.fuser.frontend.tensor_value import TensorValue, axis_indices
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    Constant,
    Expression,
    IndexValue,
    Operation,
    opmath_dtype,
)
from fulgurite.fuser.ir.index import Index, make_axes


def bitcast_value(
    value: TensorValue, source: torch.dtype, target: torch.dtype, sizes: tuple[Index, ...]
) -> TensorValue:
    """Reinterprets bytes, in little-endian order, as elements of another dtype."""
    if opmath_dtype(source).is_complex or opmath_dtype(target).is_complex:
        raise Unsupported("view(dtype) of a complex tensor")
    if source.itemsize == target.itemsize:
        return TensorValue(value.axes, _bitcast(value.expression, source, target), target)
    axes = make_axes(sizes)
    at = axis_indices(axes)
    if source.itemsize > target.itemsize:
        ratio = source.itemsize // target.itemsize
        wide = _bitcast(
            value.load_at([*at[:-1], indices.floordiv(at[-1], Index(ratio))]),
            source,
            INTEGER_OF_SIZE[source.itemsize],
        )
        part = indices.modulo(at[-1], Index(ratio)) * (8 * target.itemsize)
        shift = Operation("cast", (IndexValue(part, torch.int64),), wide.dtype)
        shifted = Operation("shift_right", (wide, shift), wide.dtype)
        narrow = Operation("cast", (shifted,), INTEGER_OF_SIZE[target.itemsize])
        return TensorValue(axes, _bitcast(narrow, narrow.dtype, target), target)
    ratio = target.itemsize // source.itemsize
    integer = INTEGER_OF_SIZE[target.itemsize]
    total: Expression = Constant(0, integer)
    for k in range(ratio):
        element = value.load_at([*at[:-1], at[-1] * ratio + k])
        part_bits = _bitcast(element, source, INTEGER_OF_SIZE[source.itemsize])
        widened = Operation("cast", (part_bits,), integer)
        mask = Constant((1 << 8 * source.itemsize) - 1, integer)
        masked = Operation("and", (widened, mask), integer)
        shifted = Operation(
            "shift_left", (masked, Constant(8 * source.itemsize * k, integer)), integer
        )
        total = Operation("or", (total, shifted), integer)
    return TensorValue(axes, _bitcast(total, integer, target), target)


INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bitcast(expression: Expression, source: torch.dtype, target: torch.dtype) -> Expression:
    if source == target or opmath_dtype(source) == target or source == opmath_dtype(target):
        return expression  # a packed format is bytes already
    if isinstance(expression, Operation) and expression.name == "bitcast":
        # Two bitcasts become one, so that no float in between can change a NaN's bits.
        first = expression.arguments[0]
        return first if first.dtype == target else Operation("bitcast", (first,), target)
    if source in NARROW_FLOATS:
        expression = Operation("cast", (expression,), source)
    return Operation("bitcast", (expression,), target)
