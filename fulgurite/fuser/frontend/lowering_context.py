"""What a region's nodes mean so far: the `Reader` that every rule gets.

In: calls of rules, one a node of an fx graph. Out: values of the nodes, and the statements they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fulgurite.fuser.frontend import tensor_value
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.frontend.tensor_value import Complex, Value, from_size, from_stride
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Constant, Expression, Operation, Position, value_type
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import Reduction, Scan, Statement, Tensor, statement

VALUE_TYPES = {
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
}


class Reader:
    """Values of the nodes read so far, and the statements they need."""

    def __init__(self, corrects: bool = False) -> None:
        # variances, for the rounding of their means: one more sum in a walk
        self.corrects = corrects
        self.values: dict[torch.fx.Node, Any] = {}
        self.statements: list[Statement] = []
        self.tensors: dict[str, Tensor] = {}
        self.writes: list[tuple[str, str]] = []  # a statement, and the input that gets its values
        self.origin = ""
        self.reading: torch.fx.Node | None = None
        self.maker: dict[str, torch.fx.Node | None] = {}  # the node that a statement was made for
        self.streams = 0
        self.part: str | None = None  # of complex numbers, the one that is being read

    # what rules call

    def value(self, node: Any) -> Value:
        found = self.values.get(node)
        if isinstance(found, Complex):
            if self.part is None:
                raise Unsupported("a complex number among real ones")
            return found.real if self.part == "real" else found.imaginary
        if not isinstance(found, Value):
            raise Unsupported("an argument that is not a tensor")
        return found

    def integer(self, argument: Any) -> Index:
        """An int argument of an op: a number, or a node that computes a dynamic size."""
        if isinstance(argument, torch.fx.Node):
            found = self.values[argument]
            if not isinstance(found, Index):
                raise Unsupported("a size that is not an integer")
            return found
        if isinstance(argument, torch.SymInt):
            return from_size(argument)
        return Index(int(argument))

    def sizes(self, arguments: Sequence[Any]) -> tuple[Index, ...]:
        return tuple(self.integer(argument) for argument in arguments)

    def next_stream(self) -> int:
        """A number for the next op that draws random numbers."""
        self.streams += 1
        return self.streams - 1

    def meta(self, node: torch.fx.Node) -> Any:
        return node.meta["val"]

    def store(
        self,
        name: str,
        dtype: torch.dtype,
        axes: tuple[indices.Axis, ...],
        expression: Expression,
        reduction: Reduction | None = None,
        strides: tuple[Index, ...] | None = None,
        scan: Scan | None = None,
        pairs: bool = False,
    ) -> Value:
        """Adds the statement name[axes] = expression."""
        empty = any(axis.size == 0 for axis in axes)
        if empty:  # no value of it is ever read: there is nothing to compute, and nothing to store
            expression, reduction, scan = constant(0, value_type(dtype)), None, None
        if strides is None or empty:
            strides = tensor_value.dense_strides([axis.size for axis in axes])
        while name in self.tensors:
            name += "_"
        # dimensions of one element, or of one in memory, are no loops: only the value has them
        kept = [k for k, axis in enumerate(axes) if axis.size != 1 and (empty or strides[k] != 0)]
        single = {axis: indices.ZERO for k, axis in enumerate(axes) if k not in kept}
        if single:
            expression = expression.substitute(single)
        if reduction is not None and any(axis.size == 0 for axis in reduction.axes):
            expression, reduction = of_none(reduction.kind, expression.dtype), None
        if reduction is not None:
            over = tuple(axis for axis in reduction.axes if axis.size != 1)
            ones = {axis: indices.ZERO for axis in reduction.axes if axis.size == 1}
            expression = expression.substitute(ones) if ones else expression
            if not over:
                expression = of_one(reduction.kind, expression)
            reduction = replace(reduction, axes=over) if over else None
        if scan is not None and scan.axis.size == 1:
            expression, scan = of_one(scan.kind, expression), None
        loops = tuple(axes[k] for k in kept)
        steps = tuple(strides[k] for k in kept)
        tensor = Tensor(name, dtype, tuple(a.size for a in loops), steps, pairs)
        self.tensors[name] = tensor
        self.maker[name] = self.reading
        self.statements.append(statement(tensor, loops, expression, reduction, self.origin, scan))
        value = tensor_value.of_tensor(tensor)
        if not single:
            return value
        return value.view([axis.size for axis in axes], lambda new: [new[k] for k in kept])

    def result(
        self, node: torch.fx.Node, expression_at: Any, fake: Any = None, part: str = ""
    ) -> Value:
        """A statement with the sizes, strides and dtype of the node, or of `fake`, a part of it."""
        fake = self.meta(node) if fake is None else fake
        sizes = tuple(from_size(size) for size in fake.shape)
        axes = tensor_value.fresh_axes(sizes)
        strides = tuple(from_stride(stride) for stride in fake.stride())
        expression = convert(expression_at(axes), fake.dtype)
        name = f"{node.name}_{part}" if part else node.name
        return self.store(name, fake.dtype, axes, expression, strides=strides)

    def operand(
        self, argument: Any, axes: tuple[indices.Axis, ...], dtype: torch.dtype
    ) -> Expression:
        """A tensor or number as an expression at the axes of a result, in a value type."""
        if isinstance(argument, torch.fx.Node):
            found = self.values[argument]
            if isinstance(found, Index):
                return convert(Position(found, torch.int64), dtype)
            return convert(self.value(argument).broadcast(axes), dtype)
        if isinstance(argument, torch.SymInt):
            return convert(Position(from_size(argument), torch.int64), dtype)
        if isinstance(argument, bool | int | float):
            return constant(argument, dtype)
        raise Unsupported(f"an argument {argument!r}")


def of_one(kind: str, expression: Expression) -> Expression:
    """What a reduction or scan of one element gives: sums start with 0, so that of -0 is 0."""
    dtype = value_type(expression.dtype)
    if kind != "sum" or not dtype.is_floating_point:
        return expression
    return Operation("add", (expression, Constant(0.0, dtype)), dtype)


def of_none(kind: str, dtype: torch.dtype) -> Expression:
    """What a reduction of nothing gives; of extremes there are those of bools, which are any and all."""
    dtype = value_type(dtype)
    if kind not in ("sum", "prod") and dtype != torch.bool:
        raise Unsupported(f"the {kind} of nothing")
    return constant(kind in ("prod", "min"), dtype)


def constant(number: float | int | bool, dtype: torch.dtype) -> Constant:
    if dtype.is_floating_point:
        return Constant(float(number), dtype)
    if dtype == torch.bool:
        return Constant(bool(number), dtype)
    if isinstance(number, float) and (number != number or number in (float("inf"), -float("inf"))):
        raise Unsupported(f"{number} as an integer")
    info = torch.iinfo(dtype)
    whole = int(number)
    if not info.min <= whole <= info.max:
        whole = (whole - info.min) % (info.max - info.min + 1) + info.min
    return Constant(whole, dtype)


def convert(expression: Expression, dtype: torch.dtype) -> Expression:
    """The expression in the value type of `dtype`; rounds only where value types differ."""
    if value_type(expression.dtype) == value_type(dtype):
        return expression
    if value_type(dtype) not in VALUE_TYPES:
        raise Unsupported(f"{dtype} values")
    if isinstance(expression, Constant):
        return constant(expression.value, value_type(dtype))
    return Operation("cast", (expression,), value_type(dtype))
