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
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Expression, Load, Operation, opmath_dtype
from fulgurite.fuser.ir.index import Axis, Index, Symbol, make_axes
from fulgurite.fuser.ir.index_rewrites import recombine_div_mod
from fulgurite.fuser.ir.statement import Tensor

Axes = tuple[Axis, ...]


def size_to_index(size: Any) -> Index:
    """Converts a size or SymInt of torch to an `Index` over named symbols."""
    if isinstance(size, int):
        return Index(size)
    return _sympy_to_index(size.node.expr)


def stride_to_index(stride: Any) -> Index:
    """Converts a stride of torch. Max(1, n) becomes n: strides of an empty tensor mean nothing."""
    if isinstance(stride, int):
        return Index(stride)
    return _sympy_stride_to_index(stride.node.expr)


def _sympy_stride_to_index(expression: Any) -> Index:
    if expression.func.__name__ == "Max" and len(expression.args) == 2:
        one, rest = sorted(expression.args, key=lambda part: not part.is_Integer)
        if one.is_Integer and int(one) == 1:
            return _sympy_stride_to_index(rest)
    if expression.is_Mul:
        return indices.product([_sympy_stride_to_index(part) for part in expression.args])
    return _sympy_to_index(expression)


def _sympy_to_index(expression: Any) -> Index:
    """Converts a sympy expression without sympy arithmetic, which is slow."""
    if expression.is_Integer:
        return Index(int(expression))
    if expression.is_Symbol:
        return indices.from_atom(Symbol(expression.name))
    if expression.is_Add:
        total = indices.ZERO
        for part in expression.args:
            total = total + _sympy_to_index(part)
        return total
    if expression.is_Mul:
        total = indices.ONE
        for part in expression.args:
            total = total * _sympy_to_index(part)
        return total
    if expression.is_Pow and expression.args[1].is_Integer and int(expression.args[1]) > 0:
        return indices.product([_sympy_to_index(expression.args[0])] * int(expression.args[1]))
    name = expression.func.__name__
    if name in ("FloorDiv", "CleanDiv"):
        return indices.floordiv(*map(_sympy_to_index, expression.args))
    if name in ("Mod", "PythonMod"):
        return indices.modulo(*map(_sympy_to_index, expression.args))
    raise Unsupported(f"the symbolic size {expression}")


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
    """Lowers view and reshape: the same elements, in row-major order, with other sizes."""
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
                    raise Unsupported(f"a reshape from {old} to {sizes}")
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
