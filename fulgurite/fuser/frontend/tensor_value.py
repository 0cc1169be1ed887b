"""Values while a region is read: a tensor is an expression of its axes; a view rewrites the indices.

In flow fx metadata (FakeTensors, SymInts); out flow `Value`s that rules combine. A value whose
expression is a bare load is a window onto memory; `window` gives its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Load, Operation, value_type
from fulgurite.fuser.ir.index import Axis, Index, Symbol
from fulgurite.fuser.ir.index_rewrites import recombine
from fulgurite.fuser.ir.statement import Tensor

Axes = tuple[Axis, ...]


def from_size(size: Any) -> Index:
    """A size, stride or SymInt of torch as an Index over named symbols."""
    if isinstance(size, int):
        return Index(size)
    return _from_expression(size.node.expr)


def from_stride(stride: Any) -> Index:
    """A stride of torch. Where it is Max(1, n), it is n: for an empty tensor it has no meaning."""
    if isinstance(stride, int):
        return Index(stride)
    return _from_stride_expression(stride.node.expr)


def _from_stride_expression(expression: Any) -> Index:
    if expression.func.__name__ == "Max" and len(expression.args) == 2:
        one, rest = sorted(expression.args, key=lambda part: not part.is_Integer)
        if one.is_Integer and int(one) == 1:
            return _from_stride_expression(rest)
    if expression.is_Mul:
        return indices.product([_from_stride_expression(part) for part in expression.args])
    return _from_expression(expression)


def _from_expression(expression: Any) -> Index:
    """Reads a sympy expression without computing with it."""
    if expression.is_Integer:
        return Index(int(expression))
    if expression.is_Symbol:
        return indices.of_atom(Symbol(expression.name))
    if expression.is_Add:
        total = indices.ZERO
        for part in expression.args:
            total = total + _from_expression(part)
        return total
    if expression.is_Mul:
        total = indices.ONE
        for part in expression.args:
            total = total * _from_expression(part)
        return total
    if expression.is_Pow and expression.args[1].is_Integer and int(expression.args[1]) > 0:
        return indices.product([_from_expression(expression.args[0])] * int(expression.args[1]))
    name = expression.func.__name__
    if name in ("FloorDiv", "CleanDiv"):
        return indices.floordiv(*map(_from_expression, expression.args))
    if name in ("Mod", "PythonMod"):
        return indices.modulo(*map(_from_expression, expression.args))
    raise Unsupported(f"a dynamic size that is {expression}")


def fresh_axes(sizes: Sequence[Index], prefix: str = "i") -> tuple[Axis, ...]:
    return tuple(Axis(f"{prefix}{k}", size) for k, size in enumerate(sizes))


def positions(axes: Axes) -> list[Index]:
    return [indices.of_atom(axis) for axis in axes]


def dimension(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim + rank if dim < 0 else dim


def cast_to(dtype: torch.dtype) -> Callable[[Expression, Axes], Expression]:
    """A body for reductions and joins: the expression in this value type."""

    def body(expression: Expression, axes: Axes) -> Expression:
        if value_type(expression.dtype) == dtype:
            return expression
        return Operation("cast", (expression,), dtype)

    return body


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as a function of its axes."""

    axes: tuple[Axis, ...]
    expression: Expression
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[Index, ...]:
        return tuple(axis.size for axis in self.axes)

    def at(self, index: Sequence[Index]) -> Expression:
        return self.expression.substitute(dict(zip(self.axes, index, strict=True)))

    def broadcast(self, axes: tuple[Axis, ...]) -> Expression:
        """This value at the axes of a result it broadcasts to."""
        skipped = len(axes) - len(self.axes)
        index = []
        for own, axis in zip(self.axes, axes[skipped:], strict=True):
            repeats = own.size == 1 and axis.size != 1
            index.append(indices.ZERO if repeats else indices.of_atom(axis))
        return self.at(index)

    def view(self, sizes: Sequence[Index], index_of: Any) -> Value:
        """The value whose element at axes `a` is this one's at `index_of(a)`."""
        axes = fresh_axes(sizes, "v")
        names = fresh_axes(sizes)
        renamed = self.at(index_of(tuple(indices.of_atom(axis) for axis in axes)))
        back = {old: indices.of_atom(new) for old, new in zip(axes, names, strict=True)}
        return Value(names, renamed.substitute(back), self.dtype)


@dataclass(frozen=True, slots=True)
class Complex:
    """A complex tensor as two real ones over the same axes."""

    real: Value
    imaginary: Value
    dtype: torch.dtype


def dense_strides(sizes: Sequence[Index]) -> tuple[Index, ...]:
    """Strides of contiguous memory, and of nothing: those of an empty tensor may all be 0.

    A loop that no index depends on would be left out, and what it reads be read before it.
    """
    inner = indices.ONE
    backwards: list[Index] = []
    for size in reversed(sizes):
        backwards.append(inner)
        inner = inner * size
    return tuple(reversed(backwards))


def of_tensor(tensor: Tensor) -> Value:
    axes = fresh_axes(tensor.sizes)
    load = Load(tensor.name, tuple(indices.of_atom(a) for a in axes), tensor.dtype)
    return Value(axes, load, tensor.dtype)


def window(value: Value, tensor: Tensor) -> tuple[tuple[Index | None, ...], Index] | None:
    """Strides and offset of the memory a value is a window of, or None where it is not one.

    A stride is None where its axis has a single element and any stride would do.
    """
    if not isinstance(value.expression, Load) or value.expression.dtype != value.dtype:
        return None
    offset = indices.ZERO
    for position, stride in zip(value.expression.index, tensor.strides, strict=True):
        offset = offset + position * stride
    offset = recombine(offset)
    strides: list[Index | None] = []
    for axis in value.axes:
        step = offset.coefficient(axis)
        if step is None:
            return None
        offset = offset - indices.of_atom(axis) * step
        strides.append(None if axis.size == 1 else step)
    return None if offset.axes() else (tuple(strides), offset)


def reshape(value: Value, sizes: tuple[Index, ...]) -> Value:
    """view/reshape: the same elements in row-major order under other sizes."""
    old = value.sizes
    if any(size == 0 for size in (*sizes, *old)):
        return value.view(sizes, lambda new: tuple(indices.ZERO for _ in old))

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result: list[Index] = []
        i = j = 0
        while i < len(old) or j < len(sizes):
            # the smallest groups of old and new dimensions with the same product
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
                if i < len(old) and (j >= len(sizes) or _smaller(left, right)):
                    old_group.append(i)
                    i += 1
                elif j < len(sizes):
                    new_group.append(j)
                    j += 1
                elif i < len(old):
                    old_group.append(i)
                    i += 1
                else:
                    raise Unsupported(f"a reshape of {old} to {sizes}")
            result += _group(
                [old[k] for k in old_group],
                [new[k] for k in new_group],
                [sizes[k] for k in new_group],
            )
        return result

    return value.view(sizes, index_of)


def _smaller(left: Index, right: Index) -> bool:
    if left.is_constant and right.is_constant:
        return left.constant < right.constant
    return indices.divide_exactly(left, right) is None


def _group(old: list[Index], new: list[Index], new_sizes: list[Index]) -> list[Index]:
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
