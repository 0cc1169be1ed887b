"""Tensor values during lowering: expressions of axes, whose indices views rewrite.

In: fx metadata (FakeTensors, SymInts). Out: `TensorValue`s that lowerings combine. A value whose
expression is a single load is a view of memory; `find_strides` returns its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Load, Operation, opmath_dtype
from fulgurite.fuser.ir.index import Axis, Index, make_axes
from fulgurite.fuser.ir.index_rewrites import recombine_div_mod
from fulgurite.fuser.ir.statement import Tensor

Axes = tuple[Axis, ...]


def axis_indices(axes: Axes) -> list[Index]:
    """Returns the index of each axis."""
    return [indices.from_atom(axis) for axis in axes]


def canonicalize_dim(dim: int, rank: int) -> int:
    """Counts a negative dimension from the end."""
    return dim + rank if dim < 0 else dim


def make_cast(dtype: torch.dtype) -> Callable[[Expression, Axes], Expression]:
    """Returns a function that casts an expression to this opmath dtype."""

    def body(expression: Expression, axes: Axes) -> Expression:
        if opmath_dtype(expression.dtype) == dtype:
            return expression
        return Operation("cast", (expression,), dtype)

    return body


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor as an expression of its axes."""

    axes: tuple[Axis, ...]
    expression: Expression
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[Index, ...]:
        return tuple(axis.size for axis in self.axes)

    def load_at(self, index: Sequence[Index]) -> Expression:
        """Returns the element at an index."""
        return self.expression.substitute(dict(zip(self.axes, index, strict=True)))

    def broadcast_to(self, axes: tuple[Axis, ...]) -> Expression:
        """Returns the element at the axes of a result that this value broadcasts to."""
        skipped = len(axes) - len(self.axes)
        index = []
        for own, axis in zip(self.axes, axes[skipped:], strict=True):
            is_broadcast = own.size == 1 and axis.size != 1
            index.append(indices.ZERO if is_broadcast else indices.from_atom(axis))
        return self.load_at(index)

    def reindex(self, sizes: Sequence[Index], index_of: Any) -> TensorValue:
        """Returns the value whose element at axes `a` is this one's at `index_of(a)`."""
        axes = make_axes(sizes, "v")
        names = make_axes(sizes)
        renamed = self.load_at(index_of(tuple(indices.from_atom(axis) for axis in axes)))
        back = {old: indices.from_atom(new) for old, new in zip(axes, names, strict=True)}
        return TensorValue(names, renamed.substitute(back), self.dtype)


@dataclass(frozen=True, slots=True)
class ComplexValue:
    """A complex tensor as two real values over the same axes."""

    real: TensorValue
    imaginary: TensorValue
    dtype: torch.dtype


def negate(value: TensorValue) -> TensorValue:
    """Returns the negated value. Negated twice it is the same view of memory again."""
    inner = value.expression
    if isinstance(inner, Operation) and inner.name == "neg":
        return TensorValue(value.axes, inner.arguments[0], value.dtype)
    negated = Operation("neg", (inner,), opmath_dtype(inner.dtype))
    return TensorValue(value.axes, negated, value.dtype)


def contiguous_strides(sizes: Sequence[Index]) -> tuple[Index, ...]:
    """Returns row-major strides, for empty tensors too, whose torch strides may all be 0.

    With stride 0, no index would depend on the loop. The loop would be dropped, and its loads would
    run unconditionally.
    """
    inner = indices.ONE
    backwards: list[Index] = []
    for size in reversed(sizes):
        backwards.append(inner)
        inner = inner * size
    return tuple(reversed(backwards))


def load_tensor(tensor: Tensor) -> TensorValue:
    """Returns the value of a tensor in memory."""
    axes = make_axes(tensor.sizes)
    load = Load(tensor.name, tuple(indices.from_atom(a) for a in axes), tensor.dtype)
    return TensorValue(axes, load, tensor.dtype)


def find_strides(
    value: TensorValue, tensor: Tensor
) -> tuple[tuple[Index | None, ...], Index] | None:
    """Returns strides and offset of a value that is a strided view of `tensor`, otherwise None.

    The stride of a dimension with one element is None: any stride fits.
    """
    if not isinstance(value.expression, Load) or value.expression.dtype != value.dtype:
        return None
    offset = indices.ZERO
    for position, stride in zip(value.expression.index, tensor.strides, strict=True):
        offset = offset + position * stride
    offset = recombine_div_mod(offset)
    strides: list[Index | None] = []
    for axis in value.axes:
        coefficient = offset.coefficient(axis)
        if coefficient is None:
            return None
        offset = offset - indices.from_atom(axis) * coefficient
        strides.append(None if axis.size == 1 else coefficient)
    return None if offset.axes() else (tuple(strides), offset)


def reshape_value(value: TensorValue, sizes: tuple[Index, ...]) -> TensorValue:
    """Lowers view and reshape: the same elements, in row-major order, with other sizes.

    torch has checked that the numbers of elements are equal. With symbols, only it may know that.
    """
    old = value.sizes
    if any(size == 0 for size in (*sizes, *old)):
        return value.reindex(sizes, lambda new: tuple(indices.ZERO for _ in old))

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result: list[Index] = []
        i = j = 0
        while i < len(old) or j < len(sizes):
            # Find the smallest groups of old and new dimensions with the same product.
            old_group, new_group = [i], [j]
            i, j = i + 1, j + 1
            if i > len(old):
                old_group, i = [], len(old)
            if j > len(sizes):
                new_group, j = [], len(sizes)
            while True:
                left = indices.product([old[k] for k in old_group])
                right = indices.product([sizes[k] for k in new_group])
                if left == right:
                    break
                if i < len(old) and (j >= len(sizes) or _is_smaller(left, right)):
                    old_group.append(i)
                    i += 1
                elif j < len(sizes):
                    new_group.append(j)
                    j += 1
                elif i < len(old):
                    old_group.append(i)
                    i += 1
                else:
                    break  # equal by a guard
            result += _unravel_group(
                [old[k] for k in old_group],
                [new[k] for k in new_group],
                [sizes[k] for k in new_group],
            )
        return result

    return value.reindex(sizes, index_of)


def _is_smaller(left: Index, right: Index) -> bool:
    if left.is_constant and right.is_constant:
        return left.constant < right.constant
    return indices.divide_exactly(left, right) is None


def _unravel_group(old: list[Index], new: list[Index], new_sizes: list[Index]) -> list[Index]:
    """Converts the indices of the new dimensions of a group to those of the old ones."""
    flat = indices.ZERO
    for position, size in zip(new, new_sizes, strict=True):
        flat = flat * size + position
    result: list[Index] = []
    inner = indices.ONE
    for k in reversed(range(len(old))):
        position = indices.floordiv(flat, inner)
        result.append(position if k == 0 else indices.modulo(position, old[k]))
        inner = inner * old[k]
    if old and old[0] == 1:
        result[-1] = indices.ZERO
    return result[::-1]
